"""The epsilons that a run reports: the paper's, to compare with the paper, and one whose assumptions hold."""

from collections.abc import Iterable
from typing import Literal

from flsim.base.errors import InputError, as_list
from flsim.base.extensions import short_name
from flsim.base.progress import say
from flsim.privacy.conventions import PAPER, Convention, conventions_of
from flsim.privacy.ledger import Entry, Ledger, epsilon

Unit = Literal["user", "record"]  # difference of neighbouring data sets; a record is one sentence


def reported(sampler: str) -> tuple[Convention, ...]:
    """Return the paper's convention, where it is about this sampler, and the sound one."""
    conventions = conventions_of(sampler)
    return tuple(one for one in conventions if one == PAPER or (one.is_sound and one.accountant == "rdp"))


def spent(ledger: Ledger, sampler: str, delta: float) -> dict[str, float]:
    """Return epsilon by the name of each reported convention; each takes a third of a second."""
    return {convention.name: epsilon(ledger, delta, convention) for convention in reported(sampler)}


def epsilons(ledger: Ledger, sampler: str, delta: float, names: Iterable[str] | None = None) -> dict[str, float]:
    """Return epsilon by the name of each convention that is named; of each reported convention where `names` is None.

    Raises:
        InputError: there is no such convention for the sampler; or as `flsim.privacy.ledger.epsilon`.
    """
    if names is None:
        return spent(ledger, sampler, delta)
    known = {convention.name: convention for convention in conventions_of(sampler)}
    chosen = as_list("conventions", names)
    for name in chosen:
        if name not in known:
            raise InputError(f"conventions: {name!r} is not of {short_name(sampler)} sampling; take {', '.join(known)}")
    return {name: epsilon(ledger, delta, known[name]) for name in chosen}


def note(epsilons: dict[str, float], unit: Unit = "user") -> str:
    """Return the epsilons as a few words for a progress bar."""
    level = "" if unit == "user" else f"{unit}-level "
    return ", ".join(f"{level}epsilon {value:.3g} ({name})" for name, value in epsilons.items())


def sentence(epsilons: dict[str, float], sampler: str, delta: float, unit: Unit = "user") -> str:
    """Return everything that is reported in one line, with the meaning of each number."""
    parts = []
    for convention in reported(sampler):
        origin = " as the paper counts" if convention is PAPER else ""
        parts.append(
            f"epsilon {epsilons[convention.name]:.3g}{origin} ({convention.name}: {convention.relation}, sensitivity "
            f"{convention.sensitivity}, RDP, {convention.conversion} conversion)"
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
