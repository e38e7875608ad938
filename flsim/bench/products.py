"""Benchmark of float32 by oneDNN and of bfloat16 beside torch's own float32, on one core: products, and whole users.

    python -m flsim.bench.products

It is what `flsim.training.cohort.products.onednn_is_faster` and `LARGE` rest on. Sides take turns, so that other work
on the machine slows all of them alike. With AMX oneDNN rounds operands, so that its figures are not of float32 then.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from flsim.base.rng import stream
from flsim.bench.engine import DrawnUsers, Held
from flsim.bench.small_models import Case
from flsim.data.vocabulary import Layout
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.training.cohort.gradient import packed_batches
from flsim.training.cohort.packed_models import packed_model
from flsim.training.cohort.products import OneDNNProducts, Products, by_onednn
from flsim.training.cohort.steps import steps_of
from flsim.training.hparams import LocalHParams
from flsim.training.threads import threads

ROWS = 160  # positions of a step
SHAPES = ((96, 10_000), (10_000, 96), (96, 2_010), (2_010, 96))  # logits and gates of the full model, and back
CASES = (
    Case(2_000, 64, 128, 4),
    Case(2_000, 64, 128, 16),
    Case(5_000, 96, 256, 4),
    Case(5_000, 96, 256, 16),
    Case(10_000, 96, 670, 4),
    Case(10_000, 96, 670, 32),
)


def bench_product(inner: int, columns: int, repeats: int = 30) -> dict[str, float]:
    """Return GFLOP/s of a product [160, inner] x [inner, columns] of each side, the best of some repeats."""
    shapes, rng = ((ROWS, inner), (inner, columns), (ROWS, columns)), stream(0, "bench products")
    left, right, out = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in shapes)
    low = [value.bfloat16() for value in (left, right, out)]

    def by_the_other() -> None:
        with by_onednn():
            torch.mm(left, right, out=out)

    sides: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.mm(left, right, out=out),
        "oneDNN": by_the_other,
        "bfloat16": lambda: torch.mm(low[0], low[1], out=low[2]),
    }
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(repeats):
        for name, multiply in sides.items():
            began = time.perf_counter()
            multiply()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: 2e-9 * ROWS * inner * columns / seconds for name, seconds in best.items()}


def bench_users(case: Case, users: int = 8, words: int = 500, rounds: int = 5) -> float:
    """Return how many times as fast users train by oneDNN as by torch's own choice, in float32: a median of rounds."""
    layout, hparams = Layout(case.vocabulary), LocalHParams(batch_size=case.batch_size)
    drawn = Held(DrawnUsers(users, words=words, layout=layout))
    steps = [steps_of(drawn[user], layout, hparams, stream(0, "bench products", user)) for user in range(users)]
    batches = [batch for of_user in steps for batch in packed_batches(of_user)]
    model = CIFGLanguageModel(case.vocabulary, ModelHParams(case.embedding, case.units)).initialize(0)
    start = {name: value.detach() for name, value in model.named_parameters()}
    sides, ratios = [packed_model(start, products) for products in (Products(), OneDNNProducts())], list[float]()
    for _ in range(1 + rounds):  # the first compiles oneDNN's kernels
        seconds = []
        for side in sides:
            side.load(start)
            began = time.perf_counter()
            for batch in batches:
                side.descend(batch, 0.1)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def describe(products: Sequence[tuple[int, int, dict[str, float]]], users: Sequence[tuple[Case, float]]) -> str:
    """Return the results as text."""
    lines = [f"GFLOP/s of one core, {ROWS} rows", "   K x N        " + "".join(f"{n:>10}" for n in products[0][2])]
    lines += [
        f"{inner:>6} x {columns:<7}" + "".join(f"{rate:>10.0f}" for rate in rates.values())
        for inner, columns, rates in products
    ]
    lines.append("Users in float32, times as fast by oneDNN\n     V   D   H   B largest weight")
    lines += [
        f"{case.vocabulary:>6,}{case.embedding:>4}{case.units:>4}{case.batch_size:>4}"
        f"{case.vocabulary * case.embedding:>15,}{ratio:>7.2f}"
        for case, ratio in users
    ]
    return "\n".join(lines)


def main() -> None:
    with threads(1):
        products = [(inner, columns, bench_product(inner, columns)) for inner, columns in SHAPES]
        print(describe(products, [(case, bench_users(case)) for case in CASES]))  # noqa: T201


if __name__ == "__main__":
    main()
