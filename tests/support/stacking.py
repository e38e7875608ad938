"""Helpers for tests of the stacked trainer; like `populations`, this file needs only torch, NumPy and pytest."""

import math

import pytest
import torch
from populations import InMemory
from smoothing import amplified

from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort.engine import StackedTrainer
from flsim.training.cohort.packing import Participant
from flsim.training.update import Counts, LocalHParams, UpdateSum, global_norm

LAYOUT = Layout(12, record_words=6)


def model_of(seed: int, layout: Layout = LAYOUT, sizes: ModelHParams | None = None) -> CIFGLanguageModel:
    return CIFGLanguageModel(layout.vocabulary_size, sizes or ModelHParams(3, 5)).initialize(seed).double()


def start_of(model: CIFGLanguageModel) -> Params:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def random_population(users: int, records: int, layout: Layout, seed: int = 0) -> InMemory:
    """Return users with `records` random records each; the first user has one record, and the second has none."""
    rng = stream(seed, "test", "population")

    def record() -> list[int]:
        words = rng.integers(1, layout.last_word, rng.integers(0, layout.record_words + 1), endpoint=True)
        return [int(word) for word in words]

    sizes = [min(records, 1), 0, *[records] * users][:users]
    return InMemory(layout, [[record() for _ in range(size)] for size in sizes])


def train_stacked(
    trainer: StackedTrainer,
    start: Params,
    population: InMemory,
    hparams: LocalHParams,
    seed: int = 0,
    clip: float | None = None,
) -> UpdateSum:
    """Train all users as one micro-cohort; clip and sum updates as `flsim.algorithms.fedavg.train_users` does."""
    group = [Participant(population[user], stream(seed, "local", 0, user)) for user in range(len(population))]
    losses, tokens = trainer.train(start, trainer.pack(group))
    counts, factors = Counts(), []
    for (records, _), loss, count, norm in zip(group, losses, tokens, trainer.norms(), strict=True):
        examples = hparams.examples(len(records))
        left_out = len(records) - examples
        user, factor = Counts.of_user(norm, examples, loss, count, clip=clip, left_out=left_out)
        counts += user
        factors.append(factor)
    into = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    trainer.add_updates(factors, into)
    return UpdateSum({name: value.cpu() for name, value in into.items()}, counts)


def assert_same_counts(found: UpdateSum, expected: UpdateSum) -> None:
    names = ("weight", "users", "tokens", "clipped", "non_finite", "examples", "left_out")
    assert [getattr(found.counts, name) for name in names] == [getattr(expected.counts, name) for name in names]


def assert_equal(found: UpdateSum, expected: UpdateSum, tolerance: float) -> None:
    """Check that counts are equal, and sums up to the tolerance times the largest expected value, or 1 if larger."""
    largest = max(1.0, *(float(value.abs().max()) for value in expected.delta.values()))
    for name, value in expected.delta.items():
        assert found.delta[name].dtype == torch.float64
        torch.testing.assert_close(found.delta[name], value, rtol=0, atol=tolerance * largest)
    assert_same_counts(found, expected)
    assert found.counts.loss == pytest.approx(expected.counts.loss, rel=tolerance, abs=tolerance)
    assert found.counts.norms == pytest.approx(expected.counts.norms, rel=tolerance, abs=tolerance)


def amplification(hparams: LocalHParams) -> float:
    """Return the factor by which steps amplify the rounding of gradients: 1, except for smooth steps of Adam."""
    return amplified(hparams.gradient_clip or 0.0) if hparams.optimizer == "adam" else 1.0


def assert_within(
    found: UpdateSum,
    exact: UpdateSum,
    start: Params,
    precision: str,
    steps: int,
    *,
    times: float = 1.0,
    of_loss: float | None = None,
) -> None:
    """Check that the error of a sum is less than `times` the bound of `rounding`, and that counts are equal."""
    tolerance = times * rounding(precision, start, exact.counts.norms / exact.counts.users, steps)
    assert relative_error(found.delta, exact.delta) < tolerance
    assert found.counts.loss == pytest.approx(exact.counts.loss, rel=of_loss or tolerance)
    assert_same_counts(found, exact)


def relative_error(found: Params, exact: Params) -> float:
    """Return the norm of the difference divided by the norm of the exact value, with all tensors as one vector."""
    return global_norm({name: found[name] - value for name, value in exact.items()}) / global_norm(exact)


def rounding(precision: str, start: Params, norm: float, steps: int) -> float:
    """Return the largest expected relative error of a user's update of this norm.

    Each step rounds every weight to float32, with a relative error of 2^-24; independent errors add up to sqrt(steps)
    times that. A gradient passes through about a dozen rounded tensors (embeddings, gates, o tanh c, r, logits, and
    their gradients), with an error of 2^-24 in float32, 2^-11 in TF32 and 2^-8 in bfloat16: sqrt(12) times that.
    """
    weights: float = 2**-24 * math.sqrt(steps) * global_norm(start) / norm
    return weights + math.sqrt(12) * {"float32": 2**-24, "tf32": 2**-11, "bf16": 2**-8}[precision]
