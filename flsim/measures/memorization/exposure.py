"""Exposure, the number of bits by which a model reduces the work of guessing a secret.

Carlini et al. (2018), "The Secret Sharer", section 4.2 and appendix C: log2 |space| - log2 rank, which is
-log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space.
"""

from dataclasses import dataclass
from math import log2

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Exposure:
    """An estimate of the exposure over a complete space, in bits, with its confidence interval, up to infinity."""

    bits: float
    low: float
    high: float


def exposure(rank: int, references: int) -> float:
    """Return the exposure, in bits, of a canary ranked among references; ValueError for a rank outside [1, |R| + 1].

    The space is the |R| + 1 sequences R and s, so exposure is between 0 (all are at least as likely as the canary) and
    log2(|R| + 1) (none is). Repetitions in R count each time.
    """
    if not 1 <= rank <= references + 1:
        raise ValueError(f"rank among {references:,} references must be from 1 to {references + 1:,}, found {rank:,}")
    return log2(references + 1) - log2(rank)
