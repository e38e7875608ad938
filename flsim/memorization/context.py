"""Context: how much more of a canary shows to those who know what stands around its secret.

Carlini et al. (2018), "The Secret Sharer", section 6.4 and table 3: one model, one secret, scored by adversaries who
know what precedes it, what follows it, both, or neither. What stands between a secret's words is known to all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flsim.base.errors import InputError
from flsim.memorization.random_sampling import RandomSampling, random_sampling
from flsim.models.language_model import LanguageModel

Sampler = Callable[[LanguageModel, Tensor, Tensor, Tensor], RandomSampling]


@dataclass(frozen=True, order=True)
class Context:
    """What an adversary knows: so many tokens directly before the secret, and so many directly after it."""

    prefix: int
    suffix: int


@dataclass(frozen=True)
class Secret:
    """Some positions of a canary.

    Attributes:
        tokens: the canary's ids, BOS not among them; EOS at the end where the record's end is part of the context.
        positions: where the secret's tokens are, ascending.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        inside = all(0 <= position < len(self.tokens) for position in self.positions)
        if not self.positions or not inside or list(self.positions) != sorted(set(self.positions)):
            raise InputError(
                f"a secret's positions must be different, ascending, and from 0 to {len(self.tokens) - 1}, "
                f"found {list(self.positions)}"
            )

    @property
    def contexts(self) -> list[Context]:
        """None, 1 to all tokens before; each without what follows, then with all of it."""
        before, after = self.positions[0], len(self.tokens) - 1 - self.positions[-1]
        return [Context(prefix, suffix) for suffix in sorted({0, after}) for prefix in range(before + 1)]

    def place(self, words: Tensor, context: Context, bos: int) -> tuple[Tensor, Tensor]:
        """Put words in the secret's place.

        The known prefix comes directly after BOS, whatever preceded it in the canary.

        Args:
            words: int64 [N, number of positions].
            context: what is known.
            bos: id of BOS.

        Returns:
            The prefix, int64 [1 + context.prefix], and all that is scored after it, int64 [N, n].
        """
        first, last = self.positions[0], self.positions[-1]
        prefix = words.new_tensor((bos, *self.tokens[first - context.prefix : first]))
        scored = words.new_tensor(self.tokens[first : last + 1 + context.suffix]).repeat(len(words), 1)
        scored[:, words.new_tensor(self.positions) - first] = words
        return prefix, scored


def context_sampling(
    model: LanguageModel, secret: Secret, references: Tensor, bos: int, sampler: Sampler = random_sampling
) -> dict[Context, RandomSampling]:
    """Rank a secret among the same references in its place, for each adversary.

    A suffix is scored too: it is the same for all, but what the model thinks of it depends on what is in the secret's
    place. Most references are dropped before it is read, by what they have spent until then.

    Args:
        model: the model.
        secret: where it is in the canary.
        references: R, int64 [|R|, number of positions]; fastest in lexicographic order.
        bos: id of BOS.
        sampler: what ranks; `random_sampling`, or something as exact.

    Returns:
        For each of `secret.contexts`, the log-perplexity of all that is scored, and the rank; `exposure` takes it.

    Raises:
        Diverged: a score that was needed is not finite.
        InputError: references are not as long as the secret.
    """
    if references.shape[1] != len(secret.positions):
        raise InputError(f"the secret has {len(secret.positions)} words, but references have {references.shape[1]}")
    own = references.new_tensor([[secret.tokens[position] for position in secret.positions]])
    measured = {}
    for context in secret.contexts:
        prefix, placed = secret.place(references, context, bos)
        measured[context] = sampler(model, prefix, secret.place(own, context, bos)[1][0], placed)
    return measured
