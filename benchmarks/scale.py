"""Benchmark of the data side at the size of the paper: 392,000 users of 2,000 words, 90 canaries, cohorts of 5,000.

Memory is that of this process and all its children (`flsim.base.machine`).
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.machine import PeakMemory
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.canaries.planting import Planting, draw_canaries, plant
from flsim.canaries.population import Partition, Population, open_population, write_population
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus, Split
from flsim.data.synthetic import SyntheticHParams, make_synthetic

PAPER_USERS = 392_000
COHORT = 5_000
ROUNDS = 7
SAMPLE_EVERY = 0.25  # seconds; a sample reads the mapped pages, which delays a process that maps more
PARTITIONS: tuple[Partition, ...] = ("non-iid", "iid")
DRAWS = 10_000  # of all sharers and insertions, for the range of their extremes
# Fewest and most over the 90 canaries, at 392,000 users: Thakkar et al. (2020), section 4.1, "Canary Insertion".
PUBLISHED = {
    "fewest sharers of a canary": 4,
    "most sharers of a canary": 103,
    "fewest insertions of a canary": 13,
    "most insertions of a canary": 24_500,
}


def bench_scale(users: int = PAPER_USERS) -> dict[str, Any]:
    """Make a synthetic corpus, plant the paper's canaries, make and open both partitions, and read cohorts.

    A cohort is cold if no file of the corpus is in the system's cache, and warm if all are. All cohorts have different
    users. The benchmark needs about 5 GB of disk for 392,000 users, in the folder for temporary files.

    Args:
        users: number of training users.

    Returns:
        Counts, extremes of what was planted, bytes on disk, and the seconds and peak memory in bytes of each step.

    Raises:
        InputError: see `PeakMemory`.
    """
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as name:
        folder = Path(name)
        steps: dict[str, Any] = {}
        with _step(steps, "make the corpus"):
            hparams = SyntheticHParams(users=users, words_per_user=2_000, vocabulary_size=10_000)
            corpus = make_synthetic(folder / "corpus", hparams, seed=0)
        with _step(steps, "draw the canaries"):
            canaries = draw_canaries(corpus, CanaryHParams(), seed=0)
        with _step(steps, "plant them"):
            planting = plant(corpus.split("train"), canaries, seed=0)
        for partition in PARTITIONS:
            _bench_partition(folder, corpus, planting, partition, steps)
        train = corpus.split("train")
        return {
            "users": len(train),
            "records": train.records,
            "words": train.words,
            "canaries": len(canaries),
            "insertions": len(planting.overlay.records),
            "planted": _extremes_beside_published(planting, train),
            "cohort": min(COHORT, users),
            "bytes": {name: _bytes(folder / name) for name in ("corpus", *PARTITIONS)},
            "steps": steps,
        }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    size = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in measured["bytes"].items())
    lines = [
        f"{measured['users']:,} users, {measured['records']:,} records, {measured['words']:,} words; "
        f"{measured['canaries']} canaries replace {measured['insertions']:,} records",
        f"on disk: {size}",
        *_planted_to_text(measured),
        f"{'':<42} {'seconds':>9} {'own memory':>12} {'mapped files':>13}",
    ]
    for name, step in measured["steps"].items():
        own, mapped = (f"{step[f'peak_{kind}_bytes'] / 1e6:,.0f} MB" for kind in ("anonymous", "file"))
        lines.append(f"{name:<42} {step['seconds']:>9.3f} {own:>12} {mapped:>13}")
    return "\n".join(lines)


def extremes(sharers: NDArray[np.int64], insertions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the four numbers that `PUBLISHED` names, int64 [4, ...], over the last axis, which is of canaries."""
    return np.stack([sharers.min(-1), sharers.max(-1), insertions.min(-1), insertions.max(-1)])


def drawn_extremes(canaries: Sequence[Canary], users: int, records: int, draws: int = DRAWS) -> NDArray[np.int64]:
    """Draw the extremes of the paper's law, int64 [4, draws]: sharers are binomial, and so are their insertions.

    Assumes the same number of records for all users, and no record with two canaries.
    """
    rng = stream(0, "benchmark extremes")
    p_u, p_e = (np.array([getattr(canary, name) for canary in canaries]) for name in ("p_u", "p_e"))
    sharers = rng.binomial(users, p_u, (draws, len(canaries)))
    return extremes(sharers, rng.binomial(np.rint(sharers * (records / users)).astype(np.int64), p_e))


def _extremes_beside_published(planting: Planting, train: Split) -> dict[str, dict[str, Any]]:
    """Return, for each extreme, its value here, the range of 99% of draws, and the published value."""
    planted = extremes(planting.sharers, planting.insertions)
    drawn = drawn_extremes(planting.canaries, len(train), train.records)
    ranges = np.quantile(drawn, [0.005, 0.995], axis=1, method="closest_observation").T.astype(np.int64)
    is_published_size = len(train) == PAPER_USERS
    return {
        name: {"here": value, "range": range_, "published": published if is_published_size else None}
        for (name, published), value, range_ in zip(PUBLISHED.items(), planted.tolist(), ranges.tolist(), strict=True)
    }


def _planted_to_text(measured: dict[str, Any]) -> list[str]:
    planted = measured["planted"]
    has_published = any(row["published"] is not None for row in planted.values())
    lines = [f"{'planted':<42} {'here':>9} {'99% of drawings':>18}" + f" {'published':>12} within" * has_published]
    for name, row in planted.items():
        low, high = row["range"]
        line = f"{name:<42} {row['here']:>9,} {f'{low:,} to {high:,}':>18}"
        if row["published"] is not None:
            line += f" {row['published']:>12,} {'yes' if low <= row['published'] <= high else 'no'}"
        lines.append(line)
    return lines


def _bench_partition(
    folder: Path, corpus: Corpus, planting: Planting, partition: Partition, steps: dict[str, Any]
) -> None:
    (folder / partition).mkdir()
    with _step(steps, f"{partition}: make the population"):
        write_population(folder / partition, corpus, planting, partition, seed=0)
    for state, rounds in (("cold", range(1)), ("warm", range(1, 1 + ROUNDS))):
        _cache(folder, forget=state == "cold")
        with _step(steps, f"{partition}: open it {state}"):
            population, _ = open_population(folder / partition, corpus)
        seconds = []
        what = f"{partition}: read a cohort {state}"
        with _step(steps, what):
            for round_ in rounds:
                began = time.perf_counter()
                _read_cohort(population, round_)
                seconds.append(time.perf_counter() - began)
        steps[what] |= {"seconds": statistics.median(seconds), "rounds": len(seconds)}
        del population  # a file that is mapped stays in the cache


def _read_cohort(population: Population, round_: int) -> None:
    """Draw users without replacement, and read all of their tokens."""
    rng = stream(0, "benchmark cohort", round_)
    for user in rng.choice(len(population), min(COHORT, len(population)), replace=False).tolist():
        population[user].tokens.max(initial=0)


def _cache(folder: Path, forget: bool) -> None:
    """Load all files of the folder into the system's cache, or drop them from it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if forget:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while not forget and file.read(2**20):
                    pass


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _step(steps: dict[str, Any], name: str) -> Iterator[None]:
    """Measure seconds and peak memory of the block."""
    say(name)
    began = time.perf_counter()
    with PeakMemory(os.getpid()) as peak:
        yield
    seconds = time.perf_counter() - began
    steps[name] = {"seconds": seconds, "peak_anonymous_bytes": peak.anonymous, "peak_file_bytes": peak.file}
