"""A verdict on a ledger says what the test could have found: all outcomes of small designs are tried, one by one."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from helpers import TESTED, Trained

from flsim.attacks.audit import coins
from flsim.attacks.audit.audit import audit_subject, to_text
from flsim.attacks.audit.claim import Claim, LedgerTest
from flsim.attacks.audit.subject import Coins, Subject, subject_of
from flsim.attacks.audit.trade_off import Allowed, delta_of_gaussian, epsilon_of_gaussian
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import EPSILONS

DELTA = 1e-5
MUS = (0.01, 0.2, 0.5, 1.0, 4.0)


def claim_of_gaussian(mu: float, delta: float = DELTA) -> Claim:
    """The claim of a ledger that is exactly mu-GDP."""
    curve = Allowed(EPSILONS, np.array([delta_of_gaussian(mu, epsilon) for epsilon in EPSILONS]))
    return Claim(sound_convention("fixed-size"), epsilon_of_gaussian(mu, delta), delta, curve)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize(("canaries", "each", "neighbours"), [(10, 1, 1), (12, 2, 1), (12, 6, 1), (10, 5, 2)])
def test_of_all_coins_the_best_decides_what_can_be_refuted(
    canaries: int, each: int, neighbours: int, mu: float
) -> None:
    """Scores in any order are the same design: the coins are tried in all 2^m ways."""
    claim, test = claim_of_gaussian(mu), LedgerTest(canaries, 2 * each, neighbours)
    scores = np.arange(canaries, dtype=np.float64)
    outcomes = {coins.correct_guesses(scores, np.array(c, bool), each) for c in product((0, 1), repeat=canaries)}
    refuting = {right for right in outcomes if test.refutes(claim.curve, right)}
    assert outcomes == set(range(2 * each + 1))
    assert test.needed(claim.curve) == min(refuting, default=None)
    for right in outcomes:
        verdict = test.verdict(claim, right)
        assert verdict["refuted"] == (right in refuting)
        assert verdict["needed"] == min(refuting, default=None)
        assert (claim.epsilon <= verdict["refutable"]) if refuting else (claim.epsilon >= verdict["refutable"])


@pytest.mark.parametrize("mu", MUS)
def test_of_all_hits_the_best_decides_what_can_be_refuted(mu: float) -> None:
    """Each of 8 canaries is among the first 2 of its 200 references or not, in all 2^8 ways."""
    claim, test = claim_of_gaussian(mu), LedgerTest.of_ranks(8, 2, 200, neighbours=1)
    refuting = {sum(hit) for hit in product((0, 1), repeat=8) if test.refutes(claim.curve, sum(hit))}
    assert test.needed(claim.curve) == min(refuting, default=None)
    assert bool(refuting) == (claim.epsilon <= test.verdict(claim, 0)["refutable"])


@pytest.mark.parametrize(("canaries", "each"), [(12, 6), (48, 5), (100, 10), (1_000, 100)])
def test_the_largest_epsilon_divides_gaussian_ledgers_that_can_be_refuted_from_those_that_cannot(
    canaries: int, each: int
) -> None:
    test = LedgerTest(canaries, 2 * each, neighbours=1)
    largest = test.largest(DELTA)
    mu = test.mu_refuted(2 * each)
    assert epsilon_of_gaussian(mu, DELTA) == pytest.approx(largest)
    # The curve is known on a grid of epsilons, so that its claim allows a little more than the mechanism.
    assert test.needed(claim_of_gaussian(0.95 * mu).curve) is not None
    assert test.needed(claim_of_gaussian(1.001 * mu).curve) is None


@pytest.fixture
def subject(trained_here: Trained) -> Subject:
    return subject_of(trained_here(*TESTED))


def test_a_row_has_what_could_have_been_found(subject: Subject) -> None:
    """60 canary users, of whom 12 are guessed, cannot test the ledger of this run."""
    (row,) = audit_subject(subject).frame.query("method == 'trade-off, canary users by coins'").to_dict("records")
    assert subject.claim is not None
    assert pd.isna(row["needed"])
    assert row["refutable"] == pytest.approx(LedgerTest(60, 12, 1).largest(subject.claim.delta))
    assert row["refutable"] < subject.claim.epsilon


@pytest.mark.parametrize(("mu", "number"), [(0.5, 100), (30.0, None)])
def test_a_test_that_refutes_nothing_names_the_canaries_that_would(
    subject: Subject, mu: float, number: int | None
) -> None:
    """Two of 10 canaries are guessed. Under epsilon 0 both guesses are right with probability 1/4."""
    design = Coins(np.arange(1.0, 11.0), np.array([True, False] * 5), np.ones(10, np.int64))
    one = replace(subject, coins=design, canary_users=None, claim=(claim := claim_of_gaussian(mu)))
    text = " ".join(to_text(one, audit_subject(one)).split())
    assert "cannot be tested" in text
    (named,) = re.findall(r"trade-off, coins: no epsilon .* of (\d+) canaries would refute", text) or [None]
    assert named == (None if number is None else str(number))
    if number is not None:
        assert LedgerTest(number, number // 5, 1).needed(claim.curve) is not None
        assert LedgerTest(number // 2, number // 10, 1).needed(claim.curve) is None
