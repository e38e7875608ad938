"""Exposure by context: the exposure to adversaries who know the text around the secret.

Carlini et al. (2018), "The Secret Sharer", section 6.4 and table 3: one model and one secret, scored by adversaries who
know the text before the secret, the text after it, both, or neither. All of them know the text between a secret's
words.
"""

from collections.abc import Sequence

from torch import Tensor

from flsim.measures.memorization.random_sampling import RandomSampler, RandomSampling
from flsim.models.language_model import LanguageModel

Context = tuple[int, int]  # numbers of tokens that an adversary knows, directly before the secret and directly after it


def context_sampling(
    model: LanguageModel, tokens: Sequence[int], positions: Sequence[int], references: Tensor, bos: int
) -> dict[Context, RandomSampling]:
    """Rank a secret among the same references [|R|, k] in its place, for each context.

    The secret has these k positions of a canary's tokens, without BOS, but with EOS if the context has the record's
    end. Contexts are 0, 1, ... all tokens before the secret; each without the text after it, then each with all of it.
    A known suffix is also scored: it is the same for all, but its score depends on the words before it. Most references
    are dropped before the suffix is read, by their cost so far.
    """
    first, last = positions[0], positions[-1]
    measured = {}
    for suffix in sorted({0, len(tokens) - 1 - last}):
        scored = references.new_tensor(tokens[first : last + 1 + suffix])
        placed = scored.repeat(len(references), 1)
        placed[:, references.new_tensor(positions) - first] = references
        sampler = RandomSampler(model, placed)
        for prefix in range(first + 1):
            known = references.new_tensor((bos, *tokens[first - prefix : first]))
            measured[prefix, suffix] = sampler.rank(known, scored)
    return measured
