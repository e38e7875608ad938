"""What a run says of its privacy: the paper's epsilon, to compare with the paper, and one whose assumptions hold."""

from typing import Literal

from flsim.privacy.conventions import CONVENTIONS, PAPER, Convention
from flsim.privacy.ledger import Ledger, epsilon
from flsim.privacy.sampling import Sampler

Unit = Literal["user", "record"]  # what neighbouring data sets differ in; a record is one sentence
SOUND = {"fixed-size": "replace-one-rdp", "poisson": "poisson-rdp"}


def reported(sampler: Sampler) -> tuple[Convention, ...]:
    """The paper's convention, where it is about that sampler, then the sound one."""
    paper = (PAPER,) if PAPER.sampler == sampler else ()
    return (*paper, *(convention for convention in CONVENTIONS if convention.name == SOUND[sampler]))


def spent(ledger: Ledger, sampler: Sampler, delta: float) -> dict[str, float]:
    """Epsilon by the name of each convention that is reported; it takes a third of a second for each."""
    return {convention.name: epsilon(ledger, delta, convention) for convention in reported(sampler)}


def note(epsilons: dict[str, float], unit: Unit = "user") -> str:
    """A few words for a progress bar."""
    level = "" if unit == "user" else f"{unit}-level "
    return ", ".join(f"{level}epsilon {value:.3g} ({name})" for name, value in epsilons.items())


def sentence(epsilons: dict[str, float], sampler: Sampler, delta: float, unit: Unit = "user") -> str:
    """All that is reported, in one line that says what each number means."""
    parts = []
    for convention in reported(sampler):
        origin = " as the paper counts" if convention is PAPER else ""
        parts.append(
            f"epsilon {epsilons[convention.name]:.3g}{origin} ({convention.name}: {convention.relation}, sensitivity "
            f"{convention.sensitivity}, RDP, {convention.conversion} conversion)"
        )
    return f"{unit}-level privacy after {sampler} sampling, delta {delta:.3g}: {'; '.join(parts)}"
