"""The clip of one user's update, by the L2 norm over all of its tensors.

Thakkar et al. (2020), Algorithm 1, UserUpdate: "return update Delta_k = Delta min(1, S / ||Delta||)".
"""

import math

import torch

from flsim.models.language_model import Params


def global_norm(update: Params) -> float:
    """Return the L2 norm of all tensors as one vector; float64 keeps it finite for every finite float32 update."""
    squares = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in update.values()]
    return float(torch.linalg.vector_norm(torch.stack(squares)))


def clip_factor(norm: float, bound: float) -> float:
    """Return min(1, bound / norm), which is 1 for a norm of 0.

    Raises:
        ValueError: the norm is not finite: infinity times 0 would be a NaN, and no factor mends a NaN.
    """
    if not math.isfinite(norm):
        raise ValueError(f"an update of norm {norm} cannot be clipped")
    return 1.0 if norm <= bound else bound / norm
