"""The clip of one user's update: by the norm of the whole of it, all tensors together.

Thakkar et al. (2020), Algorithm 1, UserUpdate: "return update Delta_k = Delta min(1, S / ||Delta||)".
"""

import math

import torch

from flsim.models.language_model import Params


def global_norm(update: Params) -> float:
    """L2 norm of all tensors as one vector, in float64: finite for every float32 update that is."""
    squares = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in update.values()]
    return float(torch.linalg.vector_norm(torch.stack(squares)))


def clip_factor(norm: float, bound: float) -> float:
    """min(1, bound / norm), also for a norm of 0.

    Raises:
        ValueError: the norm is not finite: infinity times 0 would be a NaN, and no factor mends a NaN.
    """
    if not math.isfinite(norm):
        raise ValueError(f"an update of norm {norm} cannot be clipped")
    return 1.0 if norm <= bound else bound / norm
