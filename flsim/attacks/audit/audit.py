"""`flsim audit` of a run: what its canaries' ranks prove, and what its ledger allows, as rows.

Each row says what it is:

    bound       holds with the stated confidence, whatever the training and the attacker
    estimate    supposes something that is said, such as a Gaussian mechanism
    heuristic   treats canaries of one model as independent, which they are not
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.attacks.audit import coins, guesses, ranks, thresholds
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.pooled import pooled
from flsim.attacks.audit.subject import Subject
from flsim.attacks.audit.testing import LedgerTest
from flsim.attacks.audit.trade_off import LeastProbability, epsilon_of_gaussian
from flsim.base.errors import InputError

CONFIDENCE = 0.95
OF_EACH_KIND = 0.1  # of the canaries whose coins are guessed as planted, and as not, fixed before ranks are looked at
NUMBERS: list[int] = [digit * 10**zeros for zeros in range(1, 6) for digit in (1, 2, 5)]  # of canaries, 10 to 500,000
MOST_GUESSES = 100_000  # that are computed, in seconds
COLUMNS = {
    "run": "string",
    "setting": "string",
    "round": "Int64",
    "method": "string",
    "kind": "string",
    "unit": "string",
    "neighbours": "string",
    "group": "Int64",
    "n_in": "Int64",
    "n_out": "Int64",
    "threshold": "Int64",
    "detected": "Int64",
    "fpr": "Float64",
    "estimate": "Float64",
    "low": "Float64",
    "high": "Float64",
    "confidence": "Float64",
    "delta": "Float64",
    "allowed": "Float64",
    "refuted": "boolean",
    "needed": "Int64",
    "refutable": "Float64",
    "p_value": "Float64",
}


def audit(subject: Subject, threshold: int | None = None) -> pd.DataFrame:
    """Return the rows of one run, with the columns of `COLUMNS`.

        tpr              share of canaries of rank <= threshold, at a false-positive rate of threshold / (R + 1);
                         "allowed" is the largest that the claim leaves to an attacker
        epsilon          lower bound under pure DP, replace-one, of one unit
        trade-off        whether the ledger's curve is refuted; "needed": the least hits that do,
                         missing if none do; "refutable": see `flsim.attacks.audit.testing.Verdict`
        epsilon, GDP     epsilon at the claim's delta, if the mechanism is Gaussian
        epsilon, coins   lower bound at the claim's delta (or 0) from guesses of coins, replace-one, of one unit
        trade-off, coins     whether the ledger's own curve is refuted by guesses of coins
        epsilon, canary users          estimate at the run's delta from the cosines of canary users, of one user
        epsilon, canary users left out    the same estimate from those that took no part: what chance gives
        epsilon, canary users by coins, and trade-off    as for coins of canaries, one user's updates in or out
        participation, noise    whether the rounds refute the sampler or the noise that the ledger states
        epsilon, controls    planted canaries against never-planted ones, at one threshold

    Args:
        subject: the run.
        threshold: rank up to which a canary counts as named, fixed before ranks were looked at; by default
            `flsim.attacks.audit.guesses.default_threshold`.

    Raises:
        InputError: the threshold is above R.
    """
    has_ranks = len(subject.ranks) > 0
    fixed = guesses.default_threshold(subject.references) if threshold is None else threshold
    if has_ranks and fixed > subject.references:
        raise InputError(
            f"--threshold {fixed}: there are {subject.references} references; name a rank of at most "
            f"{subject.references}"
        )
    of_ranks = [*_detected(subject), *_bounds(subject, fixed)] if has_ranks else []
    rows = [*of_ranks, *of_coins(subject), *of_canary_users(subject), *of_rounds(subject)]
    table = pd.DataFrame(rows).reindex(columns=list(COLUMNS))
    results = subject.results
    table = table.assign(run=results.name, setting=results.setting, round=subject.round, unit=subject.unit)
    return table.astype(COLUMNS)


def ceiling(groups: Sequence[int], references: int) -> float:
    """Return the largest lower bound on epsilon, replace-one, that ranks can prove: all canaries are named.

    Args:
        groups: number of units that share each planted canary, [m]; at least 1.
        references: R.
    """
    return guesses.epsilon_of_ranks(len(groups), guesses.default_threshold(references), references, groups)


def ceiling_of_coins(groups: Sequence[int], delta: float) -> float | None:
    """Return the largest lower bound on epsilon, replace-one, that guesses of coins can prove: all are right.

    Args:
        groups: number of units that each canary moves, or would have moved, [m]; at least 1.
        delta: delta of one unit.

    Returns:
        The bound; None where canaries are too few to be guessed.
    """
    guessed = 2 * _of_each_kind(len(groups))
    return coins.epsilon_of_coins(len(groups), guessed, guessed, delta, users=max(groups)) if guessed else None


def canaries_needed(row: Mapping[Any, Any], claim: Claim) -> int | None:
    """Return the first of `NUMBERS` of canaries of which the best outcome would refute a claim; None if none does.

    Args:
        row: the row of a test of the claim, of the method "trade-off" or "trade-off, ...", whose design is kept.
        claim: what the ledger claims.
    """
    neighbours = 1 if row["neighbours"] == "zero-out" else int(row["group"]) * claim.steps
    for canaries in NUMBERS:
        if row["method"] == "trade-off":
            test = LedgerTest.of_ranks(canaries, row["threshold"], row["n_out"], neighbours)
        else:
            test = LedgerTest(canaries, 2 * _of_each_kind(canaries), neighbours)
        if test.guesses > MOST_GUESSES:
            break
        if test.refutes(claim.curve, test.guesses):
            return canaries
    return None


def _of_each_kind(canaries: int) -> int:
    """Return the number of coins that are guessed as planted, and as not; 0 where there are too few canaries."""
    return round(OF_EACH_KIND * canaries) if canaries >= 1 / OF_EACH_KIND else 0


def _detected(subject: Subject) -> Iterator[dict[str, Any]]:
    least = _least(subject)
    for detection in ranks.detections_by_level(subject.ranks, subject.references).values():
        yield {
            "method": "tpr",
            "kind": "heuristic",  # the rate of false alarms is exact, but the interval takes canaries as independent
            "neighbours": "replace-one",
            "group": subject.groups.max(),
            "n_in": detection.canaries,
            "n_out": subject.references,
            "threshold": detection.threshold,
            "detected": detection.detected,
            "fpr": detection.fpr,
            "estimate": detection.tpr,
            "low": detection.tpr_low,
            "high": detection.tpr_high,
            "confidence": CONFIDENCE,
            "allowed": None if least is None else 1 - least(1 - detection.fpr_high),
        }


def _bounds(subject: Subject, threshold: int) -> Iterator[dict[str, Any]]:
    canaries, claim, proven = len(subject.ranks), subject.claim, pooled([subject], threshold)
    hits, largest = proven.detection.detected, int(subject.groups.max())
    common = {
        "neighbours": "replace-one",
        "group": largest,
        "n_in": canaries,
        "n_out": subject.references,
        "threshold": threshold,
        "detected": hits,
        "confidence": CONFIDENCE,
    }
    yield common | {"method": "epsilon", "kind": "bound", "low": proven.low, "delta": 0.0}
    if claim is not None:
        test = LedgerTest.of_ranks(canaries, threshold, subject.references, largest * claim.steps)
        yield common | {"method": "trade-off", "kind": "bound"} | asdict(test.verdict(claim, hits))
        of_one = test.mu_refuted(hits)
        yield common | {
            "method": "epsilon, GDP",
            "kind": "estimate",
            "neighbours": claim.convention.relation,
            "estimate": epsilon_of_gaussian(of_one, claim.delta) if of_one else 0.0,
            "delta": claim.delta,
            "allowed": claim.epsilon,
        }
    if len(subject.control_ranks):
        alarms = int((subject.control_ranks <= threshold).sum())
        controls = thresholds.epsilon_of_threshold(hits, canaries, alarms, len(subject.control_ranks))
        yield common | {
            "method": "epsilon, controls",
            "kind": "heuristic",
            "n_out": len(subject.control_ranks),
            "fpr": alarms / len(subject.control_ranks),
            "low": controls / largest,
            "delta": 0.0,
        }


def of_coins(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield rows with the bound of canaries that coins decided on; nothing where there are too few of them."""
    tossed, claim = subject.coins, subject.claim
    if tossed is None or not len(tossed.ranks):
        return
    largest = int(tossed.groups.max())
    neighbours = 1 if claim is None else largest * claim.steps
    of_what = {"neighbours": "replace-one", "group": largest}
    yield from _of_guesses("coins", of_what, -tossed.ranks, tossed.planted, claim, neighbours)


def of_canary_users(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield rows with the estimate and the bound of canary users: one user's updates are in the sums, or are not."""
    users, claim = subject.canary_users, subject.claim
    if users is None:
        return
    of_what: dict[str, Any] = {"neighbours": "zero-out", "group": 1}
    common = of_what | {
        "kind": "estimate",
        "n_in": len(users.members),
        "n_out": len(users.others),
        "delta": users.delta,
    }
    if (estimate := users.estimate) is not None:
        allowed = None if claim is None else claim.epsilon
        yield common | {"method": "epsilon, canary users", "estimate": estimate, "allowed": allowed}
    if (chance := users.estimate_of_others) is not None:
        yield common | {"method": "epsilon, canary users left out", "estimate": chance}
    if users.has_coins:
        # Under either relation of a ledger a user may be replaced by one that sends nothing, or be removed.
        of_what["allowed"] = None if claim is None else claim.epsilon
        yield from _of_guesses("canary users by coins", of_what, users.cosines, users.present, claim, neighbours=1)


def of_rounds(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield rows with the tests of the rounds themselves; nothing without a ledger that states their laws."""
    for method, test in (("participation", subject.participation), ("noise", subject.noise)):
        if test is not None and subject.claim is not None:
            yield {
                "method": method,
                "kind": "bound",
                "neighbours": subject.claim.convention.relation,
                "n_in": test.rounds,
                "n_out": 0,
                "confidence": CONFIDENCE,
                "refuted": test.p_value < 1 - CONFIDENCE,
                "p_value": test.p_value,
            }


def _of_guesses(
    name: str,
    of_what: dict[str, Any],
    scores: NDArray[np.float64],
    planted: NDArray[np.bool_],
    claim: Claim | None,
    neighbours: int,
) -> Iterator[dict[str, Any]]:
    """Yield what guesses of coins prove, and whether they refute the ledger's trade-off function, if there is one."""
    canaries = len(scores)
    if not (each_kind := _of_each_kind(canaries)):
        return
    right = coins.correct_guesses(scores, planted, each_kind)
    common = of_what | {
        "kind": "bound",
        "n_in": int(planted.sum()),
        "n_out": int((~planted).sum()),
        "threshold": each_kind,
        "detected": right,
        "confidence": CONFIDENCE,
    }
    delta = 0.0 if claim is None else claim.delta
    low = coins.epsilon_of_coins(canaries, 2 * each_kind, right, delta, users=of_what["group"])
    yield common | {"method": f"epsilon, {name}", "low": low, "delta": delta}
    if claim is not None:
        verdict = LedgerTest(canaries, 2 * each_kind, neighbours).verdict(claim, right)
        yield common | {"method": f"trade-off, {name}", "allowed": None} | asdict(verdict)


def _least(subject: Subject) -> LeastProbability | None:
    return None if subject.claim is None else subject.claim.least_of_group(int(subject.groups.max()))
