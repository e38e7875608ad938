"""The Gaussian mechanism over a cohort's clipped updates: its settings, its mean, and the adaptive clip.

Thakkar et al. (2020), Algorithm 1; for the adaptive clip, Andrew, Thakkar, McMahan and Ramaswamy, "Differentially
Private Learning with Adaptive Clipping" (2021), Algorithm 1.

`flsim.privacy.noise` draws the noise.
"""

import math
from dataclasses import field
from typing import Annotated, Literal

import numpy as np
import torch

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName, configured
from flsim.base.rng import stream
from flsim.base.settings import Finite, Level, Options, Positive, settings
from flsim.models.language_model import Params
from flsim.privacy.noise import NOISES, refuse_options

Mechanism = Literal["none", "clip", "dp"]


LEAST_NOISE, MOST_NOISE = 1e-6, 1e6  # range of noise multipliers in which accountants do not overflow


def check_noise_multiplier(value: float, name: str = "noise_multiplier") -> None:
    """Raise InputError unless a noise multiplier is 0, or in the range of accountants."""
    if not 0 <= value < math.inf:
        raise InputError(f"{name} must be finite and at least 0, found {value:g}")
    if value and not LEAST_NOISE <= value <= MOST_NOISE:
        raise InputError(f"{name} must be 0, or between {LEAST_NOISE:g} and {MOST_NOISE:,.0f}, found {value:g}")


@settings
class PrivacyHParams:
    """Settings of the mechanism that bounds how far one user can move the model.

    Attributes:
        mechanism: "none" averages updates, weighted by local examples (FedAvg). "clip" clips each update, and divides
            their sum by the expected cohort, independent of the numbers of examples. "dp" also adds Gaussian noise to
            the sum once, on the server (DP-FedAvg). In central training an update is the gradient of a record.
        clip: Clip norm S, the bound on the L2 norm of a user's complete update. With an adaptive clip, this is the
            first value. Unit: L2 norm.
        noise_multiplier: Noise multiplier z: the noise on the sum of updates has the standard deviation z S. Increase
            it for a smaller epsilon. Unit: clip norms.
        delta: Delta of the reported (epsilon, delta). When not set: 1 / (10 N), for N training users, or N records in
            central training. Unit: probability.
        target_quantile: Quantile gamma of the users' norms, which an adaptive clip follows. When not set: the clip is
            fixed. Unit: share of users.
        clip_learning_rate: Learning rate eta_C of an adaptive clip: a round changes the clip at most by a factor of
            about exp(eta_C). Unit: none.
        count_noise: Standard deviation sigma_b of the noise on the count of users within an adaptive clip. When not
            set: a 20th of the cohort. The count uses a part of z: the updates get z_Delta = (z^-2 - (2
            sigma_b)^-2)^(-1/2). Unit: users.
        noise: Process that draws the noise on the sum: "independent" from round to round. Correlated noise (DP-FTRL)
            needs a sampler that limits how often a user takes part: "banded" (Toeplitz), "blt" (buffered Toeplitz),
            "tree" (binary trees) and "banded-inverse", see docs/dp-ftrl.md. "skellam" is integer noise for secure
            aggregation. For custom noise, see docs/privacy.md.
        noise_options: Options of the noise: { bands = 8 } for "banded" and "banded-inverse", { buffers = 2 } for "blt",
            { steps = 10000, bits = 24 } for "skellam", or keyword arguments of custom noise, numbers or text. Unit:
            none.
        max_epsilon: Largest epsilon of the run, under the sound convention that it reports. Training ends before the
            round that would exceed this epsilon. When not set: all rounds are trained. Unit: none.

    Examples:
        >>> flsim.Privacy("dp", clip=0.2, noise_multiplier=1.0)                # doctest: +SKIP
    """

    mechanism: Mechanism = "none"
    clip: Positive | None = None
    noise_multiplier: Finite = 0.0
    delta: Level | None = None
    target_quantile: Level | None = None
    clip_learning_rate: Positive = 0.2
    count_noise: Positive | None = None
    noise: Annotated[str, CustomName("noise", NOISES)] = "independent"
    noise_options: Options = field(default_factory=dict)
    max_epsilon: Positive | None = None

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        kind = self.mechanism
        if kind != "none" and self.clip is None:
            raise InputError(f'mechanism "{kind}" needs a clip; set privacy.clip, e.g. to the paper\'s 0.2')
        if kind == "dp" and not self.noise_multiplier:
            raise InputError('mechanism "dp" needs noise_multiplier above 0, found 0; without noise, use "clip"')
        if kind == "none" and (self.clip is not None or self.target_quantile is not None):
            raise InputError(
                'mechanism "none" does not clip updates; remove clip and target_quantile, or use "clip" or "dp"'
            )
        if kind != "dp" and (self.noise_multiplier or self.count_noise is not None):
            raise InputError(f'mechanism "{kind}" adds no noise; remove noise_multiplier and count_noise, or use "dp"')
        refuse_options(self.noise, self.noise_options)
        if kind != "dp" and self.max_epsilon is not None:
            raise InputError(f'mechanism "{kind}" has no epsilon; remove max_epsilon, or use "dp"')
        if self.target_quantile is None and self.count_noise is not None:
            raise InputError("count_noise is for an adaptive clip; set target_quantile, or remove count_noise")
        if kind != "dp" and self.noise != "independent":
            raise InputError(f'mechanism "{kind}" adds no noise; remove privacy.noise, or use "dp"')
        # z_Delta is valid for noise without memory
        if self.target_quantile is not None and self.noise != "independent":
            raise InputError("an adaptive clip needs independent noise; remove privacy.noise or target_quantile")

    @property
    def process(self) -> str:
        return configured(self, "noise")

    def delta_for(self, population: int) -> float:
        return 1 / (10 * population) if self.delta is None else self.delta

    def count_noise_for(self, cohort: int) -> float:
        """Return sigma_b, for this expected number of users; 0 if there is no noise."""
        if self.mechanism != "dp":
            return 0.0
        return cohort / 20 if self.count_noise is None else self.count_noise

    def update_noise_multiplier(self, cohort: int) -> float:
        """Return z_Delta, the standard deviation of the noise on updates, divided by the clip; z for a fixed clip.

        Andrew et al. (2021), Theorem 1. A user moves the count of users within the clip by 1/2 (see `next_clip`), so
        its noise has multiplier 2 sigma_b, and inverse squares add up. InputError if the count's noise is already
        weaker than z.
        """
        z = self.noise_multiplier
        if not z or self.target_quantile is None:
            return z
        sigma = self.count_noise_for(cohort)
        if not 2 * sigma > z:
            raise InputError(
                f"privacy.count_noise of {sigma:g} uses more privacy than noise_multiplier {z:g} allows; raise "
                f"it above {z / 2:g}, or enlarge the cohort"
            )
        return float((z**-2 - (2 * sigma) ** -2) ** -0.5)


def noisy_mean(total: Params, clip: float, hparams: PrivacyHParams, cohort: int, noise: Params | None = None) -> Params:
    """Return (sum of clipped updates + noise at unit scale x z S) / qN, in float64.

    With the actual number of users as denominator, the presence of a user would change the weight of all others.
    """
    deviation = hparams.update_noise_multiplier(cohort) * clip
    return {
        name: (value if noise is None else value + deviation * noise[name]) / cohort for name, value in total.items()
    }


def next_clip(
    clip: float, within: int, users: int, hparams: PrivacyHParams, cohort: int, seed: int, round_: int
) -> float:
    """Return the clip of the next round, C exp(-eta_C (b - gamma)), with b a noisy share of users within the clip C.

    Each user counts 1/2 within the clip and -1/2 beyond, so adding or removing a user moves the count by 1/2.
    """
    if hparams.target_quantile is None:
        return clip
    sigma = hparams.count_noise_for(cohort)
    noise = stream(seed, "count noise", round_).normal(0.0, sigma) if sigma else 0.0
    share = (within - users / 2 + noise) / cohort + 0.5
    return float(clip * math.exp(-hparams.clip_learning_rate * (share - hparams.target_quantile)))


# The sum that secure aggregation reveals: users send integers, and the server sees their noisy sum modulo 2^bits.
#
# Each user clips the update, scales it, and rounds it at random ([KLS], Algorithm 1), and adds a part of the noise
# (`flsim.privacy.noise.Skellam`). A rotation, which only makes wraps rarer, is not part. Sums of integers in float64
# are exact below 2^53, so the number of shards changes no bit.
#
# [KLS] Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
# Aggregation" (2021).


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
