"""Curves of the cost of ranking canaries: against the number of canaries, and against |R|."""

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.bench.curves import Curve, Quantity
from flsim.bench.evaluation import LAYOUT, SEED, WORDS, Pair, mid_training
from flsim.canaries.spec import draw_phrase
from flsim.memorization.random_sampling import RandomSampler, references
from flsim.models.cifg import CIFGLanguageModel

STEPS, UNITS = 100, 64
REPEATS = 1
REFERENCES = 2**13  # |R| of the curve against canaries
CANARIES = 4  # canaries of the curve against |R|


def canaries_curve(
    sizes: Sequence[int], count: int = REFERENCES, steps: int = STEPS, units: int = UNITS, repeats: int = REPEATS
) -> Curve:
    """Measure exact ranks against the number of canaries; by design they are linear.

    Sizes divide the largest one, so that each has the same shares of memorized and other canaries, which cost less and
    more.

    Args:
        sizes: numbers of canaries, ascending.
        count: |R|.
        steps, units: training and size of the model.
        repeats: measurements of each size, of which the median is kept.

    Raises:
        InputError: a size does not divide the largest one.
    """
    most = max(sizes)
    if any(most % size for size in sizes):
        raise InputError(f"sizes of the curve of canaries must divide the largest, {most}, found {list(sizes)}")
    model, pairs = _trained(most, steps, units)
    drawn = references(SEED, count, WORDS - 1, LAYOUT)
    seconds = [_rank_seconds(model, drawn, pairs[:: most // size], repeats, "canaries") for size in sizes]
    about = f"|R| = {count:,}, {_about(steps, units)}"
    return Curve("canaries", "canaries", about, tuple(sizes), _ranking(seconds))


def references_curve(
    sizes: Sequence[int], canaries: int = CANARIES, steps: int = STEPS, units: int = UNITS, repeats: int = REPEATS
) -> Curve:
    """Measure exact ranks, and the drawing of R, against |R|.

    By design both are at most linear. Ranks can cost less, since references that share their first words share work.

    Args:
        sizes: values of |R|, ascending.
        canaries: number of canaries.
        steps, units: training and size of the model.
        repeats: measurements of each size, of which the median is kept.
    """
    model, pairs = _trained(canaries, steps, units)
    drawing, seconds = [], []
    for size in sizes:
        began = time.perf_counter()
        drawn = references(SEED, size, WORDS - 1, LAYOUT)
        drawing.append(time.perf_counter() - began)
        seconds.append(_rank_seconds(model, drawn, pairs, repeats, "references"))
    about = f"{canaries} canaries, {_about(steps, units)}"
    draw = Quantity("draw_seconds", "drawing R, s", tuple(drawing), 1)
    return Curve("references", "|R|", about, tuple(sizes), (*_ranking(seconds), draw))


def _ranking(seconds: Sequence[tuple[float, float]]) -> tuple[Quantity, Quantity]:
    wall, cpu = zip(*seconds, strict=True)
    return Quantity("rank_seconds", "ranks, s", wall, 1), Quantity("rank_cpu_seconds", "ranks, CPU s", cpu, 1)


def _trained(canaries: int, steps: int, units: int) -> tuple[CIFGLanguageModel, list[Pair]]:
    """Return a model that has memorized some of the canaries, and each canary as prefix and continuation."""
    phrases = [draw_phrase(SEED, index, 0, WORDS, LAYOUT) for index in range(canaries)]
    tokens = [torch.tensor((LAYOUT.bos, *phrase)) for phrase in phrases]
    return mid_training(phrases, steps, units), [(canary[:2], canary[2:]) for canary in tokens]


def _rank_seconds(
    model: CIFGLanguageModel, drawn: Tensor, pairs: Sequence[Pair], repeats: int, name: str
) -> tuple[float, float]:
    """Return median seconds and CPU seconds of ranking all canaries, by a new sampler as in each evaluation."""
    say(f"curve {name}: {len(pairs)} canaries, |R| = {len(drawn):,}")
    RandomSampler(model, drawn[: 2**10]).rank(*pairs[0])  # starts whatever starts with first use
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter(), time.process_time()
        sampler = RandomSampler(model, drawn)
        for pair in pairs:
            sampler.rank(*pair)
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, cpu = zip(*seconds, strict=True)
    return median(wall), median(cpu)


def _about(steps: int, units: int) -> str:
    model = f"V = {LAYOUT.vocabulary_size:,}, {units} units after {steps} steps"
    return f"{model}, {torch.get_num_threads()} threads"
