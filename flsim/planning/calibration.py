"""A short calibration of a plan: shortened copies of a few runs, trained as the sweep would train the runs.

Runs of a kind differ only in their length and in the size of their rounds. As many copies of a kind are trained at once
as the sweep would train runs, the largest and the smallest in turn. They start, train, evaluate and end beside copies
in the same stage, so the measured times include what runs take from each other.
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
from flsim.planning.cost import Need, Observed, fit
from flsim.planning.kinds import Copy, canaries_of, evaluated_otherwise, is_in_process, kind_of, shortened
from flsim.planning.monitor import Watch, watching
from flsim.results.evaluations import read_evaluations
from flsim.runs import roundlog
from flsim.runs.config import Config, dump
from flsim.sweeps.definition import Planned
from server.sweep import Job, train_all

TRIES = 50  # to remove a folder that processes which are about to end may still write to


@dataclass(frozen=True)
class Calibration:
    """The measurements of a calibration.

    Attributes:
        observed: measurements of the copies, by kind of run.
        before: seconds until the first run starts, and the extra seconds of its start compared with later ones.
        after: seconds from the end of the last run until everything has ended.
        seconds: duration of the calibration.
        watch: measurements of memory.
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
    """Return the copies to train, kind by kind, with at least two of a kind that has two sizes.

    If several are trained at once, a cluster starts first, together with the first copies. Their kind has more copies.

    Args:
        planned: all runs.
        at_once: function of a kind that returns how many of its runs train at the same time.
        words_a_user: words of a training user, on average.
        records_a_user: records of a training user, on average.
        vocabulary: number of token ids.
        device: torch device of federated training.
    """
    kinds: dict[str, list[Config]] = {}
    for run in planned:
        kinds.setdefault(kind_of(run.config), []).append(run.config)
    copies: list[Copy] = []
    for kind, configs in kinds.items():
        configs.sort(key=lambda config: config.round_size)
        both = [configs[-1], configs[0]]
        shorter = [shortened(kind, config, words_a_user, records_a_user, vocabulary, device) for config in both]
        if configs[0].round_size == configs[-1].round_size:
            shorter = shorter[:1]
        if others := evaluated_otherwise(shorter[-1], configs[0]):
            shorter = [shorter[0], *others]
        number_of_copies = max(at_once(kind), len(shorter))
        cold = 0 if copies or at_once(kind) == 1 else at_once(kind)
        for number, copy in enumerate(islice(cycle(shorter), cold + number_of_copies)):
            copies.append(replace(copy, is_cold=number < cold))
    return copies


def calibrate(
    copies: Sequence[Copy],
    need: Callable[[Config], Need],
    at_once: int | None = None,
    whole_cluster: bool = False,
) -> Calibration:
    """Train the copies in a temporary folder, which is removed in any case.

    Args:
        copies: the copies to train.
        need: function of a run's settings that returns what it holds of the machine.
        at_once: largest number of runs at once, as in the sweep.
        whole_cluster: whether runs are trained one after another, as in the sweep.

    Raises:
        RunFailed: a copy failed.
        InputError: as for `train_all`.
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

            for job in train_all(jobs, None, at_once, whole_cluster, look):
                if job.failure:
                    raise RunFailed(f"the measurement failed, so that nothing is predicted: {job.failure}")
                ended[job.name] = time.time()
                look()
        over = time.time()
        observed: dict[str, list[Observed]] = {}
        cold = list[float]()
        for name, copy in configs.items():
            path = folder / name
            in_process = is_in_process(copy.config, need(copy.config), whole_cluster)
            seen = observe(path, copy.config, watch.began[str(path)], ended[name], in_process)
            if copy.is_cold and seen.start is not None:
                cold.append(seen.start)
                seen = replace(seen, start=None)
            observed.setdefault(copy.kind, []).append(seen)
        before = min(watch.began.values()) - began
        before += max(0.0, statistics.mean(cold) - fit(observed[copies[0].kind]).start) if cold else 0.0
        return Calibration(observed, before, over - max(ended.values()), over - began, watch)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed after the block, even if processes that are about to end still write to it."""
    folder = Path(tempfile.mkdtemp(prefix="flsim-plan-"))
    try:
        yield folder
    finally:
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def observe(run: Path, config: Config, began: float, ended: float, in_process: bool = False) -> Observed:
    """Return the measurements of a copy from its folder.

    Args:
        run: the folder of a completed run with at least two evaluations.
        config: its settings.
        began: seconds since 1970 when its process started.
        ended: seconds since 1970 when its process ended.
        in_process: whether training waited for the first evaluation, in the same process.
    """
    lines = roundlog.read(run)
    trained = (run / roundlog.FILE).stat().st_mtime
    steps = [line["round"] - before["round"] for before, line in zip([{"round": 0}, *lines], lines, strict=False)]
    seconds = [line["seconds"] / count for line, count in zip(lines, steps, strict=True)]
    at_least = [line["round"] for line in lines].index(_first_due(config)) if len(lines) > 2 else 1
    rounds = seconds[1:at_least] or seconds[1:] or seconds
    typical = statistics.median(rounds)
    evaluations = sorted(
        (attempt for attempt in read_evaluations(run) if attempt.outcome == "stored"), key=lambda attempt: attempt.ended
    )
    first, last = evaluations[0], evaluations[-1]
    sizes = [line["users"] for line in lines] if config.has_a_line_per_round else [config.round_size]
    start = trained - sum(line["seconds"] for line in lines) - began + (seconds[0] - typical) * steps[0]
    start -= first.seconds if in_process else 0.0
    private = config.privacy.mechanism == "dp" and len(seconds) > 2
    return Observed(
        size=float(statistics.median(sizes)),
        start=max(0.0, start),
        rounds=tuple(rounds),
        pause=max(0.0, (seconds[at_least] - typical) * steps[at_least]) if private else 0.0,
        first_evaluation=first.seconds if in_process else max(0.0, last.ended - trained - last.seconds),
        evaluation=last.seconds,
        end=max(0.0, ended - last.ended),
        canaries=canaries_of(config),
        references=config.evaluation.references,
    )


def _first_due(config: Config) -> int:
    return config.evaluation.every


def _done(runs: Iterable[Path]) -> float:
    """Return how many of the runs are done, as a sum of fractions that their files show."""
    marks = ("config.toml", roundlog.FILE, "rows", "evaluations.jsonl")
    return sum(sum((run / mark).exists() for mark in marks) / (len(marks) + 1) for run in runs)
