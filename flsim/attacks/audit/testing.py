"""A test of a ledger by guesses: verdict, guesses that refute it, largest refutable epsilon."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flsim.attacks.audit import coins
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.guesses import OF_SHARES, SIGNIFICANCE, share_of_references
from flsim.attacks.audit.trade_off import Allowed, LeastProbability, epsilon_of_gaussian, of_group


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
    wrong: Callable[[LeastProbability], LeastProbability] = coins.of_one
    significance: float = SIGNIFICANCE

    @classmethod
    def of_ranks(cls, canaries: int, threshold: int, references: int, neighbours: int) -> "LedgerTest":
        """Return the test that guesses each canary to be among the first `threshold` of its references."""
        share = share_of_references(threshold, references, canaries)
        significance = SIGNIFICANCE - OF_SHARES
        return cls(canaries, canaries, neighbours, lambda least: coins.of_set(least, share), significance)

    def refutes(self, curve: Allowed, right: int) -> bool:
        """Return whether this number of right guesses refutes the curve of a ledger."""
        return self._refutes(of_group(curve.least_probability, self.neighbours), right)

    def needed(self, curve: Allowed) -> int | None:
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
        return coins.mu_refuted(lambda least: self._refutes(least, right)) / self.neighbours

    def largest(self, delta: float) -> float:
        """Return the largest epsilon at a delta of a Gaussian mechanism that the best outcome refutes."""
        mu = self.mu_refuted(self.guesses)
        return epsilon_of_gaussian(mu, delta) if mu else 0.0

    def _refutes(self, least: LeastProbability, right: int) -> bool:
        return coins.is_refuted(self.wrong(least), self.canaries, self.guesses, right, self.significance)
