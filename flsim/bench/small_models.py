"""Benchmark of small models on a CPU: users per second stacked, as a ratio to one user after another.

    python -m flsim.bench.small_models

It is what `flsim.training.cohort.engine.users_on_cpu` rests on. One thread trains. Sizes of micro-cohorts take turns,
so that other work on the machine slows all of them alike.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flsim.bench.engine import DrawnUsers, Held
from flsim.data.vocabulary import Layout
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.training.cohort.engine import CohortEngine, users_on_cpu
from flsim.training.hparams import LocalHParams
from flsim.training.threads import threads

WORDS = 250  # of a user
ROUNDS = 5


class Case(NamedTuple):
    """A model and the records of a step."""

    vocabulary: int
    embedding: int
    units: int
    batch_size: int


CASES = (
    Case(600, 32, 64, 4),
    Case(600, 32, 64, 16),
    Case(2_000, 32, 64, 4),
    Case(2_000, 64, 128, 4),
    Case(2_000, 64, 128, 16),
    Case(5_000, 96, 256, 16),
)


class Measured(NamedTuple):
    """The speed of a case.

    Attributes:
        case: the case.
        parameters: number of parameters of its model.
        users_per_second: with one user after another.
        ratios: how many times as fast so many users at once are.
        is_stacked: whether its users are stacked unless `system.micro_cohort` is set.
    """

    case: Case
    parameters: int
    users_per_second: float
    ratios: dict[int, float]
    is_stacked: bool


def bench_small(case: Case, at_once: Sequence[int], cohort: int, rounds: int = ROUNDS) -> Measured:
    """Measure rounds of a cohort of users of 250 words; the first round of each size does not count."""
    layout = Layout(case.vocabulary)
    users = Held(DrawnUsers(cohort, words=WORDS, layout=layout))
    model = CIFGLanguageModel(case.vocabulary, ModelHParams(case.embedding, case.units)).initialize(0)
    start = {name: value.detach() for name, value in model.named_parameters()}
    hparams = LocalHParams(batch_size=case.batch_size, learning_rate=0.1)
    engines = {size: CohortEngine(start, layout, hparams, micro_cohort=size) for size in (1, *at_once)}
    seconds: dict[int, list[float]] = {size: [] for size in engines}
    with threads(1):
        for round_ in range(1 + rounds):
            for size, engine in engines.items():
                began = time.perf_counter()
                engine.train(start, users, range(cohort), 0, round_)
                seconds[size].append(time.perf_counter() - began)
    one_by_one = seconds[1][1:]
    ratios = {
        size: statistics.median(one / stacked for one, stacked in zip(one_by_one, seconds[size][1:], strict=True))
        for size in at_once
    }
    parameters, is_stacked = sum(map(torch.numel, start.values())), users_on_cpu(start, hparams) is not None
    return Measured(case, parameters, cohort / statistics.median(one_by_one), ratios, is_stacked)


def describe(rows: Sequence[Measured], at_once: Sequence[int]) -> str:
    """Return the results as text; a star marks settings that are stacked unless `system.micro_cohort` is set."""
    sizes = "".join(f"{size:>7}" for size in at_once)
    lines = [
        "Users of 250 words, one thread; times as fast as one user after another, by users at once",
        f"      V   D   H   B parameters  users/s{sizes}",
    ]
    for case, parameters, users_per_second, ratios, is_stacked in rows:
        star = "*" if is_stacked else " "
        lines.append(
            f"{star}{case.vocabulary:>6,}{case.embedding:>4}{case.units:>4}{case.batch_size:>4}{parameters:>11,}"
            f"{users_per_second:>9.1f}" + "".join(f"{ratios[size]:>7.2f}" for size in at_once)
        )
    return "\n".join(lines)


def main() -> None:
    at_once = (4, 8, 16, 32)
    print(describe([bench_small(case, at_once, cohort=32) for case in CASES], at_once))  # noqa: T201


if __name__ == "__main__":
    main()
