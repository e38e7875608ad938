"""Benchmark of the cohort engine on a device, by size of the micro-cohort and precision, for tuning on a GPU.

    python -m benchmarks.engine --device cuda --profile

The benchmark needs only torch and numpy, and generates its users.
"""

import argparse
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from flsim.base.errors import first_line
from flsim.base.rng import stream
from flsim.data.records import Layout, Records, Users
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import Params, representative
from flsim.training.cohort.engine import GRAPHS, CohortEngine, StackedTrainer
from flsim.training.cohort.packing import PackedGroup, Participant, pack_users
from flsim.training.update import LocalHParams, Precision

LAYOUT = Layout(10_000)
USER_WORDS = 2_000
CLIP = 0.2
ROUNDS = 5  # number of measured rounds on a GPU, where a round takes less than a second
FULL = ModelHParams()
Packed = TypeVar("Packed")


class DrawnUsers:
    """Users with Zipf words and records of log-normal lengths, with a mean of 8 words, cut at the longest record.

    Args:
        users: number of users.
        spread: standard deviation of the logarithm of a user's number of words, with a median of 2,000. It is 0 for
            balanced users as in the paper, and 1 or more for a real population.
        words: the median of a user's number of words; None for 2,000.
        layout: the tokens; None for a vocabulary of 10,000.
    """

    layout = LAYOUT

    def __init__(self, users: int, spread: float = 0.0, words: int | None = None, layout: Layout | None = None) -> None:
        self._users, self._spread, self._words = users, spread, words or USER_WORDS
        self.layout = layout or self.layout

    def __len__(self) -> int:
        return self._users

    def __getitem__(self, user: int) -> Records:
        rng = stream(0, "bench engine", user)
        words = int(self._words * np.exp(self._spread * rng.normal()))
        lengths = np.exp(rng.normal(1.95, 0.6, words)).astype(np.int64).clip(1, self.layout.record_words)
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), words)) + 1]
        tokens = rng.zipf(1.3, int(lengths.sum())) % self.layout.words + self.layout.first_word
        return Records(tokens.astype(np.uint16), np.concatenate(([0], np.cumsum(lengths))))


def bench_engine(
    device: str,
    micro_cohorts: Sequence[int],
    precisions: Sequence[Precision],
    cohort: int = 1024,
    spread: float = 0.0,
    profile: bool = False,
    words: int | None = None,
    sizes: ModelHParams = FULL,
) -> dict[str, Any]:
    """Measure users per second of complete rounds (reading, packing, training, clipping, summing), and of their parts.

    The first round, which compiles kernels and captures graphs, does not count. On a GPU the seconds are the median of
    the next five, because pinned memory for packed users is allocated in the first few rounds.

    Args:
        device: "cuda" or "cpu".
        micro_cohorts: numbers of users that train at once.
        precisions: precisions of `LocalHParams`.
        cohort: users in a round.
        spread: spread of `DrawnUsers`.
        profile: whether torch's profiler reports the time of a micro-cohort by operation, without graphs.
        words: words of a user; None for 2,000.
        sizes: sizes of the model.

    Returns:
        ``device``, ``unit``, and ``rows`` with ``micro_cohort``, ``precision``, ``users_per_second``,
        ``training_alone`` (users already packed), ``packing_alone`` (the work of the engine's packing thread: choose
        the order of records, lay out and pack), ``peak_gigabytes`` of the device's memory, ``said_gigabytes`` (the
        estimate of `StackedTrainer.memory`), and ``profile`` if requested.
    """
    start = start_of(torch.device(device), sizes)
    population = Held(DrawnUsers(cohort, spread, words))
    settings = itertools.product(precisions, micro_cohorts)
    rows = [_row(start, population, size, precision, profile) for precision, size in settings]
    name = torch.cuda.get_device_name(representative(start).device) if device.startswith("cuda") else device
    model = "the full model" if sizes == FULL else str(sizes)
    unit = f"one user of {words or USER_WORDS:,} words (spread {spread:g}), one local epoch at batch 16, {model}"
    return {"device": name, "torch": torch.__version__, "cohort": cohort, "unit": unit, "rows": rows}


def start_of(device: torch.device, sizes: ModelHParams) -> Params:
    """Return the parameters of a new model on the device."""
    model = CIFGLanguageModel(LAYOUT.vocabulary_size, sizes).initialize(0).to(device)
    return {name: value.detach() for name, value in model.named_parameters()}


class Held:
    """Users that are generated once, so that their generation is not measured."""

    layout = LAYOUT

    def __init__(self, users: DrawnUsers) -> None:
        self._records = [users[user] for user in range(len(users))]
        self.layout = users.layout

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, user: int) -> Records:
        return self._records[user]


def packed_groups(
    pack: Callable[[list[Participant]], Packed], users: Users, chosen: Sequence[int], size: int
) -> Iterator[Packed]:
    """Yield packed micro-cohorts of `size` users, as the engine's packing thread makes them.

    Args:
        pack: the `pack` of a trainer, which chooses the order of records, lays out and packs.
        users: the users.
        chosen: indices of the users to pack.
        size: number of users of a micro-cohort; the last one may be smaller.
    """
    for first in range(0, len(chosen), size):
        yield pack([Participant(users[user], stream(0, "local", 0, user)) for user in chosen[first : first + size]])


def bench_packing(users_at_once: int, rounds: int = 20) -> float:
    """Return the users per second that one thread lays out and packs, as for a GPU; the median over rounds."""
    users, hparams = Held(DrawnUsers(users_at_once)), LocalHParams()

    def pack(group: list[Participant]) -> PackedGroup:
        return pack_users(group, LAYOUT, hparams, GRAPHS)

    device, chosen = torch.device("cpu"), range(users_at_once)
    seconds = [
        _seconds(lambda: deque(packed_groups(pack, users, chosen, users_at_once), maxlen=0), device)
        for _ in range(rounds)
    ]
    return users_at_once / float(np.median(seconds))


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [
        f"{measured['device']}, torch {measured['torch']}, {measured['cohort']} users per round; {measured['unit']}"
    ]
    lines.append("precision at once   users/s   training   packing   peak GB    est. GB")
    for row in measured["rows"]:
        if "failed" in row:
            lines.append(f"{row['precision']:<9} {row['micro_cohort']:>7}   {row['failed']}")
            continue
        lines.append(
            f"{row['precision']:<9} {row['micro_cohort']:>7} {row['users_per_second']:>9.1f} "
            f"{row['training_alone']:>10.1f} {row['packing_alone']:>9.1f} {row['peak_gigabytes']:>9.2f} "
            f"{row['said_gigabytes']:>9.2f}"
        )
        lines += [row["profile"]] if "profile" in row else []
    return "\n".join(lines)


def _row(start: Params, users: Held, size: int, precision: Precision, profile: bool) -> dict[str, Any]:
    device, hparams = representative(start).device, LocalHParams(precision=precision)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    fixed, per_user = StackedTrainer.memory(start, hparams, LAYOUT)
    row: dict[str, Any] = {
        "micro_cohort": size,
        "precision": precision,
        "said_gigabytes": (fixed + size * per_user) / 1e9,
    }
    try:
        row["users_per_second"] = len(users) / _round_seconds(start, users, hparams, size)
        row["peak_gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else float("nan")
        trainer = StackedTrainer(start, hparams, LAYOUT, size)
        several = range(min(len(users), 4 * size))
        packed = list(packed_groups(trainer.pack, users, several, size))
        packing = _seconds(lambda: deque(packed_groups(trainer.pack, users, several, size), maxlen=0), device)
        training = _seconds(lambda: [trainer.train(start, group) for group in packed], device)
        row |= {"training_alone": len(several) / training, "packing_alone": len(several) / packing}
        if profile:
            plain = StackedTrainer(start, hparams, LAYOUT, size, graphs=False)
            row["profile"] = table_of(profiled(lambda: plain.train(start, packed[0]), on_gpu), on_gpu)
    except torch.OutOfMemoryError as error:
        row["failed"] = first_line(error)
    return row


def _round_seconds(start: Params, users: Held, hparams: LocalHParams, size: int) -> float:
    engine = CohortEngine(start, LAYOUT, hparams, micro_cohort=size)
    device, cohort = representative(start).device, range(len(users))
    return _seconds(
        lambda: engine.train(start, users, cohort, 0, 0, CLIP), device, ROUNDS if device.type == "cuda" else 1
    )


def _seconds(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Do the work once, then several times, and return the median seconds of the latter."""
    seconds = []
    for _ in range(1 + times):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def profiled(work: Callable[[], object], on_gpu: bool) -> Any:
    """Do the work twice, and return the events of the second time by their names (`torch.profiler`)."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    return profiler.key_averages()


def table_of(events: Any, on_gpu: bool) -> str:
    """Return the table of the slowest events of `profiled`."""
    order = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
    return str(events.table(sort_by=order, row_limit=25, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at-once", type=int, nargs="+", default=[64, 128, 192, 256, 384, 512])
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=["bf16", "tf32"])
    parser.add_argument("--cohort", type=int, default=1024, help="users in a round")
    parser.add_argument("--spread", type=float, default=0.0, help="spread of users' sizes; 1 for a real population")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--packing", action="store_true", help="measure only the packing of users by one thread")
    chosen = parser.parse_args()
    if chosen.packing:
        for size in chosen.at_once:
            print(f"{size} at once: {bench_packing(size):,.0f} users/s packed by one thread")  # noqa: T201
        return
    measured = bench_engine(
        chosen.device,
        chosen.at_once,
        chosen.precision,
        chosen.cohort,
        chosen.spread,
        chosen.profile,
    )
    print(json.dumps(measured) if chosen.json else describe(measured))  # noqa: T201


if __name__ == "__main__":
    main()
