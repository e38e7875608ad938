"""A short calibration: copies of a few runs, shortened, trained by the machinery and with the concurrency of the sweep.

Runs of a kind differ only in their length and in the size of their rounds. Of each kind as many are trained at once as
the sweep would have at once, the largest and the smallest in turn, so that they start, train, evaluate and end beside
runs in the same stage: whatever they take from each other is in what is measured.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from flsim.base.errors import RunFailed
from flsim.base.progress import progress
from flsim.planning.cost import Observed, fit
from flsim.planning.kinds import Copy, kind_of, shortened
from flsim.planning.monitor import Watch, watching
from flsim.results.evaluations import read_evaluations
from flsim.runs import roundlog
from flsim.runs.config import Config, dump
from flsim.sweeps.definition import Planned
from server.sweep import Job, train_all

TRIES = 50  # to remove a folder that processes which are about to end may still write to


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        observed: kind of run -> its copies.
        before: seconds until the first run starts, and what its start took longer than those of later ones.
        after: seconds from the end of the last run until all is over.
        seconds: that the calibration took.
        watch: memory.
    """

    observed: Mapping[str, Sequence[Observed]]
    before: float
    after: float
    seconds: float
    watch: Watch


def copies_of(
    planned: Sequence[Planned],
    at_once: Callable[[str], int],
    words_a_user: float,
    records_a_user: float,
    vocabulary: int,
    device: str = "cpu",
) -> list[Copy]:
    """The copies to train, kind by kind; at least two of a kind that has two sizes.

    Where several are trained at once, a cluster starts first, and the first copies with it: their kind has more.

    Args:
        planned: all runs.
        at_once: kind -> runs of it at the same time.
        words_a_user, records_a_user: of the training users, on average.
        vocabulary: number of token ids.
        device: of federated training.
    """
    kinds: dict[str, list[Config]] = {}
    for each in planned:
        kinds.setdefault(kind_of(each.config), []).append(each.config)
    copies: list[Copy] = []
    for kind, configs in kinds.items():
        configs.sort(key=lambda config: config.round_size)
        both = [configs[-1], configs[0]]
        wanted = max(at_once(kind), 1 if configs[0].round_size == configs[-1].round_size else 2)
        cold = 0 if copies or at_once(kind) == 1 else at_once(kind)
        for number, config in enumerate(islice(cycle(both), cold + wanted)):
            copy = shortened(kind, config, words_a_user, records_a_user, vocabulary, device)
            copies.append(replace(copy, is_cold=number < cold))
    return copies


def calibrate(copies: Sequence[Copy], at_once: int | None = None, whole_cluster: bool = False) -> Calibration:
    """Train the copies in a folder that is gone afterwards, however this ends.

    Args:
        copies: what to train.
        at_once, whole_cluster: as of the sweep.

    Raises:
        RunFailed: a copy failed.
        InputError: as `train_all`.
    """
    with scratch() as folder:
        jobs, configs = [], {}
        for number, copy in enumerate(copies):
            name = f"copy{number}"
            dump(copy.config, folder / f"{name}.toml")
            paths = (folder / f"{name}.toml", folder / name, folder / f"{name}.log")
            jobs.append(Job(name, copy.config, *paths))
            configs[name] = copy
        ended: dict[str, float] = {}
        began = time.time()
        with progress("measuring shortened runs", len(jobs), unit="runs") as advance, watching() as watch:

            def look() -> None:
                advance(len(ended) + _done(folder / name for name in configs if name not in ended))

            try:
                for each in train_all(jobs, None, at_once, whole_cluster, look):
                    if each.failure:
                        raise RunFailed(f"the measurement failed, so that nothing is predicted: {each.failure}")
                    ended[each.name] = time.time()
                    look()
            except RunFailed as error:
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise KeyboardInterrupt from None
                raise
        over = time.time()
        observed: dict[str, list[Observed]] = {}
        cold = list[float]()
        for name, copy in configs.items():
            path = folder / name
            seen = observe(path, copy.config, watch.began[str(path)], ended[name])
            if copy.is_cold and seen.start is not None:
                cold.append(seen.start)
                seen = replace(seen, start=None)
            observed.setdefault(copy.kind, []).append(seen)
        before = min(watch.began.values()) - began
        before += max(0.0, statistics.mean(cold) - fit(observed[copies[0].kind]).start) if cold else 0.0
        return Calibration(observed, before, over - max(ended.values()), over - began, watch)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone after the block, also where processes that are about to end still write to it."""
    folder = Path(tempfile.mkdtemp(prefix="flsim-plan-"))
    try:
        yield folder
    finally:
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def observe(run: Path, config: Config, began: float, ended: float) -> Observed:
    """What a copy took, from its folder.

    Args:
        run: the folder of a run that is completed and had two evaluations, or more.
        config: its settings.
        began, ended: seconds since 1970 when its process started and ended.
    """
    lines = roundlog.read(run)
    trained = (run / roundlog.FILE).stat().st_mtime
    steps = [line["round"] - before["round"] for before, line in zip([{"round": 0}, *lines], lines, strict=False)]
    seconds = [line["seconds"] / count for line, count in zip(lines, steps, strict=True)]
    at_least = [line["round"] for line in lines].index(_first_due(config)) if len(lines) > 2 else 1
    rounds = seconds[1:at_least] or seconds[1:] or seconds
    typical = statistics.median(rounds)
    evaluations = sorted(
        (each for each in read_evaluations(run) if each.outcome == "stored"), key=lambda each: each.ended
    )
    last = evaluations[-1]
    sizes = [line["users"] for line in lines] if config.has_a_line_per_round else [config.round_size]
    start = trained - sum(line["seconds"] for line in lines) - began + (seconds[0] - typical) * steps[0]
    private = config.privacy.mechanism == "dp" and len(seconds) > 2
    return Observed(
        size=float(statistics.median(sizes)),
        start=max(0.0, start),
        rounds=tuple(rounds),
        pause=max(0.0, (seconds[at_least] - typical) * steps[at_least]) if private else 0.0,
        first_evaluation=max(0.0, last.ended - trained - last.seconds),
        evaluation=last.seconds,
        end=max(0.0, ended - last.ended),
    )


def _first_due(config: Config) -> int:
    return config.evaluation.every


def _done(runs: Iterable[Path]) -> float:
    """How much of the runs is done, in runs: as far as their files say."""
    marks = ("config.toml", roundlog.FILE, "rows", "evaluations.jsonl")
    return sum(sum((run / mark).exists() for mark in marks) / (len(marks) + 1) for run in runs)
