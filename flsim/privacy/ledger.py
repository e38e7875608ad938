"""The ledger of a run: how users were sampled, and the noise on their sum; a convention turns it into an epsilon."""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, as_list, at_least_one, first_line
from flsim.base.extensions import refuse_unknown, short_name, without_options
from flsim.base.files import from_json
from flsim.base.progress import say
from flsim.privacy.conventions import (
    PAPER,
    Convention,
    Sensitivity,
    conventions_of,
    sampler_in_conventions,
    sound_convention,
)
from flsim.privacy.noise import NOISES, is_correlated, noise_event
from flsim.privacy.sampling import Sampling, check_cohort

if TYPE_CHECKING:  # importing takes half a second in every process of a run
    from dp_accounting import DpEvent

Unit = Literal["user", "record"]  # difference of neighbouring data sets; a record is one sentence


@dataclass(frozen=True)
class Entry:
    """Rounds of one kind: a sampled cohort's clipped updates are summed, and noise is added to the sum."""

    sampler: str  # how the cohort is drawn, see `flsim.privacy.sampling`; a custom sampler is named by content
    population: int
    cohort: int  # number of users drawn; under Poisson sampling, their expected number
    # standard deviation of the noise on the sum, divided by the clip norm S; 0 is no noise. If a round releases
    # more than the sum (adaptive clipping: a count), the equivalent for everything that is released
    noise_multiplier: float
    rounds: int
    noise: str = "independent"  # the process of the noise, see `flsim.privacy.noise`; custom noise is named by content

    def __post_init__(self) -> None:
        if not (isinstance(self.sampler, str) and isinstance(self.noise, str)):
            raise InputError("sampler and noise must be names")
        refuse_unknown(self.noise, NOISES, "noise")
        if not all(type(count) is int and count < 2**63 for count in (self.population, self.cohort, self.rounds)):
            raise InputError("population, cohort and rounds must be integers")
        at_least_one(population=self.population, rounds=self.rounds)
        check_cohort(self.population, self.cohort, self.sampler)
        if not 0 <= self.noise_multiplier < math.inf:
            raise InputError(f"noise_multiplier must be finite and at least 0, found {self.noise_multiplier:g}")

    def event(self, sensitivity: Sensitivity) -> "DpEvent":
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

    @classmethod
    def zero(cls) -> "Ledger":
        return cls()

    @property
    def rounds(self) -> int:
        return sum(entry.rounds for entry in self.entries)

    def record(self, entry: Entry) -> "Ledger":
        if self.entries and replace(self.entries[-1], rounds=entry.rounds) == entry:
            merged = replace(entry, rounds=self.entries[-1].rounds + entry.rounds)
            return Ledger((*self.entries[:-1], merged))
        return Ledger((*self.entries, entry))

    def event(self, sensitivity: Sensitivity) -> "DpEvent":
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


def epsilon(ledger: Ledger, delta: float, convention: Convention) -> float:
    """Return epsilon of a ledger for users, infinite if a round had no noise; InputError if it cannot be accounted."""
    from flsim.privacy.accounting import epsilon_of

    others = {sampler_in_conventions(entry.sampler) for entry in ledger.entries} - {convention.sampler}
    if others:
        raise InputError(
            f"{convention} is for {convention.sampler} sampling, but the ledger has {others.pop()} rounds; "
            "choose a convention for that sampler"
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


def reported(sampler: str) -> tuple[Convention, ...]:
    """Return the paper's convention, if it is for this sampler, and the sound convention."""
    return tuple(one for one in conventions_of(sampler) if one in (PAPER, sound_convention(sampler)))


def spent(ledger: Ledger, sampler: str, delta: float) -> dict[str, float]:
    """Return epsilon by the name of each reported convention; each needs a third of a second."""
    return {convention.name: epsilon(ledger, delta, convention) for convention in reported(sampler)}


def epsilons(ledger: Ledger, sampler: str, delta: float, names: Iterable[str] | None = None) -> dict[str, float]:
    """Return epsilon by the name of each convention in `names`, or of each reported one if None."""
    if names is None:
        return spent(ledger, sampler, delta)
    known = {convention.name: convention for convention in conventions_of(sampler)}
    chosen = as_list("conventions", names)
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
        origin = " as the paper counts" if convention is PAPER else ""
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
        return epsilon(Ledger((entry,)), delta, sound_convention(entry.sampler))

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


def delta_curve(ledger: Ledger, convention: Convention) -> NDArray[np.float64]:
    """Return delta at each of `EPSILONS` that a ledger proves under a convention; 1 if it proves nothing."""
    from flsim.privacy.accounting import delta_of  # loads dp_accounting and scipy.stats, which takes a second

    return delta_of(ledger.event(convention.sensitivity), EPSILONS, convention)
