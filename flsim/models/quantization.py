"""Quantization of weights, to test whether a smaller model still memorizes a secret (The Secret Sharer)."""

from copy import deepcopy
from typing import TypeVar

import torch

from flsim.models.language_model import TrainableModel

FEWEST, MOST = 2, 16
Model = TypeVar("Model", bound=TrainableModel)


@torch.no_grad()
def quantized(model: Model, bits: int) -> Model:
    """Return a copy whose tensors have at most 2^bits different, evenly spaced values; buffers are not changed.

    Carlini et al. (2019), appendix D.3: 256 values for the weights of a trained network. The value 0 does not change.
    Frozen parameters are quantized too.
    """
    copy = deepcopy(model)
    levels = 2**bits - 1
    for value in copy.parameters():
        low, high = value.min().clamp(max=0), value.max().clamp(min=0)
        scale = float(high - low) / levels
        if scale:
            zero = round(-float(low) / scale)
            value.copy_(torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, levels))
    return copy
