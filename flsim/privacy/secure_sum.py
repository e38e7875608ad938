"""The sum that secure aggregation reveals: users send integers, and the server sees their noisy sum modulo 2^bits.

Each user clips the update, scales it, and rounds it at random ([KLS], Algorithm 1), and adds a part of the noise
(`flsim.privacy.noise.Skellam`). A rotation, which only makes wraps rarer, is not part. Sums of integers in float64 are
exact below 2^53, so the number of shards changes no bit.

[KLS] Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation" (2021).
"""

import math

import numpy as np
import torch

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.models.language_model import Params


def largest_norm(steps: int, dimension: int) -> float:
    """Return the norm of scaled updates that random rounding keeps within `steps`, in integer units.

    Rounding is repeated until the norm is at most `steps`, which succeeds with probability 1 - beta or more, for beta =
    e^(-1/2), if c^2 + d / 4 + c + sqrt(d) / 2 <= steps^2 ([KLS]). A norm of c + sqrt(d) is never exceeded. Raises
    InputError if `steps` is too small for the number of parameters.
    """
    root = math.sqrt(dimension)
    rest = steps**2 - dimension / 4 - root / 2
    norm = max(steps - root, math.sqrt(rest + 1 / 4) - 1 / 2 if rest > 0 else 0.0)
    if norm <= 0:
        raise InputError(
            f"privacy.noise_options: steps must be above {math.ceil(math.sqrt(dimension / 4 + root / 2)):,} for "
            f"{dimension:,} parameters, found {steps:,}; raise it, for example to {10 * math.ceil(root):,}"
        )
    return norm


def rounded(update: Params, clip: float, steps: int, seed: int, round_: int, user: int) -> Params:
    """Return an update clipped at S as integers, float64 by parameter, with an L2 norm of at most `steps`."""
    flat = np.concatenate([value.numpy().ravel() for value in update.values()]) * (steps / clip)
    most, norm = largest_norm(steps, len(flat)), float(np.linalg.norm(flat))
    scaled = flat * min(1.0, most / norm) if norm else flat
    rng = stream(seed, "rounding", round_, user)
    while True:
        whole = np.floor(scaled + rng.random(len(scaled)))
        if float(whole @ whole) <= steps**2:
            break
    parts = torch.split(torch.from_numpy(whole), [value.numel() for value in update.values()])
    return {name: part.view(update[name].shape) for name, part in zip(update, parts, strict=True)}


def released(total: Params, noise: Params, clip: float, steps: int, bits: int) -> tuple[Params, int]:
    """Return the sum of `rounded` updates + noise modulo 2^bits, in units of updates, and the number of wraps."""
    decoded, wraps, half = {}, 0, 2.0 ** (bits - 1)
    for name, value in total.items():
        noisy = value + noise[name]
        wrapped = torch.remainder(noisy + half, 2 * half) - half
        wraps += int((wrapped != noisy).sum())
        decoded[name] = wrapped * (clip / steps)
    return decoded, wraps
