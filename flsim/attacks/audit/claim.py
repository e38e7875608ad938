"""The claim of a ledger: computed from the ledger, or read from the rows of an evaluation."""

from dataclasses import dataclass

from flsim.attacks.audit.trade_off import Allowed, LeastProbability, of_group
from flsim.base.errors import InputError
from flsim.base.extensions import is_custom
from flsim.privacy.conventions import Convention, possible_conventions, sound_convention
from flsim.privacy.ledger import EPSILONS, Ledger, Unit, delta_curve, epsilon
from flsim.results.store import RunResults


@dataclass(frozen=True)
class Claim:
    """The claim of a ledger at an evaluated round: a sound convention, a point (epsilon, delta) and a curve."""

    convention: Convention
    epsilon: float
    delta: float
    curve: Allowed

    @classmethod
    def of_ledger(cls, ledger: Ledger, sampler: str, delta: float) -> "Claim":
        """Return the claim of a ledger at a delta, or raise InputError. This executes a custom sampler or noise."""
        convention = sound_convention(sampler)
        curve = Allowed(EPSILONS, delta_curve(ledger, convention))
        return cls(convention, epsilon(ledger, delta, convention), delta, curve)

    @classmethod
    def of_rows(
        cls, results: RunResults, round_: int, sampler: str, unit: Unit, delta: float | None = None
    ) -> "Claim | None":
        """Return the claim, the point that an evaluation stored, if any, without executing a custom sampler or noise.

        Raises InputError if `delta` is below the stored delta, the only one with a known epsilon.
        """
        spent, stored = stored_epsilons(results, round_, sampler, unit)
        convention = next((one for one in spent if one.is_sound), None)
        if convention is None or stored is None:
            return None
        if delta is not None and delta < stored:
            raise InputError(
                f"--delta {delta:g}: run {results.name} has a custom sampler or noise, and its epsilon is "
                f"stored at delta {stored:g}; set --delta to at least {stored:g}, or remove it"
            )
        value = spent[convention]
        # An infinite epsilon allows everything, like (0, 1)-DP.
        curve = Allowed.point(value, stored) if value < float("inf") else Allowed.point(0.0, 1.0)
        return cls(convention, value, stored if delta is None else delta, curve)

    @property
    def steps(self) -> int:
        """Number of steps between neighbouring data sets that change one unit's data: a replacement takes two."""
        return 1 if self.convention.relation == "replace-one" else 2

    def least_of_group(self, units: int) -> LeastProbability:
        """Return T of data sets that differ in this number of units."""
        return of_group(self.curve.least_probability, units * self.steps)


def needs_custom_code(ledger: Ledger) -> bool:
    """Return whether only custom code can account for a ledger: a custom sampler or process of noise."""
    return any(is_custom(name) for entry in ledger.entries for name in (entry.sampler, entry.noise))


def stored_epsilons(
    results: RunResults, round_: int, sampler: str, unit: Unit
) -> tuple[dict[Convention, float], float | None]:
    """Return the epsilons in the rows of an evaluation, by convention, and their delta; None if missing."""
    prefix = "" if unit == "user" else f"{unit} "
    measured = {one: results.of_model(f"{prefix}epsilon {one.name}", round_) for one in possible_conventions(sampler)}
    spent = {convention: value for convention, value in measured.items() if value is not None}
    return spent, results.of_model(f"{prefix}delta", round_)
