"""The canaries of several runs of one setting, audited together.

Each run has its own canaries, references and randomness. If training is epsilon-DP in every run, the argument of
`flsim.attacks.audit.guesses` and `flsim.attacks.audit.coins` holds for all canaries one after another, as each is in
one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flsim.attacks.audit import guesses
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.ranks import Detection, detection_at
from flsim.attacks.audit.subject import Subject
from flsim.attacks.audit.testing import LedgerTest, Verdict


@dataclass(frozen=True)
class Pooled:
    """The proof of the canaries of several runs together.

    Attributes:
        runs: number of runs.
        detection: canaries of a rank of at most the threshold.
        low: lower bound on epsilon of one unit, replace-one, at delta 0.
        claim: the claim of the first run; None of runs without noise.
        allowed: the largest true-positive rate that the claim leaves to an attacker; None without a claim.
        verdict: whether the claim is refuted, and what could have been; None without a claim.
    """

    runs: int
    detection: Detection
    low: float
    claim: Claim | None
    allowed: float | None
    verdict: Verdict | None


def pooled(subjects: Sequence[Subject], threshold: int | None = None) -> Pooled:
    """Return what runs of one setting, at least one, prove together.

    Args:
        subjects: the runs.
        threshold: largest rank of a canary that counts as named; `flsim.attacks.audit.guesses.default_threshold` if not
        given.
    """
    references = min(subject.references for subject in subjects)
    threshold = guesses.default_threshold(references) if threshold is None else threshold
    ranks = np.concatenate([subject.ranks for subject in subjects])
    groups = np.concatenate([subject.groups for subject in subjects])
    detection = detection_at(ranks, references, threshold)
    low = guesses.epsilon_of_ranks(detection.detected, threshold, references, groups.tolist())
    claim, allowed, verdict = subjects[0].claim, None, None
    if claim is not None:
        largest = int(groups.max())
        allowed = 1 - claim.least_of_group(largest)(1 - detection.fpr_high)
        test = LedgerTest.of_ranks(len(ranks), threshold, references, largest * claim.steps)
        verdict = test.verdict(claim, detection.detected)
    return Pooled(len(subjects), detection, low, claim, allowed, verdict)
