"""The similarity of a generated text to the training text, for near-verbatim extraction."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import exp, prod

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ORDER = 4  # length of the longest n-grams in BLEU


def edit_distances(written: Ints, wanted: Ints) -> Ints:
    """Return the edit distances (Levenshtein, 1966) of texts [..., L] and [..., M] of tokens, int64 [...]."""
    before = list(range(wanted.shape[-1] + 1))  # distances of each beginning of `wanted` from that of `written`
    for length in range(1, written.shape[-1] + 1):
        after = [length]
        for index, deleted in enumerate(before[1:]):
            is_other = written[..., length - 1] != wanted[..., index]
            after.append(np.minimum(np.minimum(deleted, after[index]) + 1, before[index] + is_other))
        before = after
    return np.asarray(before[-1])


def bleu(written: Sequence[int], wanted: Sequence[int]) -> float:
    """Return the BLEU score of one text, in [0, 1], with one reference (Papineni et al., 2002, section 2.3).

    Words are token ids, so there is no further tokenization. The score has n-grams of up to `ORDER` tokens, or of all
    tokens of a shorter text, with equal weights, and no smoothing: it is 0 if no n-gram of some length matches.

    >>> round(bleu([1, 2, 3, 4, 9], [1, 2, 3, 4, 5]), 3)
    0.669
    """
    orders = range(1, min(ORDER, len(written)) + 1)
    matches = [(Counter(_ngrams(written, n)) & Counter(_ngrams(wanted, n))).total() for n in orders]
    precisions = [count / (len(written) - n + 1) for n, count in zip(orders, matches, strict=True)]
    return exp(min(0, 1 - len(wanted) / len(written))) * prod(precisions) ** (1 / len(orders))


def _ngrams(tokens: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[start:] for start in range(n)), strict=False)
