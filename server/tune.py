"""A search for settings: trials trained as the runs of a sweep, a share of their length at a time.

The search itself is a function of losses (`flsim.sweeps.search`), and losses are read from run folders. So a search
that was killed goes on by asking again: what is measured is not trained again.
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
from flsim.sweeps.definition import Planned, training_digest
from flsim.sweeps.screen import Screen
from flsim.sweeps.search import Outcome, Trial, search
from flsim.sweeps.tuned import Tuned, TunedGroup, TunedTrial
from flsim.sweeps.tuning import OBJECTIVE, Group, Search, loss_after, shortened
from flsim.sweeps.tuning_folder import TuningFolder
from server.sweep import Job, train_all

Steps = Generator[list[tuple[Trial, int]], list[float], Outcome]


@dataclass(frozen=True)
class Measurement:
    """A measurement of a run of a trial.

    Attributes:
        run: the run.
        config: its settings until then.
        rounds: number of rounds after which it is measured.
    """

    run: Planned
    config: Config
    rounds: int


class Tuner:
    """A search for the settings of all groups, whose trials train beside each other."""

    def __init__(
        self,
        folder: TuningFolder,
        search: Search,
        train: Split,
        address: str | None = None,
        at_once: int | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            folder: its folder.
            search: the search.
            train: the train split of its corpus.
            address, at_once: see `server.sweep.train_all`.
        """
        self._folder, self._search, self._train = folder, search, train
        self._address, self._at_once = address, at_once

    def outcomes(self, groups: Sequence[Group]) -> dict[str, Outcome]:
        """Search for the values of all groups, and return the outcomes by group.

        Raises:
            InputError: see `server.sweep.train_all`.
            RunFailed: a run failed, all trials of a group diverged, or the best value of a group is at an edge.
        """
        steps = {group.name: self._steps(group) for group in groups}
        by_name, outcomes = {group.name: group for group in groups}, dict[str, Outcome]()
        waiting = {name: next(steps_of_group) for name, steps_of_group in steps.items()}
        while waiting:
            measured = {
                (name, trial.number): self._measurements(by_name[name], trial, rung)
                for name, trials in waiting.items()
                for trial, rung in trials
            }
            self._train_missing([part for parts in measured.values() for part in parts])
            for name, trials in list(waiting.items()):
                losses = [self._loss(measured[name, trial.number]) for trial, _ in trials]
                try:
                    waiting[name] = steps[name].send(losses)
                except StopIteration as end:
                    outcomes[name] = end.value
                    del waiting[name]
                    say(f"{name}: {_chosen(outcomes[name])}")
                except RunFailed as error:
                    raise RunFailed(f"group {name}: {error}") from error
        return {group.name: outcomes[group.name] for group in groups}

    def _steps(self, group: Group) -> Steps:
        # Groups of a grid draw the same values, so that the worlds are tuned alike.
        rng = stream(self._search.tuning.seeds[0], "tuning", group.grid)
        return search(self._search.tuning, group.ranges, rng, lambda values: self._search.is_possible(group, values))

    def _measurements(self, group: Group, trial: Trial, rung: int) -> list[Measurement]:
        share = self._search.tuning.halving[rung]
        runs = self._search.runs_of(group, trial)
        return [Measurement(run, *shortened(run.config, share, self._train)) for run in runs]

    def _loss(self, measurements: Sequence[Measurement]) -> float:
        """Return the mean logarithm of perplexity; raise RunFailed where a run is not measured."""
        losses = [loss_after(self._folder.run(part.run.name), part.rounds) for part in measurements]
        return sum(math.inf if loss is None else loss for loss in losses) / len(losses)

    def _train_missing(self, measurements: Sequence[Measurement]) -> None:
        """Train the runs that are not measured yet."""
        folder = self._folder
        missing = [part for part in measurements if loss_after(folder.run(part.run.name), part.rounds) is None]
        if len(missing) < len(measurements):
            say(f"{folder.path}: {len(measurements) - len(missing)} of {len(measurements)} runs are measured")
        if not missing:
            return
        jobs = [
            Job(
                part.run.name,
                part.config,
                folder.write_config(part.run.name, part.config),
                folder.run(part.run.name),
                folder.log(part.run.name),
            )
            for part in sorted(missing, key=lambda part: -part.rounds * part.config.round_size)
        ]
        rounds = {part.run.name: part.rounds for part in missing}
        failed, left = dict[str, str](), len(jobs)
        with Screen(folder, [job.name for job in jobs], time.time()).live() as screen:
            for ended in train_all(jobs, self._address, self._at_once, self._search.tier.whole_cluster, screen.look):
                left -= 1
                if loss_after(folder.run(ended.name), rounds[ended.name]) is None:
                    failed[ended.name] = ended.failure or "it was not measured"
                screen.ended(ended.name, failed.get(ended.name), left)
        if failed:
            name, why = next(iter(failed.items()))
            raise RunFailed(
                f"{len(failed)} of {len(jobs)} runs failed, the first {name}: {why}; read {folder.log(name)}, and "
                f"repeat the command to try again"
            )


def tune(
    folder: TuningFolder,
    search: Search,
    train: Split,
    corpus: str,
    address: str | None = None,
    at_once: int | None = None,
) -> Tuned:
    """Search for the settings of all groups, write the outcome into the folder, and return it.

    Args:
        folder: folder of the search; what is measured in it is not trained again.
        search: the search.
        train: the train split of its corpus.
        corpus: digest of its corpus.
        address, at_once: see `server.sweep.train_all`.

    Raises:
        InputError: the folder has another search, or see `server.sweep.train_all`.
        RunFailed: see `Tuner.outcomes`.
    """
    groups = search.groups()
    middle = [run for group in groups for run in search.runs_of(group, _in_the_middle(group))]
    digest = search.digest(middle, train, corpus)
    folder.begin(search, digest)
    outcomes = Tuner(folder, search, train, address, at_once).outcomes(groups)
    tuning = search.tuning
    tuned = Tuned(
        title=search.definition.title,
        tier=search.tier_name,
        training=training_digest(search.definition, search.tier, {name for group in groups for name in group.ranges}),
        search=digest,
        objective=OBJECTIVE,
        method=tuning.method,
        trials=tuning.trials,
        halving=tuning.halving,
        runs=len(middle) // len(groups),
        by=tuning.by,
        seeds=tuning.seeds,
        corpus=corpus,
        has_own_corpus=search.at.corpus is not None or search.at.corpus_seed is not None,
        groups=tuple(_tuned_group(group, outcomes[group.name]) for group in groups),
    )
    tuned.write(folder.outcome)
    return tuned


def _in_the_middle(group: Group) -> Trial:
    return Trial(0, {name: range_.at(0.5) for name, range_ in group.ranges.items()})


def _tuned_group(group: Group, outcome: Outcome) -> TunedGroup:
    trials = tuple(TunedTrial(trial.values, tuple(map(math.exp, trial.losses))) for trial in outcome.trials)
    best = outcome.best
    return TunedGroup(
        group.name, group.grid, group.axes, best.values, math.exp(best.losses[-1]), outcome.widenings, trials
    )


def _chosen(outcome: Outcome) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in outcome.best.values.items())
    return f"{values}, perplexity {math.exp(outcome.best.losses[-1]):.2f}, of {len(outcome.trials)} trials"
