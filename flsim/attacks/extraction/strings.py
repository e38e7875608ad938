"""The strings of an extraction with their controls, and the probability that a model completes them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from flsim.attacks.membership.targets import matched, members_of, never_trained
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.rng import stream
from flsim.base.settings import Natural, Positive, Probability, settings
from flsim.canaries.spec import Canary
from flsim.data.corpus import Split
from flsim.data.records import Records, batch, batches_by_length
from flsim.data.vocabulary import Layout
from flsim.measures.memorization.score import cheapest, floats_at_once, nats
from flsim.models.language_model import TrainableModel
from flsim.runs.folder import Run

Places = list[tuple[Split, Ints]]
POOL = 4  # records that are examined per drawn string, because OOV and repetitions exclude some
CANARY = "canary"
RECORD = "record"


@dataclass(frozen=True, eq=False)
class Strings:
    """N strings of one kind; after `prefix` words, which the attacker knows, follows the suffix.

    `names` are such as ``"heldout:17"``. Strings that training did not read (`is_trained` [N]) are controls.
    """

    kind: str
    prefix: int
    texts: Records
    names: Sequence[str]
    is_trained: Flags

    def __len__(self) -> int:
        return len(self.texts)


def canary_strings(canaries: Sequence[Canary], prefix: int, copies: Ints) -> Strings:
    """Return the canaries of more than `prefix` words, complete; canaries without a copy are controls."""
    longer = [index for index, canary in enumerate(canaries) if len(canary.tokens) > prefix]
    texts = Records.from_lists([list(canaries[index].tokens) for index in longer])
    return Strings(CANARY, prefix, texts, [canaries[index].id for index in longer], copies[longer] > 0)


def records_of(run: Run, rounds: int) -> tuple[Places, Places]:
    """Return the records that training read and no canary replaces, and those by authors outside training."""
    held_out, _ = never_trained(run.corpus)  # first, because it checks the corpus before cohorts are drawn
    return [(run.corpus.split("train"), members_of(run, rounds))], held_out


def record_strings(
    seed: int, canaries: Sequence[Canary], sides: tuple[Places, Places], prefix: int, suffix: int, count: int
) -> Strings:
    """Draw at most `count` beginnings of training records, and as many of held-out records, by the seed.

    Strings are distinct, without OOV and canaries, and of equal lengths on both sides.
    """
    rng = stream(seed, "extraction", prefix)
    planted = {canary.tokens for canary in canaries}
    both = [[*_beginnings(places, prefix, suffix, count, planted, rng).items()] for places in sides]
    lengths, lengths_out = (np.array([len(text) for text, _ in side], np.int64) for side in both)
    chosen = matched(lengths, lengths_out, count, rng)
    drawn = [side[index] for side, indices in zip(both, chosen, strict=True) for index in indices.tolist()]
    texts = Records.from_lists([list(text) for text, _ in drawn])
    is_trained = np.arange(len(drawn)) < len(chosen[0])
    return Strings(RECORD, prefix, texts, [name for _, name in drawn], is_trained)


def _beginnings(
    places: Places,
    prefix: int,
    suffix: int,
    count: int,
    planted: Collection[tuple[int, ...]],
    rng: np.random.Generator,
) -> dict[tuple[int, ...], str]:
    """Draw records of more than `prefix` words; return the name of one record for each distinct beginning."""
    names = dict[tuple[int, ...], str]()
    for split, positions in places:
        offsets = np.asarray(split.record_offsets)
        longer = positions[offsets[positions + 1] - offsets[positions] > prefix]
        drawn = rng.permutation(longer)[: POOL * count]
        for position, record in zip(drawn.tolist(), split.records_at(drawn), strict=True):
            words = tuple(record.tolist())
            text = words[: prefix + suffix]
            if split.layout.oov not in text and not any(words[: len(phrase)] == phrase for phrase in planted):
                names.setdefault(text, f"{split.folder.name}:{position}")
    return names


# Discoverable extraction: the probability that a model completes a string from its beginning.
#
# [C] Carlini et al., "Quantifying Memorization Across Neural Language Models" (2023), definition 3.1: greedy decoding.
# [H] Hayes et al., "Measuring Memorization in Language Models via Probabilistic Extraction" (2025): a string z is (n,
# p)-discoverable if one of n samples is its suffix with probability p or more:
#
#     1 - (1 - p_z)^n >= p,   that is   n >= log(1 - p) / log(1 - p_z),
#
#     p_z = product over the suffix of Pr(word | all words before it), with the sampling scheme.
#
# One forward pass gives both, because the words before each word of the suffix are those of the string.


@settings
class Scheme:
    """A sampling scheme: from the model's distribution to the sampling distribution, by steps in the fields' order.

    Log-probs are divided by the temperature; of the `top_k` most likely tokens (0 for all), the share `top_p` is used.
    """

    temperature: Positive = 1.0
    top_k: Natural = 40
    top_p: Probability = 1.0


def discover(
    model: TrainableModel, strings: Records, prefix: int, scheme: Scheme, layout: Layout
) -> tuple[Flags, Floats]:
    """Return whether greedy decoding continues prefixes with suffixes [N], and log p_z of the suffixes [N], nats.

    Tokens that are not words can be drawn too; log p_z can be -inf. Raises Diverged if a log-probability is not finite.
    """
    is_greedy, log_probs = np.ones(len(strings), np.bool_), np.zeros(len(strings))
    words: Ints = np.diff(strings.offsets)
    for rows in batches_by_length(strings, layout, floats_at_once(model.device) // layout.vocabulary_size):
        read = batch(strings, rows, layout)
        place = np.arange(read.inputs.shape[1])
        is_suffix = (place >= prefix) & (place < words[rows, None])
        sides = (read.inputs, read.targets, is_suffix)
        inputs, targets, real = (torch.from_numpy(side).to(model.device) for side in sides)
        with torch.no_grad():
            likeliest, log_prob = next_words(model.logits_at(inputs, real), targets[real], scheme)
        owner = rows[is_suffix.nonzero()[0]]
        np.logical_and.at(is_greedy, owner, likeliest.cpu().numpy())
        np.add.at(log_probs, owner, log_prob.cpu().numpy())
    return is_greedy, log_probs


def next_words(logits: Tensor, words: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return whether words [N] are the most likely by logits [N, V], ties to the lower id, and their log-probs [N]."""
    costs, columns = cheapest(nats(logits.log_softmax(-1)) / scheme.temperature, scheme.top_k or logits.shape[1])
    if scheme.top_p < 1:
        shares = (-costs).softmax(-1)
        costs = costs.masked_fill(shares.cumsum(-1) - shares >= scheme.top_p, inf)
    is_custom = columns == words[:, None]
    log_probs = (-costs).log_softmax(-1).masked_fill(~is_custom, -inf).amax(-1)
    return is_custom[:, 0], log_probs


def probability_within(tries: float, log_probs: Floats) -> Floats:
    """Return the probability that one of n samples is the suffix, 1 - (1 - p_z)^n, from log p_z, float64 [N]."""
    with np.errstate(divide="ignore"):  # if p_z is 1
        within: Floats = -np.expm1(tries * np.log1p(-np.exp(log_probs)))
    return within


def least_tries(log_probs: Floats, p: float) -> Floats:
    """Return the smallest n for which one of n samples is the suffix with probability `p`, or infinity [N]."""
    with np.errstate(divide="ignore"):  # if p_z is 0 or 1
        least: Floats = np.ceil(np.log1p(-p) / np.log1p(-np.exp(log_probs)))
    return least.clip(1)
