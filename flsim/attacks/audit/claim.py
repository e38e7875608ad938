"""The claim of a ledger, from the ledger or the rows of an evaluation, and its test by guesses."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flsim.attacks.audit import bounds
from flsim.base.errors import InputError
from flsim.base.extensions import is_custom
from flsim.privacy.conventions import Convention, possible_conventions, sound_convention
from flsim.privacy.ledger import EPSILONS, Ledger, Unit, delta_curve, epsilon
from flsim.results.rows import RunResults


@dataclass(frozen=True)
class Claim:
    """The claim of a ledger at an evaluated round: a sound convention, a point (epsilon, delta) and a curve."""

    convention: Convention
    epsilon: float
    delta: float
    curve: bounds.Allowed

    def stated(self, unit: Unit) -> str:
        """Return the point of the claim as a clause."""
        point = f"epsilon {self.epsilon:.3g} at delta {self.delta:.3g}"
        return f"The ledger claims {point} for one {unit} ({self.convention.name})"

    @classmethod
    def of_ledger(cls, ledger: Ledger, sampler: str, delta: float) -> "Claim":
        """Return the claim of a ledger at a delta, or raise InputError. This executes a custom sampler or noise."""
        convention = sound_convention(sampler)
        curve = bounds.Allowed(EPSILONS, delta_curve(ledger, convention))
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
        curve = bounds.Allowed.point(value, stored) if value < float("inf") else bounds.Allowed.point(0.0, 1.0)
        return cls(convention, value, stored if delta is None else delta, curve)

    @property
    def steps(self) -> int:
        """Number of steps between neighbouring data sets that change one unit's data: a replacement takes two."""
        return 1 if self.convention.relation == "replace-one" else 2

    def least_of_group(self, units: int) -> bounds.LeastProbability:
        """Return T of data sets that differ in this number of units."""
        return bounds.of_group(self.curve.least_probability, units * self.steps)


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


# A test of a ledger by guesses: verdict, guesses that refute it, largest refutable epsilon.


def in_words(row: Mapping[Any, Any]) -> str | None:
    """Return the outcome of a test of the ledger, which is a row of an audit, as text; None for another row."""
    if pd.isna(row.get("refuted")):
        return None
    has_outcome = pd.notna(row.get("needed")) or pd.isna(row.get("refutable"))  # a test of rounds has neither
    return "refuted" if row["refuted"] else "not refuted" if has_outcome else "cannot be tested"


@dataclass(frozen=True)
class LedgerTest:
    """A test of a ledger by guesses, whose number is fixed before scores are known; other canaries have no guess.

    A canary spans `neighbours` steps of the ledger; `wrong` maps its T to the smallest probability of a wrong guess.
    """

    canaries: int
    guesses: int
    neighbours: int
    wrong: Callable[[bounds.LeastProbability], bounds.LeastProbability] = bounds.of_one
    significance: float = bounds.SIGNIFICANCE

    @classmethod
    def of_ranks(cls, canaries: int, threshold: int, references: int, neighbours: int) -> "LedgerTest":
        """Return the test that guesses each canary to be among the first `threshold` of its references."""
        share = bounds.share_of_references(threshold, references, canaries)
        significance = bounds.SIGNIFICANCE - bounds.OF_SHARES
        return cls(canaries, canaries, neighbours, lambda least: bounds.of_set(least, share), significance)

    def refutes(self, curve: bounds.Allowed, right: int) -> bool:
        """Return whether this number of right guesses refutes the curve of a ledger."""
        return self._refutes(bounds.of_group(curve.least_probability, self.neighbours), right)

    def needed(self, curve: bounds.Allowed) -> int | None:
        """Return the smallest number of right guesses that refutes a ledger's curve; None if all do not suffice."""
        if not self.refutes(curve, self.guesses):
            return None
        return bisect_left(range(self.guesses), True, key=lambda right: self.refutes(curve, right))

    def verdict(self, claim: Claim, right: int) -> dict[str, Any]:
        """Return the verdict on a ledger, by the names of columns of an audit.

        ``needed`` is the smallest number of right guesses that refutes the ledger; None if no outcome does.
        ``refutable`` is the largest epsilon, at the ledger's delta, that the best outcome refutes, for a Gaussian
        mechanism or this ledger.
        """
        needed, largest = self.needed(claim.curve), self.largest(claim.delta)
        # The curve of a ledger determines the verdict, and differs from that of a Gaussian mechanism with its epsilon.
        refutable = min(largest, claim.epsilon) if needed is None else max(largest, claim.epsilon)
        return {"refuted": self.refutes(claim.curve, right), "needed": needed, "refutable": refutable}

    def mu_refuted(self, right: int) -> float:
        """Return the largest mu of one unit whose Gaussian trade-off function these right guesses refute, or 0."""
        return bounds.mu_refuted(lambda least: self._refutes(least, right)) / self.neighbours

    def largest(self, delta: float) -> float:
        """Return the largest epsilon at a delta of a Gaussian mechanism that the best outcome refutes."""
        return bounds.epsilon_of_gaussian(self.mu_refuted(self.guesses), delta)

    def _refutes(self, least: bounds.LeastProbability, right: int) -> bool:
        return bounds.is_refuted(self.wrong(least), self.canaries, self.guesses, right, self.significance)
