"""Exposure: by how many bits of guessing a model narrows down a secret.

Carlini et al. (2018), "The Secret Sharer", section 4.2 and appendix C: log2 |space| - log2 rank.
"""

from math import log2


def exposure(rank: int, references: int) -> float:
    """Exposure, in bits, of a canary ranked among references.

    The space is the |R| + 1 sequences R and s, so that it lies between 0 (all are at least as likely as the canary) and
    log2(|R| + 1) (none is). Repetitions in R count each time.

    Args:
        rank: from 1 to `references` + 1.
        references: |R|.

    Raises:
        ValueError: the rank is none.
    """
    if not 1 <= rank <= references + 1:
        raise ValueError(f"rank among {references:,} references must be from 1 to {references + 1:,}, found {rank:,}")
    return log2(references + 1) - log2(rank)
