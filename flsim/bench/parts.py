"""Benchmark of the parts of a user's training on one core: milliseconds of each, in float32 and in bfloat16.

    python -m flsim.bench.parts

A part is the time within some calls of the engine, without that of parts within it. Both precisions take turns.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flsim.base.rng import stream
from flsim.bench.engine import DrawnUsers, Held
from flsim.data.vocabulary import Layout
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort.cifg_gradient import PackedCIFG, Tape
from flsim.training.cohort.gradient import PackedBatch, packed_batches
from flsim.training.cohort.products import Products, products_for
from flsim.training.cohort.steps import steps_of
from flsim.training.hparams import LocalHParams, Precision
from flsim.training.threads import threads

REST = "sums, gathers, norms and the rest"
SIDES: tuple[Precision, Precision] = ("float32", "bf16")


class Clock:
    """Seconds by part. Parts lie within each other; each has its own time alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = [0.0]  # of each open part, the time of parts within it

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        self._within.append(0.0)
        began = time.perf_counter()
        yield
        whole, inner = time.perf_counter() - began, self._within.pop()
        self._within[-1] += whole
        self.seconds[name] = self.seconds.get(name, 0.0) + whole - inner


class TimedProducts(Products):
    """Products with a clock, which are told apart by their sizes: V words, 3H gates."""

    def __init__(self, products: Products, clock: Clock, words: int, gates: int) -> None:
        self._products, self._clock = products, clock
        self._words, self._gates = words, gates

    def rows(self, count: int) -> int:
        return self._products.rows(count)

    def operand(self, name: str, value: Tensor) -> Tensor:
        with self._clock.part("conversions"):
            return self._products.operand(name, value)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        by_inner = {self._words: "gradient by outputs", self._gates: "gradient by inputs"}
        by_columns = {self._words: "logits", self._gates: "gates' inputs"}
        with self._clock.part(by_inner.get(left.shape[1]) or by_columns[out.shape[1]]):
            return self._products.multiply(left, right, out, bias)

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        with self._clock.part(f"gradient by {'the embedding' if len(into) == self._words else 'other weights'}"):
            self._products.add(left, right, factor, into)


class TimedCIFG(PackedCIFG):
    """The engine of one user, with a clock."""

    def __init__(self, like: Params, products: TimedProducts, clock: Clock) -> None:
        super().__init__(like, products)
        self._clock = clock

    def descend(self, batch: PackedBatch, rate: float) -> float:
        with self._clock.part(REST):
            return super().descend(batch, rate)

    def _read(self, read: Tensor, sizes: list[int]) -> Tape:
        with self._clock.part("recurrence, forth"):
            return super()._read(read, sizes)

    def _through_time(self, tape: Tape, d_outputs: Tensor) -> Tensor:
        with self._clock.part("recurrence, back"):
            return super()._through_time(tape, d_outputs)

    def _cross_entropy(
        self, outputs: Tensor, low_outputs: Tensor, low_embedding: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        with self._clock.part("softmax and loss"):
            return super()._cross_entropy(outputs, low_outputs, low_embedding, targets)


def bench_parts(
    vocabulary: int = 10_000, sizes: ModelHParams | None = None, words: int = 2_000, repeats: int = 15
) -> dict[Precision, dict[str, float]]:
    """Return milliseconds of one user's training by part, for each precision: medians over repeats."""
    sizes = sizes or ModelHParams()
    layout, hparams = Layout(vocabulary), LocalHParams()
    user = Held(DrawnUsers(1, words=words, layout=layout))[0]
    batches = list(packed_batches(steps_of(user, layout, hparams, stream(0, "bench parts"))))
    model = CIFGLanguageModel(vocabulary, sizes).initialize(0)
    start = {name: value.detach() for name, value in model.named_parameters()}
    clocks, engines = {precision: Clock() for precision in SIDES}, dict[Precision, TimedCIFG]()
    for precision, clock in clocks.items():
        products = TimedProducts(products_for(precision, start), clock, vocabulary, 3 * sizes.units)
        engines[precision] = TimedCIFG(start, products, clock)
    taken: dict[Precision, list[dict[str, float]]] = {precision: [] for precision in SIDES}
    for _ in range(1 + repeats):  # the first compiles oneDNN's kernels
        for precision, engine in engines.items():
            clocks[precision].seconds.clear()
            engine.load(start)
            for batch in batches:
                engine.descend(batch, 0.1)
            taken[precision].append(dict(clocks[precision].seconds))
    return {
        precision: {part: 1e3 * statistics.median(once[part] for once in every[1:]) for part in every[0]}
        for precision, every in taken.items()
    }


def describe(parts: dict[Precision, dict[str, float]]) -> str:
    """Return the results as text, a line for each part."""
    names: Sequence[str] = list(dict.fromkeys(name for of_side in parts.values() for name in of_side))
    lines = [f"{'ms of a user':36}" + "".join(f"{precision:>9}" for precision in parts)]
    lines += [f"{name:36}" + "".join(f"{of_side[name]:9.1f}" for of_side in parts.values()) for name in names]
    return "\n".join([*lines, f"{'all':36}" + "".join(f"{sum(of_side.values()):9.1f}" for of_side in parts.values())])


def main() -> None:
    with threads(1), torch.no_grad():
        print(describe(bench_parts()))  # noqa: T201


if __name__ == "__main__":
    main()
