"""Tests of Triton kernels by position, and of stacked users, in Triton's interpreter on the CPU, against PyTorch.

Pytest does not collect this file: see `interpreted.py`. After a user's last position are NaN, which no kernel may read.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from interpreting import COUNTS, AtOnce, D, H, N, U, V, check, normal
from smoothing import smooth_steps
from stacking import amplification, assert_within, model_of, random_population, relative_error, start_of, train_stacked
from torch import Tensor
from torch_positions import TorchPositionKernels
from training_oracle import train_cohort
from triton.runtime import interpreter  # type: ignore[import-untyped]

from benchmarks.gpu import resident as resident_kernels
from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort import triton_positions
from flsim.training.cohort.engine import StackedTrainer
from flsim.training.cohort.kernels import Prediction, Target
from flsim.training.cohort.triton_kernels import TritonKernels
from flsim.training.cohort.triton_positions import TritonPositionKernels
from flsim.training.update import LocalHParams, UpdateSum

LAYOUT_40 = Layout(40, record_words=4)
checked = partial(check, kernels=TritonPositionKernels, oracle=TorchPositionKernels)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_positions, "BLOCK", 16 * 32 * 4)
    monkeypatch.setattr(triton_positions, "SUMS", 32 * 32)
    monkeypatch.setattr(triton_positions, "TILES", dict.fromkeys(triton_positions.TILES, ((16, 32), (16, 32))))


def starts_of(times: int, rows: int) -> Tensor:
    """Return the first position of each time for records of random lengths, one of them full; user 1 has no records."""
    lengths = stream(0, "test", "lengths", times, rows).integers(1, times, (U, rows), endpoint=True)
    lengths[:, 0], lengths[1] = times, 0
    ends = np.cumsum([(lengths > time).sum(1) for time in range(times)], 0)
    return torch.from_numpy(np.vstack((0 * ends[:1], ends)).T).int().contiguous()


def beyond(values: Tensor, counts: Tensor) -> Tensor:
    """Return the values with NaN after each user's last position."""
    places = torch.arange(values.shape[1]) >= counts[:, None]
    return values.masked_fill(places[..., None], torch.nan)


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> type[TritonPositionKernels]:
    for name in ("_recur_resident", "_recur_resident_back"):
        monkeypatch.setattr(resident_kernels, name, AtOnce(getattr(resident_kernels, name)))
    monkeypatch.setattr(resident_kernels, "UNITS", 16)
    return resident_kernels.ResidentPositionKernels


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize(("times", "rows", "width", "units"), [(4, 5, D, H), (3, 67, 3, 20), (1, 17, 3, 20)])
def test_recurrence(
    times: int, rows: int, width: int, units: int, is_resident: bool, resident: type[TritonPositionKernels]
) -> None:
    """The forward pass, and the backward pass from its results, equal PyTorch's; 67 rows need several programs."""
    checked = partial(check, kernels=resident if is_resident else TritonPositionKernels, oracle=TorchPositionKernels)
    starts = starts_of(times, rows)
    positions = int(starts.max()) + 3
    gates, bias = beyond(normal(U, positions, 3 * units), starts[:, -1]), normal(U, 3 * units)
    recurrent, projection = normal(U, width, 3 * units) / 4, normal(U, units, width) / 4
    before, outputs = (torch.full((U, positions, width), torch.nan) for _ in range(2))
    cells, hidden = (torch.full((U, positions, units), torch.nan) for _ in range(2))
    states = (gates, bias, recurrent, projection, before, outputs, cells, hidden, starts, rows)
    checked("recur_positions", *states, writes=(0, 4, 5, 6, 7))
    TorchPositionKernels().recur_positions(*states)
    d_outputs = beyond(normal(U, positions, width, seed=1), starts[:, -1])
    checked("recur_positions_back", gates, recurrent, projection, d_outputs, cells, starts, rows, writes=(0, 3))


def prediction_of(width: int, factor: Tensor | None = None) -> Prediction:
    """Return an output layer with logits so large that their exponentials overflow."""
    targets = torch.from_numpy(stream(0, "test", "targets").integers(1, V, (U, N))).int()
    targets[torch.arange(N) >= COUNTS[:, None]] = 0
    chosen, log_sums = beyond(normal(U, N, width), COUNTS), torch.full((U, N), torch.nan)
    return Prediction(chosen, normal(U, V, width), 100 * normal(U, V), targets, COUNTS, log_sums, factor)


@pytest.mark.parametrize("width", [D, 41])
@pytest.mark.parametrize("factor", [None, torch.tensor([0.3]).double()])
def test_output_layer(factor: Tensor | None, width: int) -> None:
    """Both passes equal PyTorch's; 41 columns need two blocks. Logits of up to 300 have errors of 300 x 2^-24."""
    prediction = prediction_of(width, factor)
    tolerance = 4 * 300 * 2**-24
    losses, d_chosen = torch.full((U, N), torch.nan), torch.full((U, N, width), torch.nan)
    checked("predict", prediction, losses, d_chosen, writes=(0, 1, 2), tolerance=tolerance)
    TorchPositionKernels().predict(prediction, losses, d_chosen)
    weight, bias = normal(U, V, width, seed=1), normal(U, V, seed=1)
    for rate in (None, 0.3):
        plain = Target(weight), Target(bias)
        checked("descend_predictions", prediction, *plain, rate, writes=(1, 2), tolerance=tolerance)
    copies = Target(weight, weight.clone()), Target(bias, bias.clone())
    checked("descend_predictions", prediction, *copies, 0.3, writes=(1, 2), tolerance=tolerance)


def test_low_copies_are_the_rounded_weights() -> None:
    """Copies are exact. Gradients have errors of two roundings of 2^-9: of a product's factors, and of its result."""
    prediction = prediction_of(D)
    low_operands = prediction._replace(chosen=prediction.chosen.bfloat16(), bias=normal(U, V).bfloat16())
    exact = low_operands._replace(chosen=low_operands.chosen.double(), log_sums=prediction.log_sums.double())
    exact = exact._replace(embedding=prediction.embedding.bfloat16().double(), bias=low_operands.bias.double())
    results = []
    for kernels, operands in ((TritonPositionKernels("bf16"), low_operands), (TorchPositionKernels(), exact)):
        dtype = operands.log_sums.dtype
        losses, d_chosen = torch.zeros(U, N, dtype=dtype), torch.zeros_like(operands.chosen)
        kernels.predict(operands, losses, d_chosen)
        weight, bias = (
            Target(torch.zeros(shape, dtype=dtype), torch.ones(shape).bfloat16()) for shape in ((U, V, D), (U, V))
        )
        kernels.descend_predictions(operands, weight, bias, 0.5)
        for target in (weight, bias):
            assert target.low is not None
            real = COUNTS > 0
            assert torch.equal(target.low[real], target.value[real].bfloat16())
        results.append({"d_chosen": d_chosen, "weight": weight.value, "bias": bias.value})
    actual, expected = ({name: value.double() for name, value in result.items()} for result in results)
    assert relative_error(actual, expected) < 2**-8


@pytest.mark.parametrize("pair", [False, True])
def test_descend_positions(pair: bool) -> None:
    """Gradients and steps equal PyTorch's for weights with more columns than rows, and with fewer."""
    for m, n in ((D, V), (V, D)):
        lefts = [beyond(normal(U, N, m, seed=seed), COUNTS) for seed in range(1 + pair)]
        right, bias = beyond(normal(U, N, n, seed=2), COUNTS), normal(U, n, seed=3)
        weights = [normal(U, m, n, seed=seed) for seed in range(1 + pair)]
        plain, copied = [Target(value) for value in weights], [Target(value, value.clone()) for value in weights]
        checked("descend_positions", plain, lefts, right, Target(bias), COUNTS, None, writes=(0, 3))
        checked("descend_positions", plain, lefts, right, None, COUNTS, 0.3, writes=(0,))
        checked("descend_positions", copied, lefts, right, Target(bias, bias.clone()), COUNTS, 0.3, writes=(0, 3))


def test_columns_cover_the_width_with_little_padding() -> None:
    for width in range(1, 600):
        whole, first, second = triton_positions.columns(width)
        assert whole == width <= first + second
        assert all(size & (size - 1) == 0 for size in (first, second))
        assert first >= 16
        assert second == 0 or (first < width and second >= 16 and first + second < 2 * first)
    assert triton_positions.columns(96) == (96, 64, 32)


def trained(hparams: LocalHParams, schedule: str = "constant") -> tuple[UpdateSum, UpdateSum, Params]:
    """Return sums of the trainer and the local engine for users of 1, 0 and 5 records; 19 is no multiple of 16."""
    model, population = model_of(0, LAYOUT_40, ModelHParams(6, 19)), random_population(3, 5, LAYOUT_40)
    exact = train_cohort(model, population, range(3), hparams, 0, 0, 0.5)
    start = start_of(model.float())
    kernels = (TritonKernels if hparams.precision == "float32" else TritonPositionKernels)(hparams.precision)
    trainer = StackedTrainer(start, replace(hparams, schedule=schedule), LAYOUT_40, 3, kernels)
    return train_stacked(trainer, start, population, hparams, 0, 0.5), exact, start


@pytest.mark.parametrize(
    ("precision", "schedule", "others"),
    [
        ("float32", "constant", {"batch_size": 3, "learning_rate": 0.5}),
        ("tf32", "constant", {"batch_size": 3, "learning_rate": 0.5}),
        ("bf16", "linear", {"batch_size": 3, "learning_rate": 0.5}),
        ("bf16", "constant", {"batch_size": 4, "learning_rate": 0.1, "optimizer": "momentum", "gradient_clip": 0.2}),
        ("float32", "constant", {"batch_size": 4, "optimizer": "adam", "proximal": 0.3, "gradient_clip": 0.25}),
        ("tf32", "constant", {"batch_size": 4, "optimizer": "adam", "proximal": 0.3, "gradient_clip": 0.25}),
    ],
    ids=str,
)
@smooth_steps()
def test_stacked_users_equal_the_local_engine(precision: Any, schedule: str, others: dict[str, Any]) -> None:
    """Sums are equal up to rounding. With a schedule, the rate is in memory. The interpreter uses float32 for TF32."""
    hparams = LocalHParams(precision=precision, **others)
    rounded, of_loss = ("bf16", None) if precision == "bf16" else ("float32", 1e-6)
    assert_within(*trained(hparams, schedule), rounded, 2, times=amplification(hparams), of_loss=of_loss)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of values that are not finite
def test_users_with_non_finite_values_do_not_change_later_users() -> None:
    """A trainer that first trained larger users from infinite weights trains smaller users as a new trainer does."""
    hparams, start = LocalHParams(batch_size=3, precision="bf16"), start_of(model_of(0, LAYOUT_40).float())
    large, small = random_population(3, 5, LAYOUT_40), random_population(3, 2, LAYOUT_40, seed=1)
    used, fresh = (StackedTrainer(start, hparams, LAYOUT_40, 3, TritonPositionKernels("bf16")) for _ in range(2))
    spoiled = train_stacked(used, {name: value * torch.inf for name, value in start.items()}, large, hparams)
    assert not np.isfinite(spoiled.counts.loss)
    again, expected = (train_stacked(trainer, start, small, hparams) for trainer in (used, fresh))
    assert again.counts.loss == expected.counts.loss
    assert all(torch.equal(value, again.delta[name]) for name, value in expected.delta.items())


def test_repetition_and_another_order_of_programs_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    hparams = LocalHParams(batch_size=3, optimizer="adam", precision="bf16")
    results = [trained(hparams)[0] for _ in range(2)]
    builder = interpreter.InterpreterBuilder
    set_place = builder.set_grid_idx

    def from_the_last(self: Any, *place: int) -> None:
        set_place(self, *(size - 1 - index for size, index in zip(self.grid_dim, place, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", from_the_last)
    results.append(trained(hparams)[0])
    for other in results[1:]:
        assert other.counts.loss == results[0].counts.loss
        assert all(torch.equal(value, results[0].delta[name]) for name, value in other.delta.items())
