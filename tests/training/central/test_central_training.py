"""Tests of central training: equality with plain torch loops, the records of each step, resumption, and DP-SGD."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy import stats
from smoothing import smooth_steps
from stacking import model_of, start_of
from stepping import LAYOUT, SIZES, batch_of, same, start, tensors
from torch.nn.functional import cross_entropy

from flsim.base.errors import Diverged, InputError
from flsim.base.rng import stream
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population
from flsim.data.corpus import Split
from flsim.data.records import Records, RecordsByRound, batch
from flsim.models.architectures import CIFGLanguageModel
from flsim.models.language_model import Params, loss_sum
from flsim.privacy.ledger import Entry, PrivacyHParams
from flsim.training.central import CentralHParams, CentralTraining, train_central
from flsim.training.central.hparams import Order, poisson_lot, positions_at, private_step, record_gradients
from flsim.training.central.training import EngineName
from flsim.training.optimizers import OPTIMIZERS
from flsim.training.update import State

ENGINES = get_args(EngineName)
DP = PrivacyHParams("dp", clip=0.5, noise_multiplier=1.0)
NOTHING_PLANTED = Overlay(np.empty(0, np.int64), np.empty(0, np.uint16))


def population_of(users: list[list[list[int]]]) -> Population:
    flat = Records.from_lists([record for user in users for record in user])
    counts = np.cumsum([0, *map(len, users)], dtype=np.int64)
    return Population(Split(LAYOUT, flat.tokens, flat.offsets, counts, Path("nowhere")), (), NOTHING_PLANTED)


def training_of(
    users: RecordsByRound,
    hparams: CentralHParams | None = None,
    seed: int = 0,
    privacy: PrivacyHParams | None = None,
    order: Order = "iid",
    engine: EngineName = "fused",
) -> CentralTraining:
    return CentralTraining(users, hparams or CentralHParams(), seed, order, privacy or PrivacyHParams(), engine=engine)


def read_by(training: CentralTraining, step: int) -> list[list[int]]:
    """Return the records of a step."""
    return [record.tolist() for record in training.chunk(step, step + 1).records]


def final(state: State, training: CentralTraining, until_step: int) -> State:
    ((state, _),) = train_central(state, training, until_step)
    return state


@pytest.fixture
def users(random_users: Callable[..., list[list[list[int]]]]) -> Population:
    """Return five users with 0 to 5 records, 13 in total; all records differ."""
    ragged = [user[:count] for user, count in zip(random_users(5, 5, 8), (4, 0, 5, 1, 3), strict=True)]
    return population_of([[record[:6] for record in user] for user in ragged])


def test_order_sequence_reads_user_by_user_in_each_epoch(users: Population) -> None:
    training = training_of(users, CentralHParams(batch_size=3), order="sequence")
    everything = [record.tolist() for user in range(len(users)) for record in users[user]]
    assert len(everything) == 13
    for epoch in range(2):
        assert [record for step in range(5) for record in read_by(training, 5 * epoch + step)] == everything


@pytest.mark.parametrize("batch_size", [1, 4, 13, 50])
def test_iid_order_is_a_fresh_permutation_of_all_records_each_epoch(batch_size: int) -> None:
    steps = -(-13 // batch_size)
    epochs = [
        np.concatenate([positions_at(steps * epoch + step, 13, batch_size, "iid", 0) for step in range(steps)])
        for epoch in range(4)
    ]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(positions_at(0, 13, 13, "iid", 1), positions_at(0, 13, 13, "iid", 0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@smooth_steps()
def test_training_equals_a_plain_torch_loop(users: Population, optimizer: str, engine: EngineName) -> None:
    """Training equals torch's model and optimizer over two epochs, with a loss over the padded grid; float64, 1e-10."""
    hparams = CentralHParams(batch_size=3, optimizer=optimizer, learning_rate=0.1)
    training = training_of(users, hparams, engine=engine)
    model = CIFGLanguageModel(LAYOUT.vocabulary_size, SIZES).initialize(0).double()
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
    momentum = {"momentum": 0.9} if optimizer == "momentum" else {}
    torch_optimizer = classes.get(optimizer, torch.optim.SGD)(model.parameters(), lr=0.1, **momentum)
    loss_sum, state = 0.0, start()
    for step in range(10):
        records = training.chunk(step, step + 1).records
        read = batch(records, np.arange(len(records)), LAYOUT)
        logits, targets = model(torch.from_numpy(read.inputs)), torch.from_numpy(read.targets)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
        torch_optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch_optimizer.step()
        loss_sum += loss.item() * int((targets != 0).sum())
    ((state, log),) = train_central(state, training, 10)
    for name, value in model.named_parameters():
        torch.testing.assert_close(state.params[name], value.detach(), rtol=0, atol=1e-10)
    assert log.loss == pytest.approx(loss_sum, rel=1e-10)
    assert log.records == 26


@pytest.mark.parametrize(
    ("privacy", "order"), [(PrivacyHParams(), "iid"), (PrivacyHParams(), "sequence"), (DP, "iid")], ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stop_in_mid_epoch_changes_no_bit(
    users: Population, optimizer: str, privacy: PrivacyHParams, order: Order
) -> None:
    """Training with stops after 3 and 7 steps (5 per epoch), and states from bytes, equals training without stops."""
    dropout = 0.0 if privacy is DP else 0.3
    hparams = CentralHParams(
        steps=12, batch_size=3, optimizer=optimizer, learning_rate=0.1, schedule="cosine", warmup=2, dropout=dropout
    )
    whole = final(start(), training_of(users, hparams, privacy=privacy, order=order), 12)
    state = start()
    for until in (3, 7, 12):
        state = final(state, training_of(users, hparams, privacy=privacy, order=order), until)
        stored = load(save(tensors(state)))
        moments = {slot: {name: stored[f"{slot}/{name}"] for name in of} for slot, of in state.moments.items()}
        state = State(until, {name: stored[name] for name in state.params}, moments, ledger=state.ledger)
    assert same(state, whole)
    assert not same(final(start(), training_of(users, hparams, seed=1, privacy=privacy), 12), whole)


def test_states_are_yielded_as_asked_for_and_never_change(users: Population) -> None:
    training = training_of(users, CentralHParams(batch_size=3, optimizer="adam", learning_rate=0.1))
    seen = [
        (state, {name: value.clone() for name, value in tensors(state).items()}, log)
        for state, log in train_central(start(), training, 9, stop_at=lambda step: step % 4 == 0)
    ]
    assert [state.round for state, _, _ in seen] == [4, 8, 9]
    assert [log.records for _, _, log in seen] == [12, 10, 3]
    assert all(torch.equal(value, then[name]) for state, then, _ in seen for name, value in tensors(state).items())
    assert same(seen[1][0], final(seen[0][0], training, 8))
    assert list(train_central(seen[2][0], training, 9)) == []


def test_lots_are_poisson_samples() -> None:
    """The number of lots of a record, and the size of a lot, are binomial: each record is drawn independently. Two
    chi-square tests and one binomial test at 10^-5 each fail falsely for 3 in 10^5 seeds; the seed is fixed."""
    records, expected, lots = 40, 10, 4_000
    taken = np.zeros((lots, records), np.int64)
    for step in range(lots):
        lot = poisson_lot(step, records, expected, seed=0)
        assert np.all(np.diff(lot) > 0)
        taken[step, lot] = 1
    q = expected / records
    assert two_sided(((taken.sum(0) - lots * q) ** 2 / (lots * q * (1 - q))).sum(), records) > 1e-5
    assert two_sided(((taken.sum(1) - expected) ** 2).sum() / (records * q * (1 - q)), lots) > 1e-5
    together = int((taken[:, :20] & taken[:, 20:]).sum())
    assert stats.binomtest(together, lots * 20, q * q).pvalue > 1e-5


def two_sided(square: float, degrees: int) -> float:
    return float(2 * min(stats.chi2.cdf(square, degrees), stats.chi2.sf(square, degrees)))


def test_a_lot_may_be_everything_or_nothing(users: Population) -> None:
    np.testing.assert_array_equal(poisson_lot(0, 13, 13, seed=0), np.arange(13))
    empty = next(step for step in range(100) if not len(poisson_lot(step, 13, 1, seed=0)))
    training = training_of(users, CentralHParams(batch_size=1), privacy=DP)
    ((state, log),) = train_central(replace(start(), round=empty), training, empty + 1)
    assert (log.tokens, log.records, state.round) == (0, 0, empty + 1)
    assert all(not torch.equal(value, start().params[name]) for name, value in state.params.items())


def test_private_steps_read_lots_and_are_in_the_ledger(users: Population) -> None:
    training = training_of(users, CentralHParams(batch_size=2), privacy=DP)
    everything = [record.tolist() for user in range(len(users)) for record in users[user]]
    for step in range(10):
        assert read_by(training, step) == [everything[position] for position in poisson_lot(step, 13, 2, seed=0)]
    assert list(final(start(), training, 20).ledger.entries) == [Entry("poisson", 13, 2, 1.0, 20)]


def test_divergence_is_a_failure(users: Population) -> None:
    with pytest.raises(Diverged, match=r"^step \d+: .*most likely learning_rate is too high"):
        final(start(), training_of(users, CentralHParams(batch_size=3, learning_rate=1e4)), 50)
    with pytest.raises(Diverged, match=r"^step 1: values that are not finite"):
        final(start(), training_of(users, CentralHParams(learning_rate=1e308, optimizer="adam")), 1)


@pytest.mark.parametrize(
    ("batch_size", "order", "privacy", "message"),
    [
        (2, "sequence", DP, 'order "sequence" has no privacy accounting'),
        (14, "iid", DP, "between 1 and the 13 training records, found 14"),
        (2, "iid", replace(DP, target_quantile=0.5), "central training has a fixed clip"),
    ],
)
def test_what_dp_sgd_cannot_do_is_refused(
    users: Population, batch_size: int, order: Order, privacy: PrivacyHParams, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        training_of(users, CentralHParams(batch_size=batch_size), privacy=privacy, order=order)


def test_a_population_without_records_is_refused() -> None:
    with pytest.raises(InputError, match="no training records"):
        training_of(population_of([[], []]))


ragged = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=7)


def gradient_of_record(model: CIFGLanguageModel, record: list[int]) -> Params:
    """Return the gradient of the mean loss of one unpadded record, from plain autograd."""
    loss, count = loss_sum(model, *batch_of([record]))
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss / count, list(named.values())), strict=True))


def norm(gradient: Params) -> float:
    return float(torch.cat([value.flatten() for value in gradient.values()]).norm())


def steps_along(
    records: list[list[int]],
    clip: float,
    noise_multiplier: float = 0.0,
    expected: int = 1,
    physical_batch: int = 16,
    seed: int = 0,
    step: int = 0,
) -> Params:
    """Return what a private step of SGD at learning rate 1 subtracts from the parameters: the noisy mean gradient."""
    model = model_of(0)
    before = start_of(model)
    private_step(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        *batch_of(records),
        clip=clip,
        noise_multiplier=noise_multiplier,
        expected=expected,
        seed=seed,
        step=step,
        physical_batch=physical_batch,
    )
    return {name: before[name] - value.detach() for name, value in model.named_parameters()}


@settings(max_examples=20)
@given(records=ragged, padding=st.integers(0, 3))
def test_record_gradients_equal_autograd_one_record_at_a_time(records: list[list[int]], padding: int) -> None:
    """Records have 0 to 6 words. More padding, and a row with only padding, change nothing. float64, 1e-10."""
    model = model_of(0)
    inputs, targets = (torch.nn.functional.pad(value, (0, padding, 0, 1)) for value in batch_of(records))
    gradients, losses = record_gradients(model, inputs, targets)
    for row, record in enumerate(records):
        for name, expected in gradient_of_record(model, record).items():
            torch.testing.assert_close(gradients[name][row], expected, rtol=0, atol=1e-10)
        expected_loss = loss_sum(model, *batch_of([record]))[0].detach()
        torch.testing.assert_close(losses[row], expected_loss, rtol=0, atol=1e-10)
    assert all(not gradient[-1].any() for gradient in gradients.values())
    assert losses[-1] == 0


@settings(max_examples=20)
@given(
    records=ragged,
    clip=st.sampled_from([1e-3, 0.5, 1.0, 2.0, 1e9]),
    expected=st.integers(1, 9),
    physical_batch=st.integers(1, 8),
)
def test_without_noise_a_step_is_along_the_clipped_sum_over_l(
    records: list[list[int]], clip: float, expected: int, physical_batch: int
) -> None:
    """The physical batch size changes nothing; Opacus divides by the norm plus 1e-6. float64, 1e-10."""
    model = model_of(0)
    gradients = [gradient_of_record(model, record) for record in records]
    factors = [min(1.0, clip / (norm(gradient) + 1e-6)) for gradient in gradients]
    if clip == 1e9:
        assert set(factors) == {1.0}
    found = steps_along(records, clip, expected=expected, physical_batch=physical_batch)
    for name, value in found.items():
        total = sum((f * gradient[name] for f, gradient in zip(factors, gradients, strict=True)), torch.zeros(()))
        torch.testing.assert_close(value, total / expected, rtol=0, atol=1e-10)


def test_an_empty_lot_is_noise_of_deviation_z_c_over_l() -> None:
    """P-values of correct noise are uniform: each of the two tests rejects one in 10^5 seeds; the seeds are fixed.
    A deviation with an error of 5% fails, because 5% are 7 standard errors over about 10,000 numbers."""
    draws = [
        torch.cat([value.flatten() for value in steps_along([], 0.4, 1.5, expected=3, step=step).values()])
        for step in range(100)
    ]
    values = torch.cat(draws).numpy() / (1.5 * 0.4 / 3)
    assert len(values) > 10_000
    square = float(np.square(values).sum())
    assert 2 * min(stats.chi2.cdf(square, len(values)), stats.chi2.sf(square, len(values))) > 1e-5
    assert stats.kstest(values, "norm").pvalue > 1e-5


def test_noise_is_added_once_for_each_physical_batch_size() -> None:
    records = stream(0, "test records").integers(1, 9, (7, 4)).tolist()
    whole = steps_along(records, 0.5, 2.0)
    for physical_batch in (1, 3, 7):
        split = steps_along(records, 0.5, 2.0, physical_batch=physical_batch)
        for name, value in whole.items():
            torch.testing.assert_close(split[name], value, rtol=0, atol=1e-12)
    noise, clipped = steps_along([], 0.5, 2.0), steps_along(records, 0.5)
    for name, value in whole.items():
        torch.testing.assert_close(value, noise[name] + clipped[name], rtol=0, atol=1e-12)


def test_a_step_is_a_function_of_seed_and_step() -> None:
    keys = [(0, 0), (0, 1), (1, 0)]
    steps = [steps_along([[1, 2], [3]], 1.0, 1.0, seed=seed, step=step) for seed, step in keys]
    again = steps_along([[1, 2], [3]], 1.0, 1.0, seed=0, step=0)
    assert all(torch.equal(steps[0][name], again[name]) for name in again)
    assert all(not torch.equal(a["projection"], b["projection"]) for a, b in itertools.combinations(steps, 2))
