"""Processes of noise on sums, whose state is stored in checkpoints.

`Independent` noise has no memory. `Correlated` noise is C^-1 Z, for independent noise Z of all rounds and a lower
triangular matrix C: the noise of a round cancels a part of the noise of earlier rounds. The sensitivity of C depends on
how often a user takes part, so a sampler must state a limit. Noise for secure aggregation (`Skellam`) is added to a sum
of integers.

The noise is a function of (seed, round). Anyone who knows the seed can subtract it: a deployment must draw noise from a
secret, cryptographic source. A custom process, ``path/to/file.py:NAME``, is a class like `Independent`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch

from flsim.base.arrays import Floats
from flsim.base.errors import InputError, RunFailed, at_least_one
from flsim.base.extensions import (
    custom_call_errors,
    is_custom,
    made,
    name_in_settings,
    options_of,
    resolve_class,
    short_name,
    with_options,
    without_options,
)
from flsim.base.rng import stream
from flsim.models.language_model import Params
from flsim.privacy.sampling import Participation, Sampling, refuse_no_event

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# Factorizations of the matrix of prefix sums, whose factor C correlates noise between rounds: coefficients and costs.
#
# Models are prefix sums A (G + C^-1 Z) of noisy updates, with A the lower triangular matrix of ones, G the sums of
# clipped updates by round, and Z independent noise. C is lower triangular with ones on its diagonal. The sensitivity is
# the largest distance by which one user moves C G, in units of the clip; the error is the variance of the noise in the
# last prefix sum, in units of the variance of Z.
#
# [KMRST] Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling" (2021).
# [CKMRT] Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023).
# [MMHMT] McMahan et al., "A Hassle-free Algorithm for Private Learning in Practice" (2024): buffered linear Toeplitz.
# [KL] Kalinin, Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model Training" (2024).

DIGITS = 6  # of optimized numbers; further digits differ between versions of scipy


def square_root_coefficients(rounds: int) -> Floats:
    """Return the coefficients 1, 1/2, 3/8, 5/16, ... of (1 - x)^(-1/2), float64 [rounds]: the square root of A.

    For one participation no Toeplitz factor has a smaller largest error times sensitivity (Fichtenberger et al., 2023).
    """
    steps = np.arange(1.0, rounds)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))


def inverse_square_root_coefficients(bands: int) -> Floats:
    """Return the coefficients 1, -1/2, -1/8, -1/16, -5/128, ... of (1 - x)^(1/2), float64 [bands] ([KL])."""
    steps = np.arange(1.0, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 3) / (2 * steps)]))


def series(numerator: Floats, denominator: Floats, rounds: int) -> Floats:
    """Return the first coefficients of the power series numerator(x) / denominator(x), float64 [rounds]."""
    import scipy  # not at the top, because training needs only torch and numpy

    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    return np.asarray(scipy.signal.lfilter(numerator, denominator, impulse))


def toeplitz(coefficients: Floats, rounds: int) -> Floats:
    """Return the lower triangular Toeplitz matrix of coefficients, zero beyond them, float64 [rounds, rounds]."""
    import scipy  # not at the top, because training needs only torch and numpy

    column = np.zeros(rounds)
    column[: len(coefficients)] = coefficients[:rounds]
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros(rounds)))


def error_of(inverse: Floats) -> float:
    """Return the error of a Toeplitz C, from the coefficients of C^-1 of all rounds."""
    return float(np.square(np.cumsum(inverse)).sum())


def sensitivity_of_toeplitz(coefficients: Floats, participation: Participation) -> float:
    """Return the sensitivity of a Toeplitz C with coefficients of at least 0, float64 [rounds].

    It is the norm of the sum of the columns that start at rounds 0, b, 2 b, ... ([KL], Theorem 2, for coefficients that
    do not increase). Other coefficients are replaced with the smallest such sequence above them.
    """
    above = np.maximum.accumulate(coefficients[::-1])[::-1]
    total = np.zeros(len(above))
    for start in range(0, len(above), participation.separation)[: participation.times]:
        total[start:] += above[: len(above) - start]
    return float(np.linalg.norm(total))


def sensitivity_of_tree(rounds: int, participation: Participation) -> float:
    """Return an upper bound of the sensitivity of binary trees; exact for one participation ([KMRST], section 4).

    A node of level l sums 2^l rounds, in which a user takes part at most m = ceil(2^l / b) times. The nodes of a level
    contain at most k participations. A sum of squares of numbers up to m is largest if as many as possible are m.
    """
    squares, level = 0, 0
    while (size := 1 << level) <= rounds:
        nodes = (rounds // size + 1) // 2  # every second node is in a prefix sum
        most = min(participation.times, -(-size // participation.separation))
        full = min(nodes, participation.times // most)
        rest = participation.times - full * most if full < nodes else 0
        squares += full * most**2 + rest**2
        level += 1
    return float(np.sqrt(squares))


@lru_cache(maxsize=32)
def optimal_bands(rounds: int, bands: int) -> tuple[float, ...]:
    """Return the coefficients of a banded Toeplitz C of least final error times squared sensitivity; the first is 1.

    If rounds of a user are at least `bands` apart, it is k times the squared norm of coefficients ([CKMRT], Theorem 2).
    """
    import scipy  # not at the top, because training needs only torch and numpy

    bands = min(bands, rounds)
    start = square_root_coefficients(bands)[1:]
    if bands == 1:
        return (1.0,)

    def log_loss(free: Floats) -> tuple[float, Floats]:
        coefficients = np.concatenate([[1.0], free])
        prefix = np.cumsum(series(np.ones(1), coefficients, rounds))
        error, norm = prefix @ prefix, coefficients @ coefficients
        # The error is the squared norm of the last row of A C^-1. The derivative of C^-1 with respect to c_m is
        # -C^-2 x^m.
        twice = scipy.signal.lfilter(np.ones(1), coefficients, prefix)
        slopes = np.array([-2 * prefix[m:] @ twice[: rounds - m] for m in range(1, bands)])
        return float(np.log(error) + np.log(norm)), slopes / error + 2 * free / norm

    optimum = scipy.optimize.minimize(log_loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 1_000})
    return (1.0, *(float(np.format_float_positional(value, DIGITS)) for value in optimum.x))


@lru_cache(maxsize=32)
def optimal_blt(rounds: int, buffers: int, times: int, separation: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the scales s and the decays d of a buffered linear Toeplitz C of least error times squared sensitivity.

    C has the coefficients 1, s_1 + s_2 + ..., s_1 d_1 + s_2 d_2 + ..., and so on ([MMHMT], section 3).
    """
    import scipy  # not at the top, because training needs only torch and numpy

    participation = Participation(times, separation)

    def log_loss(free: Floats) -> float:
        scales, decays = np.exp(free[:buffers]), scipy.special.expit(free[buffers:])
        coefficients, inverse = blt_coefficients(scales, decays, rounds)
        error, sensitivity = error_of(inverse), sensitivity_of_toeplitz(coefficients, participation)
        return float(np.log(error) + 2 * np.log(sensitivity))

    # Lives are spread evenly on a logarithmic scale, and beyond the number of rounds, because the best decay can be
    # 1. The scales add up to the 1/2 of the optimal coefficients.
    lives = rounds ** np.linspace(0.1, 1.6, buffers)
    decays = np.exp(-1 / lives)
    scales = 0.5 * np.sqrt(1 - decays) / np.sqrt(1 - decays).sum()
    start = np.concatenate([np.log(scales), scipy.special.logit(decays)])
    with np.errstate(over="ignore", invalid="ignore"):  # coefficients of long steps of the search overflow
        optimum = scipy.optimize.minimize(log_loss, start, method="L-BFGS-B", jac="3-point", options={"maxiter": 500})
    scales, complements = np.exp(optimum.x[:buffers]), scipy.special.expit(-optimum.x[buffers:])
    rounded = [[float(f"{value:.{DIGITS}g}") for value in values] for values in (scales, complements)]
    return tuple(rounded[0]), tuple(1 - value for value in rounded[1])


def blt_coefficients(scales: Floats, decays: Floats, rounds: int) -> tuple[Floats, Floats]:
    """Return the coefficients of C(x) = 1 + sum_j s_j x / (1 - d_j x) and of C^-1, float64 [rounds] each."""
    factors = [np.array([1.0, -decay]) for decay in decays]
    denominator = reduce(np.convolve, factors, np.ones(1))
    numerator = denominator.copy()
    for index, scale in enumerate(scales):
        numerator[1:] += scale * reduce(np.convolve, factors[:index] + factors[index + 1 :], np.ones(1))
    return series(numerator, denominator, rounds), series(denominator, numerator, rounds)


# The processes of noise, by name, and the noise of a round.

MOST_BUFFERS = 16  # of BLT noise, whose optimization takes minutes with hundreds; 2 to 4 are nearly as good
SLOT = "noise/"  # prefix of a process's slots in a state; slots of optimizers have no slash


@dataclass(frozen=True)
class Process:
    """What processes of noise on real and on integer sums have in common.

    Attributes:
        seed: the experiment's seed.
        shapes: shapes of the parameters, by name.
        label: the part of a row's name in tables that names the process; "" for none. Custom code is named NAME.
        settings: for a built-in process, the fields that `privacy.noise_options` sets; other fields follow from the
            run.
    """

    seed: int
    shapes: Mapping[str, torch.Size]
    label: ClassVar[str] = ""
    settings: ClassVar[tuple[str, ...]] = ()

    def init(self) -> dict[str, Params]:
        """Return the state before the first round: slot -> parameter -> tensor of its shape; empty by default."""
        return {}


class Noise(Process, ABC):
    """A process that yields the noise of each round at unit scale; the mechanism multiplies it by z S."""

    @abstractmethod
    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        """Return the noise of a round (from 0), float64 by parameter, and the state after it."""

    @staticmethod
    def event(
        sampled: "Callable[[DpEvent], DpEvent]",  # noqa: ARG004 (for others)
        noise_multiplier: float,  # noqa: ARG004
        rounds: int,  # noqa: ARG004
    ) -> "DpEvent | None":
        """Return the total cost of the first `rounds` rounds; None if it is unknown.

        Args:
            sampled: turns the cost of a mechanism on a cohort's sum into its cost on a sampled cohort's sum; a
                `flsim.privacy.sampling.Sampling`, whose `participation(rounds)` limits a user's rounds.
            noise_multiplier: z divided by the distance by which one user moves a sum; the added noise is z times that
                of this process.
            rounds: number of rounds.
        """
        return None

    def fresh(self, round_: int) -> Params:
        """Return independent standard normal noise of a round, float64 by parameter."""
        return {
            name: torch.from_numpy(stream(self.seed, "noise", round_, name).normal(0.0, 1.0, shape))
            for name, shape in self.shapes.items()
        }


class Independent(Noise):
    """Gaussian noise that is independent from round to round."""

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        return self.fresh(round_), state

    @staticmethod
    def event(sampled: "Callable[[DpEvent], DpEvent]", noise_multiplier: float, rounds: int) -> "DpEvent":
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

        limit = sampled.participation(rounds) if isinstance(sampled, Sampling) else None
        return SelfComposedDpEvent(sampled(GaussianDpEvent(noise_multiplier)), limit.times if limit else rounds)


@dataclass(frozen=True)
class Correlated(Noise):
    """Noise C^-1 Z, for independent noise Z and a lower triangular C with ones on its diagonal."""

    rounds: int = 0  # length of the training, and participation, for which C is optimized; 0 if C does not depend on it
    times: int = 0
    separation: int = 0
    optimized_for: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        at_least_one(**{name: getattr(self, name) for name in self.settings})

    @abstractmethod
    def matrix(self, rounds: int) -> Floats:
        """Return C of the first rounds, float64 [rounds, rounds], which makes the noise independent again."""

    @abstractmethod
    def sensitivity(self, rounds: int, participation: Participation) -> float:
        """Return the largest distance by which one user moves the first rows of C G, in clips, or raise InputError."""

    def cost(self, sampling: Sampling, noise_multiplier: float, rounds: int) -> "DpEvent":
        """Return the total cost of the first `rounds` rounds: one Gaussian mechanism, without amplification.

        The output of a round can depend on earlier rounds (Denisov et al., 2022, Theorem 2.1).
        """
        from dp_accounting import GaussianDpEvent

        return GaussianDpEvent(noise_multiplier / self.sensitivity(rounds, _limited(sampling, rounds)))

    def combined(self, parts: Mapping[int, float]) -> Params:
        """Return a weighted sum of fresh noise of several rounds: round -> weight; the weight of the last is 1."""
        (*earlier, last) = sorted(parts)
        noise = self.fresh(last)
        for round_ in earlier:
            noise = _sum(noise, parts[round_], self.fresh(round_))
        return noise


class Toeplitz(Correlated):
    """A Toeplitz C, whose sensitivity is exact."""

    @abstractmethod
    def first_coefficients(self, rounds: int) -> Floats:
        """Return the first coefficients of C, float64 [rounds], or all if there are fewer; the first is 1."""

    def matrix(self, rounds: int) -> Floats:
        return toeplitz(self.first_coefficients(rounds), rounds)

    def sensitivity(self, rounds: int, participation: Participation) -> float:
        return sensitivity_of_toeplitz(self.first_coefficients(rounds), participation)


@dataclass(frozen=True)
class BandedToeplitz(Toeplitz):
    """A banded Toeplitz C of least error ([CKMRT]).

    The state is the noise of the last `bands` - 1 rounds. Poisson sampling amplifies privacy: because the columns of a
    user's rounds do not overlap, each of its rounds is a separate mechanism ([CKMRT], Theorem 4).
    """

    bands: int = 0  # number of coefficients; at most the separation of a user's rounds. 1 is independent noise
    label = "banded"
    settings = ("bands",)
    optimized_for = ("rounds",)

    @property
    def coefficients(self) -> tuple[float, ...]:
        return optimal_bands(self.rounds, self.bands)

    def init(self) -> dict[str, Params]:
        return {f"last{number}": _zeros(self.shapes) for number in range(self.bands - 1)}

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        """Return z_t - (c_1 x_(t-1) + c_2 x_(t-2) + ...); x_r of round r is in slot r modulo bands - 1."""
        noise = self.fresh(round_)
        for distance, coefficient in enumerate(self.coefficients[1 : round_ + 1], start=1):
            noise = _sum(noise, -coefficient, state[f"last{(round_ - distance) % (self.bands - 1)}"])
        return noise, state | ({f"last{round_ % (self.bands - 1)}": noise} if self.bands > 1 else {})

    def first_coefficients(self, rounds: int) -> Floats:
        return np.array(self.coefficients[:rounds])

    def sensitivity(self, rounds: int, participation: Participation) -> float:
        if self.bands > participation.separation:
            raise InputError(
                f"privacy.noise_options: bands must be at most {participation.separation:,}, because a user can take "
                f"part again after this number of rounds, found {self.bands:,}"
            )
        return float(np.sqrt(participation.times) * np.linalg.norm(self.first_coefficients(rounds)))

    def cost(self, sampling: Sampling, noise_multiplier: float, rounds: int) -> "DpEvent":
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

        limit = _limited(sampling, rounds)
        column = self.sensitivity(rounds, limit) / float(np.sqrt(limit.times))
        return SelfComposedDpEvent(sampling(GaussianDpEvent(noise_multiplier / column)), limit.times)


@dataclass(frozen=True)
class BufferedToeplitz(Toeplitz):
    """A buffered linear Toeplitz C (BLT) of least error ([MMHMT], Algorithm 3).

    The state is `buffers` tensors per parameter, for any number of rounds.
    """

    buffers: int = 0  # 2 to 4 are nearly as good as any number
    label = "BLT"
    settings = ("buffers",)
    optimized_for = ("rounds", "times", "separation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffers > MOST_BUFFERS:
            raise InputError(f"privacy.noise_options: buffers must be at most {MOST_BUFFERS}, found {self.buffers:,}")

    @property
    def scales_and_decays(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return optimal_blt(self.rounds, self.buffers, self.times, self.separation)

    def init(self) -> dict[str, Params]:
        return {f"buffer{number}": _zeros(self.shapes) for number in range(self.buffers)}

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        """Return x = z - (s_1 buffer_1 + s_2 buffer_2 + ...), and buffers d_j buffer_j + x."""
        scales, decays = self.scales_and_decays
        noise = self.fresh(round_)
        for number, scale in enumerate(scales):
            noise = _sum(noise, -scale, state[f"buffer{number}"])
        after = {f"buffer{number}": _sum(noise, decay, state[f"buffer{number}"]) for number, decay in enumerate(decays)}
        return noise, after

    def first_coefficients(self, rounds: int) -> Floats:
        scales, decays = (np.array(values) for values in self.scales_and_decays)
        return blt_coefficients(scales, decays, rounds)[0]


@dataclass(frozen=True)
class Tree(Correlated):
    """Binary trees ([KMRST]): a prefix sum has a node for each 1 in its length.

    Round t, from 1, completes the node of the largest power of 2 that divides t, and replaces the smaller nodes before
    it. There is no state, because the noise of earlier nodes is drawn again.
    """

    label = "tree"

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        """Return the noise of the new node minus the noise of the nodes that it replaces."""
        parts, level = {round_: 1.0}, 0
        while round_ >> level & 1:  # the length so far ends in as many 1s as there are nodes to replace
            parts[(round_ >> level << level) - 1] = -1.0  # the round, from 0, that completed the node of this level
            level += 1
        return self.combined(parts), state

    def matrix(self, rounds: int) -> Floats:
        """Return C, whose row t, from 1, sums as many rounds as the largest power of 2 that divides t."""
        last = np.arange(1, rounds + 1)[:, None]
        column = np.arange(1, rounds + 1)
        return ((last - (last & -last) < column) & (column <= last)).astype(np.float64)

    def sensitivity(self, rounds: int, participation: Participation) -> float:
        return sensitivity_of_tree(rounds, participation)  # an upper bound


@dataclass(frozen=True)
class BandedInverse(Toeplitz):
    """A C whose inverse is banded, with the first coefficients of (1 - x)^(1/2) (BISR; [KL]).

    There is no state, because the noise of the last rounds is drawn again.
    """

    bands: int = 0  # number of coefficients of C^-1. 1 is independent noise
    label = "banded inverse"
    settings = ("bands",)

    def next(self, state: dict[str, Params], round_: int) -> tuple[Params, dict[str, Params]]:
        """Return z_t - z_(t-1) / 2 - z_(t-2) / 8 - ..."""
        inverse = inverse_square_root_coefficients(self.bands)[: round_ + 1]
        return self.combined({round_ - distance: float(value) for distance, value in enumerate(inverse)}), state

    def first_coefficients(self, rounds: int) -> Floats:
        inverse = inverse_square_root_coefficients(self.bands)
        return series(np.ones(1), inverse, rounds)


@dataclass(frozen=True)
class Skellam(Process):
    """Integer noise that users add before secure aggregation; `flsim.privacy.ledger` decodes the noisy sum.

    Users add the difference of two Poisson variables. Sums of such noise have the same distribution with the sum of
    variances (Agarwal, Kairouz and Liu, 2021, section 3), so the noise of all users is drawn once, on the server.
    """

    steps: int = 0  # the clip norm in integer units
    bits: int = 0  # number of bits of a value of the sum, at most 31, so that the noise can be drawn
    label = "Skellam"
    settings = ("steps", "bits")

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, bits=self.bits)
        if self.bits > 31:
            raise InputError(f"bits must be at most 31, found {self.bits}")

    def check(self, noise_multiplier: float) -> None:
        """Raise InputError if a value of the sum is too small for one standard deviation of its noise."""
        if self.deviation(noise_multiplier) >= 2 ** (self.bits - 1):
            raise InputError(
                f"privacy.noise_options: the noise on a value has the standard deviation {noise_multiplier:g} x "
                f"{self.steps:,}, which exceeds {self.bits} bits; raise bits or lower steps"
            )

    def deviation(self, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise on a value, in integer units."""
        return noise_multiplier * self.steps

    def integers(self, noise_multiplier: float, round_: int) -> Params:
        """Return the noise of a round (from 0): integers, as float64 by parameter."""
        noise = {}
        for name, shape in self.shapes.items():
            rng = stream(self.seed, "skellam noise", round_, name)
            first, second = (rng.poisson(self.deviation(noise_multiplier) ** 2 / 2, shape) for _ in range(2))
            noise[name] = torch.from_numpy((first - second).astype(np.float64))
        return noise

    def cost(self, sampling: Sampling, noise_multiplier: float, rounds: int) -> "DpEvent":
        """Return a mechanism for each of a user's rounds, without amplification by sampling.

        Each user adds a part of the noise, so cohorts of a random size are refused, and samplers without a limit.
        """
        from dp_accounting import SelfComposedDpEvent

        from flsim.privacy.accounting import SkellamDpEvent

        limit = _limited(sampling, rounds)
        if not sampling.is_fixed:
            raise InputError(
                f'training.sampler "{short_name(sampling.sampler)}": every user adds a part of the noise, so cohorts '
                'must have the same size; use "min-separation" or "round-robin" without dropout or deadline, or other '
                "noise"
            )
        return SelfComposedDpEvent(SkellamDpEvent(noise_multiplier, self.steps), limit.times)


def _limited(sampling: Sampling, rounds: int) -> Participation:
    limit = sampling.participation(rounds)
    if limit is None:
        raise InputError(
            f'training.sampler "{short_name(sampling.sampler)}": this sampler does not limit how often a user takes '
            'part, and this noise needs such a limit; use "min-separation" or "round-robin", or independent noise'
        )
    return limit


def _sum(values: Params, weight: float, others: Params) -> Params:
    return {name: value + weight * others[name] for name, value in values.items()}


def _zeros(shapes: Mapping[str, torch.Size]) -> Params:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


NOISES: dict[str, type[Process]] = {
    "independent": Independent,
    "banded": BandedToeplitz,
    "blt": BufferedToeplitz,
    "tree": Tree,
    "banded-inverse": BandedInverse,
    "skellam": Skellam,
}


def noise_class(name: str) -> type[Process]:
    """Return the class of a name; raise InputError if there is none, or if a custom file fails."""
    return resolve_class(name, NOISES, "noise", Noise, Skellam)


def refuse_options(name: str, options: Mapping[str, object]) -> None:
    """Raise InputError if the name of a process includes options, or a built-in process has other options."""
    if options_of(name):
        raise InputError(f"noise: write the options of {short_name(name)} in noise_options")
    if is_custom(name):
        return
    kind = noise_class(name)
    if set(options) != set(kind.settings):
        needed = ", ".join(kind.settings) or "none"
        raise InputError(f'noise_options: noise "{name}" has {needed}, found {", ".join(options) or "none"}')
    made(with_options(name, options), kind, 0, {})


def is_correlated(name: str) -> bool:
    """Return whether a name is a built-in process whose noise depends on earlier rounds."""
    return not is_custom(name) and issubclass(noise_class(name), Correlated)


def skellam_of(name: str, seed: int, like: Mapping[str, torch.Tensor]) -> Skellam | None:
    """Return the process of integer noise with this name; None for other noise. For the arguments, see `init`."""
    kind = noise_class(name)
    return made(name, kind, seed, _shapes(like)) if issubclass(kind, Skellam) else None


def depends_on_length(name: str) -> bool:
    """Return whether the noise of the first rounds depends on the number of rounds of the training."""
    return not is_custom(name) and bool(getattr(noise_class(name), "optimized_for", ()))


def settled(name: str, sampling: Sampling, rounds: int) -> str:
    """Return the name of a process, with what its noise depends on, such as the number of rounds, as options."""
    if not depends_on_length(name):
        return name
    limit = _limited(sampling, rounds)
    known = {"rounds": rounds, "times": limit.times, "separation": limit.separation}
    used: tuple[str, ...] = noise_class(name).optimized_for  # type: ignore[attr-defined]
    return with_options(without_options(name), options_of(name) | {option: known[option] for option in used})


def noise_event(name: str, sampled: Sampling, noise_multiplier: float, rounds: int) -> "DpEvent":
    """Return the total cost of rounds with a process's noise; for the arguments, see `Noise.event`."""
    kind = noise_class(name)
    written = name_in_settings(name)
    if issubclass(kind, Correlated | Skellam):
        with custom_call_errors(written, "cost(sampling, noise_multiplier, rounds)", InputError):
            process = cast("Correlated | Skellam", made(name, kind, 0, {}))
            return process.cost(sampled, noise_multiplier, rounds)
    with custom_call_errors(written, "event(sampled, noise_multiplier, rounds)", InputError):
        event = cast("type[Noise]", kind).event(sampled, noise_multiplier, rounds)
    if event is None:
        raise InputError(
            f"{written}: this noise has no privacy event, so no accountant supports it; define `event`, which "
            "can return dp_accounting.NonPrivateDpEvent()"
        )
    refuse_no_event(written, event)
    return event


def init(name: str, seed: int, like: Mapping[str, torch.Tensor]) -> dict[str, Params]:
    """Return a process's state before the first round, by slot of a training state; InputError for other shapes."""
    shapes, kind = _shapes(like), noise_class(name)
    with custom_call_errors(name, "init()", InputError):
        state = made(name, kind, seed, shapes).init()
        _refuse_other_shapes(name, state, shapes, InputError)
    return {SLOT + slot: values for slot, values in state.items()}


def step(
    name: str,
    seed: int,
    like: Mapping[str, torch.Tensor],
    moments: Mapping[str, Params],
    round_: int,
    failure: type[InputError] | type[RunFailed] = RunFailed,
) -> tuple[Params, dict[str, Params]]:
    """Return a round's (from 0) noise at unit scale, not `Skellam`, float64 by parameter, and the slots after it."""
    shapes, kind = _shapes(like), cast("type[Noise]", noise_class(name))
    before = {slot.removeprefix(SLOT): values for slot, values in moments.items() if slot.startswith(SLOT)}
    with custom_call_errors(name, "next(state, round_)", failure):
        noise, after = made(name, kind, seed, shapes).next(before, round_)
        if before.keys() != after.keys():
            raise failure(
                f"{name}: a round changes the slots {sorted(before)} into {sorted(after)}; keep the same slots"
            )
        _refuse_other_shapes(name, after | {"noise": noise}, shapes, failure)
    return noise, {SLOT + slot: values for slot, values in after.items()}


def refuse_unrepeatable(name: str, seed: int, like: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError if a custom process fails, or its noise differs between calls; for the arguments, see `init`."""

    def first() -> dict[str, Params]:
        if skellam := skellam_of(name, seed, like):
            with custom_call_errors(name, "integers(noise_multiplier, round_)", InputError):
                return {"noise": skellam.integers(1.0, 0)}
        noise, slots = step(name, seed, like, init(name, seed, like), 0, InputError)
        return slots | {"noise": noise}

    one, other = first(), first()
    for slot, values in one.items():
        if not all(torch.equal(value, other[slot][key]) for key, value in values.items()):
            raise InputError(
                f"{name}: the noise differs between two calls; draw it with self.fresh or flsim.base.rng.stream"
            )


def _shapes(like: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in like.items()}


def _refuse_other_shapes(
    name: str, slots: Mapping[str, Params], shapes: dict[str, torch.Size], failure: type[Exception]
) -> None:
    for slot, values in slots.items() if is_custom(name) else ():
        are_tensors = all(isinstance(value, torch.Tensor) for value in values.values())
        if not (slot.isidentifier() and are_tensors and _shapes(values) == shapes):
            raise failure(f"{name}: {slot!r} must hold tensors with the names and shapes of the model's parameters")
        if not all(bool(value.isfinite().all()) for value in values.values()):
            raise failure(f"{name}: {slot!r} has values that are not finite; return finite noise")
