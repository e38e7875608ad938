"""Tests of local training against an independent loop, of sums and clips of updates, and of learning-rate schedules."""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from populations import InMemory
from stacking import LAYOUT, model_of, random_population, start_of
from torch import Tensor
from training_oracle import train_cohort

from flsim.algorithms import fedavg
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.fedavg import init
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import Diverged, InputError
from flsim.base.rng import stream
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import Params
from flsim.privacy.ledger import PrivacyHParams
from flsim.training import optimizers
from flsim.training.central import CentralHParams
from flsim.training.cohort.engine import CohortEngine
from flsim.training.update import Counts, LocalHParams, State, UpdateSum, clip_factor, global_norm, rate_at

SIZES = ModelHParams(embedding=3, units=5)


def step(state: State, total: UpdateSum, privacy: PrivacyHParams | None = None) -> State:
    """Apply a sum of updates to a state, with plain averaging unless `privacy` names a mechanism."""
    size, privacy = LAYOUT.vocabulary_size, privacy or PrivacyHParams()
    return fedavg.step(state, total, FedAvgHParams(), privacy, seed=0, population=1_000, vocabulary_size=size)[0]


def naive_loss(p: Params, records: list[list[int]]) -> tuple[Tensor, int]:
    """Compute the mean cross-entropy from the equations, one record and one word at a time, without padding."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    units = p["projection"].shape[0]
    for words in records:
        sequence = [LAYOUT.bos, *words, *([LAYOUT.eos] if len(words) < LAYOUT.record_words else [])]
        r = torch.zeros(p["projection"].shape[1], dtype=torch.float64)
        c = torch.zeros(units, dtype=torch.float64)
        for word, following in itertools.pairwise(sequence):
            z = p["embedding"][word] @ p["input_weight"] + r @ p["recurrent_weight"] + p["gate_bias"]
            f, o, g = torch.sigmoid(z[:units]), torch.sigmoid(z[units : 2 * units]), torch.tanh(z[2 * units :])
            c = f * c + (1 - f) * g
            r = (o * torch.tanh(c)) @ p["projection"]
            total = total - torch.log_softmax(p["embedding"] @ r + p["output_bias"], 0)[following]
            count += 1
    return total / count, count


def naive_user(
    model: CIFGLanguageModel, records: list[list[int]], hparams: LocalHParams, seed: int, user: int
) -> Params:
    params = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    rng = stream(seed, "local", 0, user)
    for _ in range(hparams.epochs):
        order = rng.permutation(len(records))
        for first in range(0, len(records), hparams.batch_size):
            chosen = [records[i] for i in order[first : first + hparams.batch_size]]
            gradients = torch.autograd.grad(naive_loss(params, chosen)[0], list(params.values()))
            params = {
                name: (value - hparams.learning_rate * gradient).detach().requires_grad_()
                for (name, value), gradient in zip(params.items(), gradients, strict=True)
            }
    return {name: (params[name] - value).detach() for name, value in model.named_parameters()}


records_strategy = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), max_size=7)


@settings(max_examples=25)
@given(
    users=st.lists(records_strategy, min_size=1, max_size=4),
    epochs=st.integers(1, 2),
    batch_size=st.integers(1, 8),
    clip=st.none() | st.floats(0.01, 2.0),
    seed=st.integers(0, 100),
)
def test_sums_equal_a_loop_over_users_and_words(
    users: list[list[list[int]]], epochs: int, batch_size: int, clip: float | None, seed: int
) -> None:
    """Sums weight updates by examples, or with a clip by min(1, S / norm), as an independent loop over words does.
    Users have unequal numbers of records, or none. float64, 1e-10."""
    hparams, model = LocalHParams(epochs, batch_size, learning_rate=0.5), model_of(0)
    before = start_of(model)
    total = train_cohort(model, InMemory(LAYOUT, users), range(len(users)), hparams, seed, 0, clip)
    expected = {name: torch.zeros_like(value) for name, value in before.items()}
    norms = []
    for user, records in enumerate(users):
        update = naive_user(model, records, hparams, seed, user)
        norms.append(sum(float((value**2).sum()) for value in update.values()) ** 0.5)
        factor = len(records) if clip is None else clip / norms[-1] if norms[-1] > clip else 1
        for name, value in update.items():
            expected[name] += value * factor
    for name, value in expected.items():
        torch.testing.assert_close(total.delta[name], value, rtol=0, atol=1e-10)
        assert torch.equal(model.state_dict()[name], before[name])
    examples, counts = sum(map(len, users)), total.counts
    assert (counts.users, counts.examples, counts.non_finite) == (len(users), examples, 0)
    assert counts.weight == (examples if clip is None else len(users))
    assert counts.norms == pytest.approx(sum(norms), abs=1e-10)
    if clip is not None:
        assert (counts.clipped, counts.within) == (sum(n > clip for n in norms), sum(n <= clip for n in norms))


def test_the_reported_loss_is_that_of_each_batch_before_its_step() -> None:
    records = [[1, 2], [3, 4, 5]]
    model = model_of(0)
    loss, count = naive_loss(start_of(model), records)
    total = train_cohort(model, InMemory(LAYOUT, [records]), [0], LocalHParams(batch_size=2), 0, 0)
    assert total.counts.tokens == count == 7
    assert total.counts.loss == pytest.approx(float(loss) * count, abs=1e-12)


@pytest.mark.parametrize(
    ("entry", "loss", "message"),
    [
        (math.nan, 1.0, "local training produced values that are not finite"),
        (math.inf, 1.0, "local training produced values that are not finite"),
        (0.0, math.nan, "not finite"),
        (0.0, math.inf, "not finite"),
        (0.0, 25.0 * 7, r"the training loss is 25 nats per word, and guessing gives 2\.48"),  # log(12)
        (1e39, 7.0, "the averaged model overflows"),  # finite in float64, not in float32
    ],
)
def test_values_that_are_not_finite_or_absurd_stop_the_run(entry: float, loss: float, message: str) -> None:
    state = init(LAYOUT.vocabulary_size, SIZES, 0)
    delta = UpdateSum.zero(state.params).delta
    step(state, UpdateSum(delta, Counts(1.0, 1, 24.0 * 7, 7)))
    delta["gate_bias"][3] = entry
    with pytest.raises(Diverged, match=f"round 1: .*{message}"):
        step(state, UpdateSum(delta, Counts(1.0, 1, loss, 7)))


def test_noise_is_a_possible_cause_of_divergence() -> None:
    state = init(LAYOUT.vocabulary_size, SIZES, 0)
    total = UpdateSum(UpdateSum.zero(state.params).delta, Counts(1.0, 1, math.nan, 7))
    for privacy, culprit in (
        (None, "local.learning_rate"),
        (PrivacyHParams("dp", clip=1.0, noise_multiplier=1.0), "local.learning_rate or privacy.noise_multiplier"),
    ):
        with pytest.raises(Diverged, match=f"most likely {culprit} is too high"):
            step(state, total, privacy)


@pytest.mark.parametrize("kind", [LocalHParams, CentralHParams])
@pytest.mark.parametrize(
    "change", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"momentum": 1.0}]
)
def test_bad_settings_are_refused(kind: Callable[..., object], change: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(change))} must be"):
        kind(**change)


# The clip bounds the norm of the complete update and keeps its direction; nothing overflows or underflows.

LARGEST = float(np.float32(3e38))
ELEMENTS = st.floats(-LARGEST, LARGEST, width=32)
UPDATES = st.lists(arrays(np.float32, st.integers(1, 5), elements=ELEMENTS), min_size=1, max_size=4)


def params(tensors: list[np.ndarray]) -> Params:
    return {str(index): torch.from_numpy(tensor).double() for index, tensor in enumerate(tensors)}


def exact_norm(update: Params) -> float:
    """Return the norm of all coordinates as one vector; `math.hypot` neither overflows nor underflows."""
    return math.hypot(*(value for tensor in update.values() for value in tensor.tolist()))


@given(tensors=UPDATES, bound=st.floats(1e-6, 1e6))
def test_a_clipped_update_is_within_the_bound_as_a_whole_and_keeps_its_direction(
    tensors: list[np.ndarray], bound: float
) -> None:
    """The oracles are `exact_norm`, and the update times bound / norm if the norm exceeds the bound."""
    update = params(tensors)
    clipped = UpdateSum.of_user(update, 7, 1.0, 5, clip=bound)
    before, after = exact_norm(update), exact_norm(clipped.delta)
    assert after <= bound * (1 + 1e-12)
    assert global_norm(update) == pytest.approx(before, rel=1e-12)
    assert clipped.counts.clipped == (global_norm(update) > bound)
    if clipped.counts.clipped:
        assert after == pytest.approx(bound, rel=1e-12)
        for name, value in update.items():
            torch.testing.assert_close(clipped.delta[name], value * (bound / before), rtol=1e-12, atol=0)
    else:
        assert all(torch.equal(clipped.delta[name], value) for name, value in update.items())
    assert replace(clipped.counts, norms=0.0, clipped=0) == Counts(1.0, 1, 1.0, 5, examples=7)
    assert clipped.counts.norms == pytest.approx(before, rel=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_counted_and_makes_sums_not_finite(value: float, clip: float | None) -> None:
    """Infinity times 0 is NaN, and min(1, S / NaN) is 1 in some languages; neither may make the sum finite."""
    update = {"a": torch.tensor([1.0, value], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    refused = UpdateSum.of_user(update, 3, 1.0, 5, clip=clip)
    assert refused.counts == Counts(0.0, 1, 1.0, 5, non_finite=1, examples=3)
    assert not refused.is_finite
    good = UpdateSum.of_user({name: torch.ones_like(of) for name, of in update.items()}, 3, 1.0, 5, clip=clip)
    assert not good.merge(refused).is_finite
    assert good.is_finite
    with pytest.raises(ValueError, match="cannot be clipped"):
        clip_factor(global_norm(update), 0.2)


def test_the_constants_are_torchs() -> None:
    """The engines' constants of Adam and RMSProp are torch's defaults; `smooth_steps` replaces them in other tests."""
    adam, rmsprop = (inspect.signature(made).parameters for made in (torch.optim.Adam, torch.optim.RMSprop))
    assert (adam["betas"].default, adam["eps"].default) == (optimizers.BETAS, optimizers.EPSILON)
    assert (rmsprop["alpha"].default, rmsprop["eps"].default) == (optimizers.ALPHA, optimizers.EPSILON)


CLOSED: dict[str, Callable[[int, int], float]] = {
    "constant": lambda _t, _total: 1.0,
    "linear": lambda t, total: (total - t) / total,
    "cosine": lambda t, total: math.cos(math.pi * t / (2 * total)) ** 2,  # (1 + cos 2x) / 2 = cos^2 x
}
POPULATION = random_population(5, 6, LAYOUT)


def test_steps_fall_at_milestones_in_all_kinds_of_training() -> None:
    """The factor applies once at round 120 (fraction 0.6 of 200), and once more at round 150."""
    expected = [1.0] * 120 + [0.5] * 30 + [0.25] * 50
    both: dict[str, Any] = {"milestones": (0.6, 150.0), "milestone_factor": 0.5}
    local = LocalHParams(learning_rate=1.0, schedule="steps", **both)
    central = CentralHParams(learning_rate=1.0, schedule="steps", **both)
    server = FedAvgHParams(
        server_learning_rate=1.0, server_schedule="steps", server_milestones=(0.6, 150.0), server_milestone_factor=0.5
    )
    for rate in (local.rate, central.rate, server.server_rate):
        assert [rate(at, 200) for at in range(200)] == expected
    warm = replace(central, warmup=10)
    assert [warm.rate(at, 200) for at in range(200)] == [(at + 1) / 10 for at in range(10)] + expected[10:]
    assert LocalHParams(schedule="steps", milestones=(1,)).rate(1, 2) == pytest.approx(0.03)  # a tenth by default


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "steps"}, 'schedule "steps" needs milestones'),
        ({"milestones": (3,)}, 'schedule "constant" has no milestones'),
        ({"schedule": "steps", "milestones": (1.5,)}, "fractions of training below 1, or integers of at least 1"),
        ({"schedule": "steps", "milestones": (0,)}, "fractions of training below 1, or integers of at least 1"),
        ({"schedule": "steps", "milestones": (3,), "milestone_factor": 0.0}, "milestone_factor must be above 0"),
    ],
)
@pytest.mark.parametrize("kind", [LocalHParams, CentralHParams])
def test_invalid_milestones_are_refused(kind: Callable[..., object], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**settings)
    with pytest.raises(InputError, match=r"server_(schedule|milestone)"):
        FedAvgHParams(**{f"server_{name}": value for name, value in settings.items()})


@given(st.sampled_from(sorted(CLOSED)), st.integers(1, 10_000), st.data(), st.floats(1e-6, 10))
def test_rates_are_those_of_the_closed_forms(name: str, total: int, data: st.DataObject, rate: float) -> None:
    """Rates equal the closed forms in `CLOSED`, begin at the given rate, never rise, and are never negative."""
    at = data.draw(st.integers(0, total - 1))
    found = rate_at(rate, name, at, total)
    assert found == pytest.approx(rate * CLOSED[name](at, total), rel=1e-9, abs=1e-12 * rate)
    assert rate_at(rate, name, 0, total) == rate
    assert 0 <= found <= (rate_at(rate, name, at - 1, total) if at else rate)


@given(st.sampled_from(sorted(CLOSED)), st.integers(1, 50), st.integers(0, 60), st.floats(1e-6, 10))
def test_a_warmup_is_linear_and_the_schedule_begins_after_it(name: str, total: int, warmup: int, rate: float) -> None:
    for step in range(total):
        expected = (
            rate * (step + 1) / warmup if step < warmup else rate_at(rate, name, step - warmup, max(total - warmup, 1))
        )
        assert rate_at(rate, name, step, total, warmup) == expected
        central = CentralHParams(learning_rate=rate, schedule=name, warmup=warmup)
        assert central.rate(step, total) == expected


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("micro_cohort", [None, 3])
def test_a_round_trains_at_its_own_rate_in_every_engine(optimizer: str, micro_cohort: int | None) -> None:
    """A round with a schedule equals a round at the constant rate of `hparams.rate`; exactly in the local engine."""
    model, hparams = model_of(0), LocalHParams(batch_size=3, learning_rate=0.5, optimizer=optimizer, schedule="cosine")
    engine = CohortEngine(start_of(model), LAYOUT, hparams, micro_cohort, rounds=4)
    for round_ in range(4):
        constant = replace(hparams, schedule="constant", learning_rate=hparams.rate(round_, 4))
        expected = train_cohort(model, POPULATION, range(5), constant, 0, round_)
        mine = train_cohort(model, POPULATION, range(5), hparams, 0, round_, rounds=4)
        stacked = engine.train(start_of(model), POPULATION, range(5), 0, round_)
        for name, value in expected.delta.items():
            assert torch.equal(mine.delta[name], value)
            torch.testing.assert_close(stacked.delta[name], value, rtol=0, atol=1e-10)


def test_schedules_use_the_length_of_training() -> None:
    """The loop of a run, `flsim verify` and `flsim.simulate` equals rounds at fixed rates. Schedules need a length."""
    server = FedAvgHParams(cohort=3, server_schedule="cosine", rounds=99)
    local = LocalHParams(batch_size=3, schedule="linear")
    training = FederatedTraining(POPULATION, ModelHParams(3, 5), server, local, length=4)
    *_, last = training.states(training.first_state(), 4)
    state = training.first_state()
    for round_ in range(4):
        fixed = replace(
            training,
            algorithm=replace(server, server_learning_rate=server.server_rate(round_, 4), server_schedule="constant"),
            local=replace(local, learning_rate=local.rate(round_, 4), schedule="constant"),
        )
        (state,) = fixed.states(state, round_ + 1)
    assert all(torch.equal(state.params[name], value) for name, value in last.params.items())
    with pytest.raises(ValueError, match="needs the number of rounds"):
        local.rate(0, None)


OWN = """
def halves(at, total):
    return 0.5**at

def negative(at, total):
    return 1 - 2 * at

def fails(at, total):
    return {}[at]
"""


def test_a_custom_schedule(tmp_path: Path) -> None:
    path = tmp_path / "my_schedules.py"
    path.write_text(OWN)
    assert [rate_at(0.8, f"{path}:halves", at, 3) for at in range(3)] == [0.8, 0.4, 0.2]
    with pytest.raises(
        InputError, match=r"negative: returned the factor -1 at 1 of 3; return a finite number of at least 0"
    ):
        rate_at(0.8, f"{path}:negative", 1, 3)
    with pytest.raises(InputError, match=r"my_schedules\.py:9: KeyError: 2"):
        rate_at(0.8, f"{path}:fails", 2, 3)
    with pytest.raises(
        InputError, match="schedule must be one of constant, linear, cosine, steps, found 'exponential'"
    ):
        LocalHParams(schedule="exponential")
