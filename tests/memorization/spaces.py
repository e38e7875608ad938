"""Models of spaces that are small enough to enumerate and large enough to sample."""

import torch

from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams


def layout_of(words: int) -> Layout:
    return Layout(words + 4)


def space_model(words: int, seed: int, scale: float, dtype: torch.dtype = torch.float64) -> CIFGLanguageModel:
    """Normal weights, biases too, of the given standard deviation."""
    model = CIFGLanguageModel(words + 4, ModelHParams(6, 8)).to(dtype)
    rng = stream(seed, "space model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=tuple(parameter.shape))))
    return model
