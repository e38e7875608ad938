"""The model of the paper: its size, its equations, and that stepping is reading."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams


def test_the_papers_model_has_1_422_250_parameters() -> None:
    """V D + D 3H + D 3H + 3H + H D + V, with V = 10,000 (special tokens counted), D = 96, H = 670."""
    model = CIFGLanguageModel(10_000, ModelHParams())
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_422_250
    assert 10_000 * 96 + 2 * 96 * 3 * 670 + 3 * 670 + 670 * 96 + 10_000 == 1_422_250


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
