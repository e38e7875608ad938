"""A search for settings: trials are trained like runs of a sweep, in shares of their length.

A killed search continues when it is repeated: perplexities are read from run folders. The order in which runs end does
not affect choices, because all trials of a share are compared together.
"""

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.data.corpus import Split
from flsim.runs.config import Config
from flsim.runs.sweeps.definition import training_digest
from flsim.runs.sweeps.folder import TUNED
from flsim.runs.sweeps.screen import Screen
from flsim.runs.sweeps.search import Group, GroupOutcome, Trial, TuningOutcome, middle, search
from flsim.runs.sweeps.tuning import OBJECTIVE, Search, TuningFolder, shortened
from server.sweep import Job, train_all

Measured = tuple[str, Config, int]  # a run: its name, its settings, and the number of rounds after which it is measured


@dataclass(frozen=True)
class Tuner:
    """A search for the settings of all groups, whose trials train at the same time."""

    folder: TuningFolder  # its folder; measured trials in it are not trained again
    search: Search
    train: Split
    address: str | None = None  # address, at_once: see `server.sweep.train_all`
    at_once: int | None = None

    def tune(self, corpus: str) -> TuningOutcome:
        """Search for the settings of all groups, write the result into the folder, and return it.

        Raises InputError if the folder has another search; RunFailed if a run or all trials failed, or the best value
        is at an edge.
        """
        groups, tuning = self.search.groups(), self.search.tuning
        first = [run for group in groups for run in self.search.runs_of(group, 0, middle(group.ranges))]
        digest = self.search.digest(first, self.train, corpus)
        self.folder.begin(self.search, digest)
        searched = {name for group in groups for name in group.ranges}
        tuned = TuningOutcome(
            title=self.search.definition.title,
            tier=self.search.tier_name,
            training=training_digest(self.search.definition, self.search.tier, searched),
            search=digest,
            objective=OBJECTIVE,
            method=tuning.method,
            trials=tuning.trials,
            halving=tuning.halving,
            runs=len(first) // len(groups),
            by=tuning.by,
            seeds=tuning.seeds,
            corpus=corpus,
            has_own_corpus=self.search.at.corpus is not None or self.search.at.corpus_seed is not None,
            groups=self._outcomes(groups),
        )
        tuned.write(self.folder.path / TUNED)
        return tuned

    def _outcomes(self, groups: Sequence[Group]) -> tuple[GroupOutcome, ...]:
        """Search for the values of all groups, which train the next share of their trials together."""
        searches = {group.name: self._search(group) for group in groups}
        requested = {group.name: (group, *next(searches[group.name])) for group in groups}
        outcomes = dict[str, GroupOutcome]()
        while requested:
            runs = {
                name: [self._runs(group, number, trial, share) for number, trial in trials.items()]
                for name, (group, share, trials) in requested.items()
            }
            self._train_missing([run for trials in runs.values() for of_trial in trials for run in of_trial])
            for name, (group, _, _) in list(requested.items()):
                try:
                    requested[name] = group, *searches[name].send(list(map(self._perplexity, runs[name])))
                except StopIteration as end:
                    outcomes[name] = end.value
                    del requested[name]
                    say(_chosen(outcomes[name]))
        return tuple(outcomes[group.name] for group in groups)

    def _search(self, group: Group) -> Generator[tuple[float, dict[int, Trial]], list[float], GroupOutcome]:
        # Groups of a grid draw the same values, so that the partitions are tuned equally.
        rng = stream(self.search.tuning.seeds[0], "tuning", group.grid)
        return search(group, self.search.tuning, rng, lambda values: self.search.is_possible(group, values))

    def _runs(self, group: Group, number: int, trial: Trial, share: float) -> list[Measured]:
        """Return the runs of a trial up to a share of their length, each with its number of rounds."""
        runs = self.search.runs_of(group, number, trial.values)
        return [(run.name, *shortened(run.config, share, self.train)) for run in runs]

    def _perplexity(self, runs: Sequence[Measured]) -> float:
        """Return the geometric mean of perplexity over the runs of a trial; infinite if one diverged."""
        perplexities = [self.folder.perplexity(name, rounds) or math.inf for name, _, rounds in runs]
        return math.exp(sum(map(math.log, perplexities)) / len(perplexities))

    def _train_missing(self, runs: Sequence[Measured]) -> None:
        folder = self.folder
        rounds = {name: rounds for name, _, rounds in runs if folder.perplexity(name, rounds) is None}
        if len(rounds) < len(runs):
            say(f"{folder.path}: {len(runs) - len(rounds)} of {len(runs)} runs are measured")
        if not rounds:
            return
        jobs = [
            Job(name, config, file=folder.write_config(name, config), out=folder.run(name), log=folder.log(name))
            for name, config, _ in sorted(runs, key=lambda run: -run[2] * run[1].round_size)
            if name in rounds
        ]
        failed, remaining = dict[str, str](), len(jobs)
        with Screen(folder, [job.name for job in jobs], time.time()).live() as screen:
            for ended in train_all(jobs, self.address, self.at_once, self.search.tier.whole_cluster, screen.look):
                remaining -= 1
                if folder.perplexity(ended.name, rounds[ended.name]) is None:
                    failed[ended.name] = ended.failure or "it was not measured"
                screen.ended(ended.name, failed.get(ended.name), remaining)
        if failed:
            name, why = next(iter(failed.items()))
            raise RunFailed(
                f"{len(failed)} of {len(jobs)} runs failed, the first {name}: {why}; read {folder.log(name)}, and "
                f"repeat the command to try again"
            )


def _chosen(outcome: GroupOutcome) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in outcome.values.items())
    limit = (
        "; trials at an adjacent value diverged, so stability is the limit" if outcome.is_limited_by_stability else ""
    )
    return f"{outcome.name}: {values}, perplexity {outcome.perplexity:.2f}, of {len(outcome.trials)} trials{limit}"
