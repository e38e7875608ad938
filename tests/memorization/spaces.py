"""Models of spaces that are small enough to enumerate and large enough to sample."""

import torch
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.measures.memorization.score import log_perplexity
from flsim.measures.memorization.template import Template
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import LanguageModel


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


def space_scores(model: LanguageModel, prefix: Tensor, template: Template) -> Tensor:
    """P(r|p) of every continuation in the space, in lexicographic order: all of them are read."""
    return log_perplexity(model, prefix, torch.cartesian_prod(*template.on(prefix.device)))
