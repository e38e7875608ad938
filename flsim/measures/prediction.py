"""The utility of a model on a population's text: Recall@1 and perplexity, as mergeable sums.

Thakkar et al. (2020), section 4.1, "Evaluation Methods"; words only, as in TensorFlow Federated's benchmarks.
"""

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

import torch

from flsim.base.errors import Diverged
from flsim.data.records import Batch, Layout, Records, Users, batch, batches_by_length
from flsim.models.language_model import TrainableModel, predictions

POOL_WORDS = 2**16  # words of a pool of users, whose records are sorted by length
LOGITS = 2**22  # logits in one batch


@dataclass(frozen=True)
class Utility:
    """Sums over targets; `merge` is associative and commutative up to rounding, and ``Utility()`` is its identity.

    Tokens include EOS and OOV; correct ones were the model's first choice. The cross-entropy is in nats.
    """

    cross_entropy: float = 0.0
    tokens: int = 0
    correct_tokens: int = 0
    words: int = 0
    correct_words: int = 0

    def merge(self, other: "Utility") -> "Utility":
        return Utility(*map(operator.add, astuple(self), astuple(other)))

    @property
    def accuracy(self) -> float:
        """Return Recall@1 over targets that are words, with first choices among all tokens; NaN without targets."""
        return self.correct_words / self.words if self.words else math.nan

    @property
    def accuracy_all_tokens(self) -> float:
        """Return Recall@1 over all targets, including EOS and OOV; NaN without targets."""
        return self.correct_tokens / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Return e to the mean cross-entropy over all targets; infinite beyond float64, NaN without targets."""
        if not self.tokens:
            return math.nan
        try:
            return math.exp(self.cross_entropy / self.tokens)
        except OverflowError:
            return math.inf


def utility(model: TrainableModel, users: Users, chosen: Iterable[int] | None = None) -> Utility:
    """Measure a model on every record of a population, or of chosen users."""
    total = Utility()
    for part in _batches(users, range(len(users)) if chosen is None else chosen):
        total = total.merge(_measure(model, part, users.layout))
    return total


def _measure(model: TrainableModel, part: Batch, layout: Layout) -> Utility:
    inputs, targets = (torch.from_numpy(side).to(model.device) for side in (part.inputs, part.targets))
    target, nats, choice = predictions(model, inputs, targets, layout.pad)
    loss = float(nats.double().sum())
    if not math.isfinite(loss):
        raise Diverged("a cross-entropy is not finite; the model's values overflow")
    text = layout.text_ids
    correct, word = choice == target, (target >= text.start) & (target < text.stop)
    return Utility(loss, len(target), int(correct.sum()), int(word.sum()), int((correct & word).sum()))


def _batches(users: Users, chosen: Iterable[int]) -> Iterator[Batch]:
    """Yield all records of the chosen users in batches of similar length, with little padding."""
    layout = users.layout
    positions = max(1, LOGITS // layout.vocabulary_size)
    for records in _pools(users, chosen):
        for part in batches_by_length(records, layout, positions):
            yield batch(records, part, layout)


def _pools(users: Users, chosen: Iterable[int]) -> Iterator[Records]:
    """Yield the chosen users' records, joined until they have `POOL_WORDS` words."""
    pool: list[Records] = []
    words = 0  # within the pool, which can have thousands of complete authors
    for user in chosen:
        pool.append(users[user])
        words += pool[-1].words
        if words >= POOL_WORDS:
            yield Records.joined(pool)
            pool, words = [], 0
    if pool:
        yield Records.joined(pool)
