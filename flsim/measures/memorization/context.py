"""Exposure by context: the exposure to adversaries who know the text around the secret.

Carlini et al. (2018), "The Secret Sharer", section 6.4 and table 3: one model and one secret, scored by adversaries who
know the text before the secret, the text after it, both, or neither. All of them know the text between a secret's
words.
"""

from dataclasses import dataclass

from torch import Tensor

from flsim.measures.memorization.random_sampling import RandomSampler, RandomSampling
from flsim.models.language_model import LanguageModel


@dataclass(frozen=True, order=True)
class Context:
    """The knowledge of an adversary: numbers of tokens directly before the secret, and directly after it."""

    prefix: int
    suffix: int


@dataclass(frozen=True)
class Secret:
    """A secret: positions of a canary's ids, without BOS, but with EOS if the context has the record's end."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def contexts(self) -> list[Context]:
        """Return the contexts: 0, 1, ... all tokens before; each without the text after, then each with all of it."""
        before, after = self.positions[0], len(self.tokens) - 1 - self.positions[-1]
        return [Context(prefix, suffix) for suffix in sorted({0, after}) for prefix in range(before + 1)]

    def place(self, words: Tensor, context: Context, bos: int) -> tuple[Tensor, Tensor]:
        """Replace the secret with words [N, k]; return BOS with the known prefix, and the scored rest [N, n]."""
        first, last = self.positions[0], self.positions[-1]
        prefix = words.new_tensor((bos, *self.tokens[first - context.prefix : first]))
        scored = words.new_tensor(self.tokens[first : last + 1 + context.suffix]).repeat(len(words), 1)
        scored[:, words.new_tensor(self.positions) - first] = words
        return prefix, scored


def context_sampling(
    model: LanguageModel, secret: Secret, references: Tensor, bos: int
) -> dict[Context, RandomSampling]:
    """Rank a secret among the same references in its place, for each adversary of `secret.contexts`.

    A known suffix is also scored. The suffix is the same for all, but its score depends on the words before it. Most
    references are dropped before the suffix is read, by their cost so far.
    """
    words = references.new_tensor([[secret.tokens[position] for position in secret.positions]])
    measured = {}
    for context in secret.contexts:
        prefix, placed = secret.place(references, context, bos)
        measured[context] = RandomSampler(model, placed).rank(prefix, secret.place(words, context, bos)[1][0])
    return measured
