"""Tests of Triton kernels in Triton's interpreter on the CPU, against PyTorch's in float64 and the autograd engine.

Pytest does not collect this file: `test_triton.py` runs it in a separate process, because the interpreter must be
selected before Triton is imported. Sizes are no powers of two, and small blocks make several and partial blocks.
"""

from dataclasses import replace

import pytest
import torch
from interpreting import COUNTS, B, D, H, N, T, U, V, check, normal, parts
from stacking import relative_error, rounding
from stepping import LAYOUT, training_of

from flsim.models.architectures import ModelHParams
from flsim.training.central import CentralHParams, init, train_central
from flsim.training.central.training import StackedEngine
from flsim.training.cohort import triton_kernels, triton_spread
from flsim.training.cohort.kernels import Kernels, UpdateRule
from flsim.training.cohort.triton_kernels import TritonKernels
from flsim.training.cohort.triton_spread import SpreadKernels
from flsim.training.optimizers import OPTIMIZERS
from flsim.training.update import global_norm


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_spread, "BLOCK", 16 * 32 * 4)
    monkeypatch.setattr(triton_spread, "AT_ONCE", 2)
    monkeypatch.setattr(triton_spread, "MANY", 20)
    monkeypatch.setattr(triton_spread, "SAME", 2)
    monkeypatch.setattr(triton_kernels, "LOGITS", 32)
    monkeypatch.setattr(triton_kernels, "VALUES", 512)
    monkeypatch.setattr(triton_kernels, "USERS", 512)


@pytest.mark.parametrize(("times", "rows", "width", "units"), [(T, B, D, H), (2, 67, 3, 5), (1, 17, 3, 20)])
def test_recurrence(times: int, rows: int, width: int, units: int) -> None:
    """Both passes equal PyTorch's; 67 rows need several programs. NaN marks values that no program has written."""
    gates, bias = normal(U, times, rows, 3 * units), normal(U, 3 * units)
    recurrent, projection = normal(U, width, 3 * units) / 4, normal(U, units, width) / 4
    outputs = torch.full((U, times + 1, rows, width), torch.nan)
    cells, hidden = (torch.full((U, times + n, rows, units), torch.nan) for n in (1, 0))
    states = (gates, bias, recurrent, projection, outputs, cells, hidden)
    check("recur", *states, writes=(0, 4, 5, 6), kernels=SpreadKernels)
    Kernels().recur(*states)
    d_outputs = normal(U, times + 1, rows, width, seed=1)
    check("recur_back", gates, recurrent, projection, d_outputs, cells, writes=(0, 3), kernels=SpreadKernels)


def test_tanh_is_exact_near_zero_too() -> None:
    """For cells of 0 and open gates, c = tanh(candidate) and o tanh(c) have a relative error below 5e-7 at any size."""
    small = 10 ** torch.linspace(-6, 1, H).repeat(1, 1, B, 1)
    gates = torch.cat([torch.full_like(small, -50), torch.full_like(small, 50), small], -1)
    outputs, cells, hidden = torch.zeros(1, 2, B, D), torch.zeros(1, 2, B, H), torch.zeros(1, 1, B, H)
    weights = (torch.zeros(1, 3 * H), torch.zeros(1, D, 3 * H), torch.zeros(1, H, D))
    SpreadKernels("float32").recur(gates, *weights, outputs, cells, hidden)
    torch.testing.assert_close(cells[:, 1:].double(), small.double().tanh(), rtol=5e-7, atol=0)
    torch.testing.assert_close(hidden.double(), small.double().tanh().tanh(), rtol=5e-7, atol=0)


def test_cross_entropy() -> None:
    """Losses and gradients equal PyTorch's if exponentials of logits overflow, and for a user without positions."""
    logits, bias = 100 * normal(U, N, V), normal(U, V)
    given = (logits, bias, parts().targets, COUNTS, torch.full((U, N), torch.nan))
    check("cross_entropy", *given, writes=(0, 4))
    check("cross_entropy", *given, torch.tensor([0.3]).double(), writes=(0, 4))


@pytest.mark.parametrize("kernels", [TritonKernels, SpreadKernels])
@pytest.mark.parametrize("with_low", [False, True])
def test_add_rows(kernels: type[TritonKernels], with_low: bool) -> None:
    """Sums equal PyTorch's for several programs per user; `SpreadKernels` gets sorted tokens. No unused NaN is read."""
    given, rows = parts(), normal(U, T * B, D)
    if kernels is SpreadKernels:
        for user, count in enumerate(COUNTS.tolist()):
            at = given.places[user, :count].long() - B
            given.places[user, :count] = given.places[user, :count][given.tokens[user].flatten()[at].argsort()]
    for user, count in enumerate(COUNTS.tolist()):
        unused = set(range(T * B)) - {place - B for place in given.places[user, :count].tolist()}
        rows[user, sorted(unused)] = torch.nan
    table = normal(U, 7, D)
    arguments = table, table.clone() if with_low else None, rows, given, -0.3
    check("add_rows", *arguments, writes=(0, 1) if with_low else (0,), kernels=kernels)


@pytest.mark.parametrize("turned", [False, True])
def test_descend(turned: bool) -> None:
    """Steps equal PyTorch's for strided factors and a transposed weight, as the trainer has them."""
    weight = normal(U, V, D).mT if turned else normal(U, D, V)
    left, right = normal(U, T + 1, B, D)[:, :T].flatten(1, 2), normal(U, T + 1, B, V)[:, 1:].flatten(1, 2)
    bias = normal(U, V, seed=2)
    check("descend", weight, weight * 0, left, right, 0.3, bias, bias * 0, writes=(0, 1, 5, 6), kernels=SpreadKernels)
    check("descend", weight, weight * 0, left, right, 0.3, writes=(0, 1), kernels=SpreadKernels)
    check("descend", weight, None, left, right, 0.3, bias, None, writes=(0, 5), kernels=SpreadKernels)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop"])
@pytest.mark.parametrize(("mu", "decay"), [(0.0, 0.0), (0.7, 0.0), (0.0, 0.2)])
def test_optimize(optimizer: str, mu: float, decay: float) -> None:
    rule = UpdateRule(OPTIMIZERS[optimizer], 0.9, mu, decay)
    shape, scalars = (U, V, D), torch.tensor([0.1, 1 - 0.9**3, 1 - 0.999**3]).double()
    moments = [normal(*shape, seed=4 + place).abs() for place in range(len(rule.optimizer.slots))]
    weight, scale = normal(*shape), torch.tensor([0.5, 1.0, 0.01], dtype=torch.float64)
    given = (normal(*shape, seed=1), normal(V, D), moments, scale, COUNTS, scalars, rule)
    check("optimize", weight, None, *given, writes=(0, 4))


def test_norms_and_sums() -> None:
    """Sums are float64 sums of float32 differences, and exclude a user with factor 0 whose values are not finite."""
    weight, start, gradient = 1e3 * normal(U, V, D), normal(V, D), normal(U, V, D, seed=1)
    for mu, term in ((1.0, None), (0.7, gradient)):
        check("squares", weight, start, mu, term, writes=(), tolerance=1e-6)
    weight[1] = torch.inf
    factors, into = torch.tensor([0.3, 0.0, 7.0], dtype=torch.float64), normal(V, D).double()
    check("add_updates", weight, start, factors, into, writes=(3,), tolerance=1e-6)
    weight[:] = 3e38
    assert TritonKernels("float32").squares(weight, 0 * start, 1.0, None)[0] == pytest.approx(V * D * 9e76, rel=1e-6)


def test_central_training_equals_the_autograd_engine() -> None:
    """Training with a smaller last batch equals the autograd engine in float64, up to the bound of `rounding`."""
    hparams = CentralHParams(
        batch_size=4, learning_rate=0.1, optimizer="momentum", gradient_clip=0.2, dropout=0.3, steps=3
    )
    state = init(LAYOUT.vocabulary_size, ModelHParams(6, 19), 0)
    training = training_of([[1, 2, 3], [4, 4], [6, 7, 8, 9, 1, 2], [3], [], [5, 5, 5, 5]], hparams)
    exact_start = replace(state, params={name: value.double() for name, value in state.params.items()})
    ((exact, log),) = train_central(exact_start, replace(training, engine="autograd"), 3)
    engine = StackedEngine(training, state, SpreadKernels("float32"))
    losses, _ = engine.train(engine.pack(training.chunk(0, 3)))
    assert sum(losses) == pytest.approx(log.loss, rel=1e-6)
    found, expected = (
        {name: after[name].double() - value for name, value in exact_start.params.items()}
        for after in (engine.params(), exact.params)
    )
    assert relative_error(found, expected) < rounding("float32", state.params, global_norm(expected), 3)
