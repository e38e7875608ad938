"""The Gaussian mechanism of a round, canary users with random updates, and the ledger of what a run released."""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import Diverged, InputError, as_list, first_line
from flsim.base.extensions import CustomName, configured, refuse_unknown, short_name, without_options
from flsim.base.files import from_json
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.base.settings import Count, Finite, Flag, Level, Natural, NotNegative, Options, Positive, bounds, settings
from flsim.models.language_model import Params
from flsim.privacy import conventions
from flsim.privacy.noise import NOISES, is_correlated, noise_event, refuse_options
from flsim.privacy.sampling import Sampling, check_cohort, draw_cohort

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# The Gaussian mechanism over a cohort's clipped updates: its settings, its mean, and the adaptive clip.
#
# Thakkar et al. (2020), Algorithm 1; for the adaptive clip, Andrew, Thakkar, McMahan and Ramaswamy, "Differentially
# Private Learning with Adaptive Clipping" (2021), Algorithm 1.
#
# `flsim.privacy.noise` draws the noise.

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
    following = clip * math.exp(min(-hparams.clip_learning_rate * (share - hparams.target_quantile), 99.0))
    if not 1e-30 < following < 1e30:
        raise Diverged(
            f"round {round_ + 1}: the adaptive clip is {following:.1g}; lower privacy.count_noise or "
            f"privacy.clip_learning_rate"
        )
    return following


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
            f"privacy.noise_options: steps must be above {math.floor(math.sqrt(dimension / 4 + root / 2)):,} for "
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


# Canary users, whose updates are random directions, in addition to the users of a federated run.
#
# Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning" (2023). Canary user j answers in each of
# its rounds with 10 clip norms times u_j, an independent uniform unit vector, which the clip shortens to one clip norm.
# After training, the cosine of u_j and the change of the model shows how visible one user's updates are.
#
# The sampler draws from a virtual copy of the population, and canary user j takes part if user j of the copy is drawn.
# Therefore no draw for a real user changes, and every guarantee of the ledger for a user also holds for each canary
# user. Vectors are recomputed from the seed, and never stored.

LENGTH = 10.0  # norm of a canary user's update before the clip, in clip norms; above 1, so that it tests the clip


@settings
class AuditHParams:
    """Settings of canary users, whose updates are random: they test the clip and the noise of a run for `flsim audit`.

    Attributes:
        update_canaries: Number K of canary users in addition to the users of the corpus. They take
            part like users, and each sends a random update of ten clip norms, which is clipped.
            Needs privacy.mechanism "clip" or "dp". Unit: users.
        canary_coins: Let a canary user take part in training only if an independent fair coin lands heads. Guesses of
            the coins then bound epsilon. Otherwise all canary users take part, which gives only an estimate.
    """

    update_canaries: Annotated[Natural, bounds(le=100_000)] = 0
    canary_coins: Flag = False

    def __post_init__(self) -> None:
        if self.canary_coins and not self.update_canaries:
            raise InputError("canary_coins needs canary users; set update_canaries, e.g. to 1000, or remove it")

    def refuse_without_clip(self, privacy: PrivacyHParams) -> None:
        """Raise InputError if there are canary users but no clip."""
        if self.update_canaries and privacy.mechanism == "none":
            raise InputError(
                f"audit.update_canaries {self.update_canaries:,}: canary users need a clip, and "
                f'privacy.mechanism "none" has no clip; set it to "clip" or "dp", or remove '
                f"update_canaries"
            )

    def random_updates(self, population: int) -> float:
        """Return the expected number of random updates per real update of a round with this population."""
        return self.update_canaries * (0.5 if self.canary_coins else 1.0) / population

    def cost(self, population: int) -> str:
        """Return a sentence on the cost of the canary users for a run with this number of real users."""
        return (
            f"{self.update_canaries:,} canary users in addition to {population:,} users: a round has about "
            f"{self.random_updates(population):.2g} times as many random updates as real ones, which cost "
            "utility as noise does"
        )

    def present(self, seed: int) -> Flags:
        """Return which canary users take part in training, bool [K]: all, or those whose coin lands heads."""
        numbers = range(self.update_canaries)
        return np.array([not self.canary_coins or toss(seed, number) for number in numbers], dtype=np.bool_)

    def drawn(self, seed: int, round_: int, population: int, cohort: int, sampler: str) -> Ints:
        """Return the canary users of a round (from 0) [n]; more than N users have several virtual populations."""
        present, canaries = self.present(seed), self.update_canaries
        numbers = []
        for copy, first in enumerate(range(0, canaries, population)):
            own_seed = int(stream(seed, "update canary cohorts", copy).integers(2**62))
            cohort_of_copy = draw_cohort(own_seed, round_, population, cohort, sampler) + first
            numbers.append(cohort_of_copy[cohort_of_copy < canaries])
        users: Ints = np.concatenate([np.empty(0, np.int64), *numbers])
        return np.asarray(users[present[users]])


def toss(seed: int, canary: int) -> bool:
    """Return the fair coin that decides whether an update canary is present."""
    return bool(stream(seed, "update canary coin", canary).random() < 0.5)


def direction(seed: int, canary: int, like: Mapping[str, torch.Tensor]) -> tuple[Params, float]:
    """Return standard normal float32 tensors with the names and shapes of `like`, and the L2 norm of all of them."""
    vector = {
        name: torch.from_numpy(
            stream(seed, "update canary", canary, name).standard_normal(tuple(value.shape), np.float32)
        )
        for name, value in like.items()
    }
    return vector, math.sqrt(
        sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in vector.values())
    )


def update_of(canary: int, seed: int, clip: float, like: Mapping[str, torch.Tensor]) -> Params:
    """Return the update of a canary user before the clip: `LENGTH` clip norms long, float64 by parameter of `like`."""
    vector, norm = direction(seed, canary, like)
    return {name: block.double() * (LENGTH * clip / norm) for name, block in vector.items()}


def cosines(change: Params, seed: int, canaries: range) -> Floats:
    """Return the cosine of a change of the model and each canary user's vector, float64 [n]; 0 without a change."""
    change = {name: value.double() for name, value in change.items()}
    length = math.sqrt(sum(float(torch.linalg.vector_norm(value)) ** 2 for value in change.values()))
    result = np.zeros(len(canaries))
    for index, canary in enumerate(canaries if length else ()):
        vector, norm = direction(seed, canary, change)
        products = (torch.vdot(change[name].flatten(), block.double().flatten()) for name, block in vector.items())
        result[index] = sum(map(float, products)) / (length * norm)
    return result


# The ledger of a run: how users were sampled, and the noise on their sum; a convention turns it into an epsilon.

Unit = Literal["user", "record"]  # difference of neighbouring data sets; a record is one sentence

Int64 = Annotated[Count, bounds(lt=2**63)]


@settings
class Entry:
    """Rounds of one kind: a sampled cohort's clipped updates are summed, and noise is added to the sum."""

    sampler: str  # how the cohort is drawn, see `flsim.privacy.sampling`; a custom sampler is named by content
    population: Int64
    cohort: Int64  # number of users drawn; under Poisson sampling, their expected number
    # standard deviation of the noise on the sum, divided by the clip norm S; 0 is no noise. If a round releases
    # more than the sum (adaptive clipping: a count), the equivalent for everything that is released
    noise_multiplier: NotNegative
    rounds: Int64
    noise: str = "independent"  # the process of the noise, see `flsim.privacy.noise`; custom noise is named by content

    def __post_init__(self) -> None:
        refuse_unknown(self.noise, NOISES, "noise")
        check_cohort(self.population, self.cohort, self.sampler)

    def event(self, sensitivity: conventions.Sensitivity) -> "DpEvent":
        """Return these rounds as dp_accounting's event, where one user changes the sum by S or by 2S."""
        from dp_accounting import GaussianDpEvent, NonPrivateDpEvent

        if self.noise_multiplier == 0:
            return NonPrivateDpEvent()
        sampled = Sampling(self.sampler, self.population, self.cohort)
        multiplier = self.noise_multiplier / (2 if sensitivity == "2S" else 1)
        sampled(GaussianDpEvent(multiplier))  # raises if a sampler has no event, even if the noise does not use it
        return noise_event(self.noise, sampled, multiplier, self.rounds)


@dataclass(frozen=True)
class Ledger:
    """The rounds that were released so far, in order; adjacent entries differ in more than their number of rounds."""

    entries: tuple[Entry, ...] = ()

    @property
    def rounds(self) -> int:
        return sum(entry.rounds for entry in self.entries)

    def record(self, entry: Entry) -> "Ledger":
        if self.entries and replace(self.entries[-1], rounds=entry.rounds) == entry:
            merged = replace(entry, rounds=self.entries[-1].rounds + entry.rounds)
            return Ledger((*self.entries[:-1], merged))
        return Ledger((*self.entries, entry))

    def event(self, sensitivity: conventions.Sensitivity) -> "DpEvent":
        """Return all rounds as one event of dp_accounting; raise InputError if this is impossible."""
        from dp_accounting import ComposedDpEvent

        if len(self.entries) > 1 and (kinds := [entry.noise for entry in self.entries if is_correlated(entry.noise)]):
            raise InputError(
                f'noise "{without_options(kinds[0])}": settings changed between rounds, and accountants support '
                "correlated noise only if they are the same in all rounds"
            )
        return ComposedDpEvent([entry.event(sensitivity) for entry in self.entries])

    def to_json(self) -> str:
        """Return the entries; independent noise is omitted, so that existing digests of states stay stable."""
        entries = [asdict(entry) for entry in self.entries]
        for entry in entries:
            if entry["noise"] == "independent":
                del entry["noise"]
        return json.dumps(entries)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Return the ledger that `to_json` wrote, bit for bit; raise InputError for another text."""
        try:
            return cls(tuple(Entry(**fields) for fields in from_json(text)))
        except (TypeError, ValueError) as error:
            raise InputError(f"not a privacy ledger: {error}") from error


def epsilon(ledger: Ledger, delta: float, convention: conventions.Convention) -> float:
    """Return epsilon of a ledger for users, infinite if a round had no noise; InputError if it cannot be accounted."""
    from flsim.privacy.accounting import epsilon_of

    samplers = {conventions.sampler_in_conventions(entry.sampler) for entry in ledger.entries}
    if samplers - {convention.sampler}:
        mixed = "a convention covers only one sampler; continue a state with the sampler that it began with"
        raise InputError(
            f"{convention} is for {convention.sampler} sampling, but the ledger has {' and '.join(sorted(samplers))} "
            f"rounds; {'choose a convention for that sampler' if len(samplers) == 1 else mixed}"
        )
    try:
        return epsilon_of(ledger.event(convention.sensitivity), delta, convention)
    except (ArithmeticError, ValueError) as error:  # accountants overflow for extreme noise
        if isinstance(error, InputError):
            raise
        multipliers = ", ".join(dict.fromkeys(f"{entry.noise_multiplier:.3g}" for entry in ledger.entries))
        raise InputError(
            f"{convention}: cannot account for noise multiplier {multipliers} ({first_line(error)}); use a "
            "multiplier closer to 1, or an epsilon that needs such a multiplier"
        ) from error


# The epsilons that a run reports: one with the paper's convention, for comparison, and one whose assumptions hold.


def reported(sampler: str) -> tuple[conventions.Convention, ...]:
    """Return the paper's convention, if it is for this sampler, and the sound convention."""
    return tuple(
        one
        for one in conventions.conventions_of(sampler)
        if one in (conventions.PAPER, conventions.sound_convention(sampler))
    )


def spent(ledger: Ledger, sampler: str, delta: float, names: Iterable[str] | None = None) -> dict[str, float]:
    """Return epsilon by the name of each reported convention, or of each in `names`; each needs a third of a second."""
    known = {convention.name: convention for convention in conventions.conventions_of(sampler)}
    chosen = [one.name for one in reported(sampler)] if names is None else as_list("conventions", names)
    for name in chosen:
        if name not in known:
            raise InputError(f"conventions: {name!r} is not for {short_name(sampler)} sampling; use {', '.join(known)}")
    return {name: epsilon(ledger, delta, known[name]) for name in chosen}


def note(epsilons: dict[str, float], unit: Unit = "user") -> str:
    """Return the epsilons as a few words for a progress bar."""
    level = "" if unit == "user" else f"{unit}-level "
    return ", ".join(f"{level}epsilon {value:.3g} ({name})" for name, value in epsilons.items())


def sentence(epsilons: dict[str, float], sampler: str, delta: float, unit: Unit = "user") -> str:
    parts = []
    for convention in reported(sampler):
        origin = " as the paper counts" if convention is conventions.PAPER else ""
        parts.append(
            f"epsilon {epsilons[convention.name]:.3g}{origin} ({convention.name}: {convention.relation}, sensitivity "
            f"{convention.sensitivity}, {convention.accountant.upper()}"
            + (f", {convention.conversion} conversion)" if convention.conversion else ")")
        )
    return f"{unit}-level privacy after {short_name(sampler)} sampling, delta {delta:.3g}: {'; '.join(parts)}"


def foresee(plan: Entry, sampler: str, delta: float, population: int, unit: Unit) -> None:
    """Print the epsilon that all planned rounds will spend; raise InputError if it cannot be accounted."""
    epsilons = spent(Ledger((plan,)), sampler, delta)
    what = "rounds" if unit == "user" else "steps"
    say(f"{plan.rounds:,} {what} will spend: {note(epsilons, unit)}, delta {delta:.3g}")
    if delta >= 1 / population:
        say(
            f"privacy.delta {delta:g} is not below 1 / {population:,} {unit}s: publishing one {unit}'s data would "
            "satisfy it"
        )


def affordable_rounds(planned: Callable[[int], Entry], rounds: int, max_epsilon: float, delta: float) -> int:
    """Return the most rounds, up to `rounds`, of an epsilon up to `max_epsilon`; InputError if there is none."""

    def spends(number: int) -> float:
        entry = planned(number)
        return epsilon(Ledger((entry,)), delta, conventions.sound_convention(entry.sampler))

    if spends(rounds) <= max_epsilon:
        return rounds
    if (least := spends(1)) > max_epsilon:
        raise InputError(
            f"privacy.max_epsilon {max_epsilon:g}: one round has epsilon {least:.4g}; raise max_epsilon or "
            "noise_multiplier"
        )
    return bisect_left(range(rounds), True, lo=2, key=lambda number: spends(number) > max_epsilon) - 1


# The curve of delta against epsilon that a ledger proves.

EPSILONS = np.concatenate([np.linspace(0, 10, 201), np.linspace(10, 60, 101)[1:]])


def delta_curve(ledger: Ledger, convention: conventions.Convention) -> NDArray[np.float64]:
    """Return delta at each of `EPSILONS` that a ledger proves under a convention; 1 if it proves nothing."""
    from flsim.privacy.accounting import delta_of  # loads dp_accounting and scipy.stats, which takes a second

    return delta_of(ledger.event(convention.sensitivity), EPSILONS, convention)
