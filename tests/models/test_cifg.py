"""The model of the paper: its size, its equations, and that stepping is reading."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import loss_sum


def test_the_papers_model_has_1_422_250_parameters() -> None:
    """V D + D 3H + D 3H + 3H + H D + V, with V = 10,000 (special tokens counted), D = 96, H = 670."""
    model = CIFGLanguageModel(10_000, ModelHParams())
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_422_250
    assert 10_000 * 96 + 2 * 96 * 3 * 670 + 3 * 670 + 670 * 96 + 10_000 == 1_422_250


def test_the_recurrence_is_fed_by_the_projection() -> None:
    """The recurrent weight reads D numbers, not H; and without the projection nothing recurs but the memory cell."""
    model = CIFGLanguageModel(50, ModelHParams(embedding=4, units=9)).initialize(0)
    assert model.recurrent_weight.shape == (4, 27)
    tokens = torch.tensor([[1, 2, 3]])
    full = model.read(tokens)[1][1]
    with torch.no_grad():
        model.projection.zero_()
    without_projection = model.read(tokens)[1][1]
    with torch.no_grad():
        model.recurrent_weight.zero_()
    assert torch.equal(model.read(tokens)[1][1], without_projection)
    assert not torch.allclose(full, without_projection)


def test_input_and_output_embeddings_are_one_tensor() -> None:
    model = CIFGLanguageModel(50, ModelHParams(4, 9)).initialize(0)
    assert [name for name, p in model.named_parameters() if p.shape[0] == 50] == ["embedding", "output_bias"]
    (gradient,) = torch.autograd.grad(loss_sum(model, torch.tensor([[1]]), torch.tensor([[2]]))[0], [model.embedding])
    assert gradient[1].abs().sum() > 0  # read as input
    assert gradient[30].abs().sum() > 0  # a class among others at the output


@settings(max_examples=20)
@given(seed=st.integers(0, 1_000), time=st.integers(1, 6), scale=st.sampled_from([0.1, 1.0, 5.0]))
def test_forward_equals_the_equations(seed: int, time: int, scale: float) -> None:
    """numpy, one gate at a time, the input gate written as 1 - f."""
    D, H, V = 3, 4, 7
    model = CIFGLanguageModel(V, ModelHParams(D, H)).initialize(seed).double()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=tuple(parameter.shape))))
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}
    tokens = rng.integers(0, V, time)
    c, r, expected = np.zeros(H), np.zeros(D), []
    for token in tokens:
        f_in, o_in, g_in = (
            p["embedding"][token] @ p["input_weight"][:, k * H : (k + 1) * H]
            + r @ p["recurrent_weight"][:, k * H : (k + 1) * H]
            + p["gate_bias"][k * H : (k + 1) * H]
            for k in range(3)
        )
        f, o = 1 / (1 + np.exp(-f_in)), 1 / (1 + np.exp(-o_in))
        i = 1 - f
        c = f * c + i * np.tanh(g_in)
        r = (o * np.tanh(c)) @ p["projection"]
        expected.append(p["embedding"] @ r + p["output_bias"])
    np.testing.assert_allclose(model(torch.from_numpy(tokens)[None])[0].detach().numpy(), expected, atol=1e-10)


def test_starting_and_stepping_is_reading() -> None:
    model = CIFGLanguageModel(20, ModelHParams(4, 6)).initialize(1).double()
    tokens = torch.tensor([[18, 3, 5, 7], [18, 1, 1, 2]])
    log_probs = model(tokens).log_softmax(-1)
    state, first = model.start(tokens[:, :2])
    torch.testing.assert_close(first, log_probs[:, 1])
    for time in (2, 3):
        state, following = model.step(state, tokens[:, time])
        torch.testing.assert_close(following, log_probs[:, time])


def test_initialization_is_a_function_of_the_seed_alone() -> None:
    models = [CIFGLanguageModel(30, ModelHParams(4, 6)).initialize(seed) for seed in (0, 0, 1)]
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_loss_counts_real_positions_only() -> None:
    model = CIFGLanguageModel(20, ModelHParams(4, 6)).initialize(1).double()
    inputs, targets = torch.tensor([[18, 3, 0], [18, 0, 0]]), torch.tensor([[3, 19, 0], [19, 0, 0]])
    loss, count = loss_sum(model, inputs, targets)
    log_probs = model(inputs).log_softmax(-1)
    assert count == 3
    torch.testing.assert_close(loss, -(log_probs[0, 0, 3] + log_probs[0, 1, 19] + log_probs[1, 0, 19]))
