"""The interface of attacks, and their input: records with a model, and values of the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import Diverged
from flsim.base.rng import stream
from flsim.data.records import Records, batch, batches_by_length
from flsim.data.vocabulary import Layout, Vocabulary
from flsim.models.language_model import Params, TrainableModel
from flsim.training.central.record_level import record_gradients

FLOATS = 2**22  # largest number of values in one batch, in float64: 32 MB for each tensor of that size

Learned = Callable[[Floats], Floats]
"""Function from statistics, float64 [n, F], to scores, float64 [n]."""


@dataclass(frozen=True)
class Attack:
    """An attack on the membership of records.

    Attributes:
        name: the name of the attack in options and tables.
        score: function of `Candidates` that returns a score of each record, float64 [N], where larger means membership.
            It does not know which records are members. For an attack with `fit`, it returns statistics [N, F].
        fit: function of statistics [n, F] and membership bool [n] of one half of the records; it returns the function
            that scores the other half. The attack is then measured only on the other half.
    """

    name: str
    score: Callable[["Candidates"], Any]
    fit: Callable[[Floats, Flags], Learned] | None = None


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records whose membership an attack infers.

    Values are computed in batches of bounded memory, and do not depend on other records. Arrays are read-only, because
    all attacks share them.

    Attributes:
        model: the model, on its device.
        records: N records.
        keys: N names, which distinguish random streams of records.
        vocabulary: the words of token ids.
        unigram: float64 [V], log-probabilities of single tokens in the corpus.
        seed: the experiment's seed.
        layout: the corpus' token layout.
        reference: a model that was not trained on any of the records; None if there is none.
        context: further records that training did not read; None if there are none.
    """

    model: TrainableModel
    records: Records
    keys: Sequence[str]
    vocabulary: Vocabulary
    unigram: Floats
    seed: int
    layout: Layout
    reference: TrainableModel | None = None
    context: Records | None = None

    def __post_init__(self) -> None:
        # Views, so arrays of the caller do not change. A prompt is text of its record, because attackers see it.
        object.__setattr__(self, "unigram", _read_only(self.unigram.view()))
        tokens, offsets = _read_only(self.records.tokens.view()), _read_only(self.records.offsets.view())
        object.__setattr__(self, "records", Records(tokens, offsets))
        object.__setattr__(self, "keys", tuple(self.keys))

    def __len__(self) -> int:
        return len(self.records)

    def before(self, model: TrainableModel) -> "Candidates":
        return replace(self, model=model)

    @cached_property
    def words(self) -> Ints:
        """Return the number of words of each record, int64 [N]."""
        return _read_only(np.diff(self.records.offsets))

    @cached_property
    def lengths(self) -> Ints:
        """Return the number of tokens that the model predicts of each record, int64 [N]: words, and a final EOS."""
        return _read_only(self.words + self.layout.ends_with_eos(self.words))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        return tuple(self.vocabulary.text(record.tolist()) for record in self.records)

    @cached_property
    def log_probs(self) -> Floats:
        """Return log p(t_i | t_<i) of each record's tokens, float64 [N, T]; 0 after the end of a record."""
        return _read_only(log_probabilities(self.model, self.records, self.layout))

    @cached_property
    def tokens(self) -> Ints:
        """Return the tokens of each record that the model predicts, int64 [N, T]; PAD after the end of a record."""
        return _read_only(batch(self.records, np.arange(len(self)), self.layout).targets)

    @cached_property
    def unigram_log_probs(self) -> Floats:
        """Return the unigram's log-probabilities of each record's tokens, float64 [N, T]; 0 after the end."""
        return _read_only(np.where(self.tokens != self.layout.pad, self.unigram[self.tokens], 0.0))

    @cached_property
    def reference_log_probs(self) -> Floats:
        """Return log-probabilities by the reference, float64 [N, T]; or by the unigram if there is no reference."""
        if self.reference is None:
            return self.unigram_log_probs
        return _read_only(log_probabilities(self.reference, self.records, self.layout))

    def neighbours(self, count: int) -> Records:
        """Return `count` neighbours of each record, N times `count` records, by the seed and the key of the record.

        A neighbour has one word replaced, at a uniform position, by another word drawn from the unigram.
        """
        first, last = self.layout.text_ids.start, self.layout.text_ids.stop
        cumulative = np.exp(self.unigram[first:last]).cumsum()
        below = np.concatenate([[0.0], cumulative])
        pieces = []
        for record, key in zip(self.records, self.keys, strict=True):
            rng = stream(self.seed, "neighbours", key)
            copies = np.tile(record, (count, 1))
            places = rng.integers(len(record), size=count)
            replaced = record[places].astype(np.int64) - first
            is_word = (replaced >= 0) & (replaced < last - first)
            # A draw from all words except the word of the record, whose interval is removed from [0, 1).
            start = np.where(is_word, below[replaced.clip(0, last - first - 1)], 1.0)
            width = np.where(is_word, below[(replaced + 1).clip(1, last - first)] - start, 0.0)
            uniform = rng.random(count) * (cumulative[-1] - width)
            uniform += np.where(uniform >= start, width, 0.0)
            copies[np.arange(count), places] = first + cumulative.searchsorted(uniform, "right").clip(
                max=last - first - 1
            )
            pieces.append(copies.ravel())
        offsets = np.concatenate([[0], np.repeat(self.words, count).cumsum()])
        return Records(np.concatenate(pieces), offsets)


def log_probabilities(model: TrainableModel, records: Records, layout: Layout) -> Floats:
    """Return the natural log-probability of each token, 0 after the end [N, T]; Diverged if one is not finite."""

    def compute(logits: Tensor, targets: Tensor) -> list[Tensor]:
        return [logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]]

    return np.asarray(_of_tokens(model, records, layout, 1, compute)[0])


def likeliest(model: TrainableModel, records: Records, layout: Layout) -> Flags:
    """Return whether each token of records is the most likely token of the model, bool [N, T]; False after the end."""
    compare = _of_tokens(model, records, layout, 1, lambda logits, targets: [logits.argmax(-1) == targets])
    return np.asarray(compare[0] > 0)


def moments(model: TrainableModel, records: Records, layout: Layout) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of log p over the vocabulary at each position, float64 [N, T] each."""

    def compute(logits: Tensor, _targets: Tensor) -> list[Tensor]:
        log_probs = logits.double().log_softmax(-1)
        probs = log_probs.exp()
        mean = (probs * log_probs).sum(-1)
        return [mean, (probs * (log_probs - mean[:, None]).square()).sum(-1).sqrt()]

    means, deviations = _of_tokens(model, records, layout, 2, compute)
    return means, deviations


def gradient_norms(model: TrainableModel, records: Records, layout: Layout) -> Floats:
    """Return the Euclidean norm of the gradient of each record's mean loss, over all trained parameters [N]."""
    norms = np.zeros(len(records))
    for rows, gradients in gradients_of(model, records, layout):
        squares = sum(value.double().flatten(1).square().sum(1) for value in gradients.values())
        norms[rows] = _finite(torch.as_tensor(squares).sqrt())
    return norms


def gradients_of(model: TrainableModel, records: Records, layout: Layout) -> Iterator[tuple[Ints, Params]]:
    """Yield batches of records, int64 [B], and the gradients of their mean losses by parameter, [B, ...] each."""
    parameters = sum(value.numel() for value in model.trainable.values())
    for like in batches_by_length(records, layout, FLOATS // model.vocabulary_size):
        rows = max(1, FLOATS // parameters)
        for part in (like[first : first + rows] for first in range(0, len(like), rows)):
            read = batch(records, part, layout)
            inputs, targets = (torch.from_numpy(side).to(model.device) for side in (read.inputs, read.targets))
            yield part, record_gradients(model, inputs, targets, layout.pad)[0]


@torch.no_grad()
def _of_tokens(
    model: TrainableModel,
    records: Records,
    layout: Layout,
    count: int,
    compute: Callable[[Tensor, Tensor], Sequence[Tensor]],
) -> Floats:
    """Return values of tokens, from logits [n, V] and targets [n]: float64 [count, N, T], 0 after the end."""
    words = np.diff(records.offsets)
    values = np.zeros((count, len(records), int((words + layout.ends_with_eos(words)).max(initial=0))))
    for rows in batches_by_length(records, layout, FLOATS // layout.vocabulary_size):
        read = batch(records, rows, layout)
        inputs, targets = (torch.from_numpy(side).to(model.device) for side in (read.inputs, read.targets))
        real = targets != layout.pad
        for each, computed in zip(values, compute(model.logits_at(inputs, real), targets[real]), strict=True):
            block = np.zeros(real.shape)
            block[read.targets != layout.pad] = _finite(computed)
            each[rows, : real.shape[-1]] = block
    return values


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    values.flags.writeable = False
    return values


def _finite(values: Tensor) -> Floats:
    numbers: Floats = values.double().cpu().numpy()
    if not np.isfinite(numbers).all():
        raise Diverged("a score of a record is not finite; the model's values overflow")
    return numbers
