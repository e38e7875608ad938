"""The architectures by name, and the one place that makes a model from its settings."""

from collections.abc import Mapping

import torch

from flsim.base.errors import InputError
from flsim.base.extensions import is_own, resolve_class
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.convolutional import ConvolutionalLanguageModel
from flsim.models.language_model import Capabilities, ModelSettings, Params, TrainableModel, representative
from flsim.models.recurrent import GRULanguageModel, LSTMLanguageModel
from flsim.models.transformer import TransformerLanguageModel

BUILT_IN: Mapping[str, type[TrainableModel]] = {
    "cifg": CIFGLanguageModel,
    "lstm": LSTMLanguageModel,
    "gru": GRULanguageModel,
    "transformer": TransformerLanguageModel,
    "convolutional": ConvolutionalLanguageModel,
}


def class_of(architecture: str) -> type[TrainableModel]:
    """Return the class of a built-in architecture, or of a user's own, whose file is executed.

    Raises:
        InputError: see `flsim.base.extensions.resolve_class`.
    """
    return resolve_class(architecture, BUILT_IN, "architecture", TrainableModel)  # type: ignore[type-abstract]


def declared(architecture: str) -> Capabilities | None:
    """Return the capabilities of a built-in architecture; None for a user's own, as no code is executed."""
    return None if is_own(architecture) else class_of(architecture).capabilities


def with_low_precision() -> str:
    """Return the names of the built-in architectures that train in low precision, as text."""
    return " or ".join(f'"{name}"' for name, kind in BUILT_IN.items() if kind.capabilities.low_precision)


def build(vocabulary_size: int, hparams: ModelSettings) -> TrainableModel:
    """Return a model of these settings in evaluation mode, before `initialize`; built-in models are all zeros.

    From then on cuDNN, which computes recurrences and convolutions on NVIDIA GPUs, does so in float32 in this process,
    and chooses algorithms that repeat themselves. torch lets it round factors to TF32, in training and in ranks.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    return class_of(hparams.architecture)(vocabulary_size, hparams).eval()


def weights_of(vocabulary_size: int, hparams: ModelSettings) -> int:
    """Return the number of trained weights of a built-in architecture, without memory for them.

    Raises:
        InputError: a tensor of such sizes could not be addressed.
    """
    try:
        with torch.device("meta"):
            return sum(value.numel() for value in build(vocabulary_size, hparams).trainable.values())
    except RuntimeError as error:  # an overflow of 64 bits
        raise InputError(f"model: no tensor can be that large ({error}); set smaller sizes") from error


def restore(params: Params, hparams: ModelSettings, vocabulary_size: int) -> TrainableModel:
    """Return a model of these settings with a copy of the trained parameters, in their dtype and on their device."""
    model, like = build(vocabulary_size, hparams), representative(params)
    is_of_its_dtype = representative(model.trainable).dtype == like.dtype
    model = model.to(like.device) if is_of_its_dtype else model.to(like.device, like.dtype)
    return model.load(params)
