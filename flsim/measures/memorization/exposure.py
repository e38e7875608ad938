"""Exposure, the number of bits of guessing by which a model narrows down a secret.

Carlini et al. (2018), "The Secret Sharer", section 4.2 and appendix C: log2 |space| - log2 rank, which is
-log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space.
"""

from dataclasses import dataclass
from math import inf, log2

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Exposure:
    """An estimate of the exposure over a whole space, in bits, with its confidence interval.

    Attributes:
        bits: the estimate.
        low: lower end of the interval.
        high: upper end; infinity where nothing bounds it.
    """

    bits: float
    low: float
    high: float


def exposure(rank: int, references: int) -> float:
    """Return the exposure, in bits, of a canary ranked among references.

    The space is the |R| + 1 sequences R and s, so that exposure lies between 0 (all are at least as likely as the
    canary) and log2(|R| + 1) (none is). Repetitions in R count each time.

    Args:
        rank: from 1 to `references` + 1.
        references: |R|.

    Raises:
        ValueError: the rank is outside [1, |R| + 1].
    """
    if not 1 <= rank <= references + 1:
        raise ValueError(f"rank among {references:,} references must be from 1 to {references + 1:,}, found {rank:,}")
    return log2(references + 1) - log2(rank)


def exposure_interval(
    rank: int, references: int, space: int | None = None, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return a confidence interval of the exposure over the whole space, from a rank among references.

    R is drawn uniformly from the space, so that rank - 1 is binomial with |R| trials; the exposure is -log2 of its
    probability. The interval is Clopper and Pearson's (1934), whose coverage is at least `confidence` for any |R|.

    Args:
        rank: 1 + the number of r' in R with P(r'|p) <= P(s|p).
        references: |R|.
        space: number of sequences in the space; None where it is unknown. The canary is one of them, so that no
            exposure exceeds log2 of it; without it a canary of rank 1 has no upper end.
        confidence: coverage of the interval, such as 0.95.

    Returns:
        Lower and upper end, bits.

    Raises:
        ValueError: the rank is outside [1, |R| + 1].
    """
    from flsim.base.statistics import share_interval  # scipy: ranks need torch and numpy only

    exposure(rank, references)
    interval = share_interval(rank - 1, references, confidence)
    most = inf if space is None else log2(space)
    low, high = (min(most, -log2(p) if p > 0 else inf) for p in reversed(interval))
    return low, high
