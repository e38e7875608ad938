"""Candidates of membership inference, the built-in attacks, and the draw of members and non-members."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.attacks.membership import scores
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import Diverged, InputError
from flsim.base.extensions import is_custom, resolve, short_name
from flsim.base.rng import stream
from flsim.data.corpus import Corpus, Split, in_whole
from flsim.data.records import Layout, Records, Vocabulary, author_of, batch, batches_by_length, piece, windows
from flsim.models.language_model import Params, TrainableModel
from flsim.runs.folder import Run
from flsim.training.central.hparams import record_gradients

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
        source: for a custom attack, its name in options, for errors; set by flsim.
    """

    name: str
    score: Callable[["Candidates"], Any]
    fit: Callable[[Floats, Flags], Learned] | None = None
    source: str = ""


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


# The built-in attacks by name, and the control that reads no model.

NEIGHBOURS = 25  # number of neighbours of each record
LEVEL = 0.9  # of the quantile regression: 1 minus a false-positive rate of 10%, fixed before scores are known


def loss(candidates: Candidates) -> Floats:
    return scores.mean_log_probability(candidates.log_probs, candidates.lengths)


def reference(candidates: Candidates) -> Floats:
    return scores.against_reference(candidates.log_probs, candidates.reference_log_probs, candidates.lengths)


def zlib(candidates: Candidates) -> Floats:
    return scores.per_compressed_byte(candidates.log_probs, candidates.lengths, candidates.texts)


def min_k(candidates: Candidates) -> Floats:
    return scores.lowest_share(candidates.log_probs, candidates.lengths)


def min_k_plus_plus(candidates: Candidates) -> Floats:
    means, deviations = moments(candidates.model, candidates.records, candidates.layout)
    return scores.lowest_share(scores.standardized(candidates.log_probs, means, deviations), candidates.lengths)


def neighbourhood(candidates: Candidates) -> Floats:
    texts = candidates.neighbours(NEIGHBOURS)
    log_probs = log_probabilities(candidates.model, texts, candidates.layout)
    of_neighbours = scores.mean_log_probability(log_probs, np.repeat(candidates.lengths, NEIGHBOURS))
    return scores.against_neighbours(loss(candidates), of_neighbours.reshape(-1, NEIGHBOURS))


def gradient(candidates: Candidates) -> Floats:
    """Return the negative norm of the gradient of each record, as Nasr et al. (2019)."""
    return -gradient_norms(candidates.model, candidates.records, candidates.layout)


def error_zone(candidates: Candidates) -> Floats:
    is_likeliest = likeliest(candidates.model, candidates.records, candidates.layout)
    return scores.error_zone(candidates.log_probs, _of_model("ez", candidates), is_likeliest, candidates.lengths)


def window_based(candidates: Candidates) -> Floats:
    return scores.windows_above(candidates.log_probs, _of_model("wbc", candidates), candidates.lengths)


def _of_model(name: str, candidates: Candidates) -> Floats:
    if candidates.reference is None:
        raise InputError(
            f"attack {name}: needs a reference; name one with --reference: the checkpoint of another "
            'run, or base for architecture "hf"'
        )
    return candidates.reference_log_probs


def conditional(candidates: Candidates) -> Floats:
    """Return the mean log-probability of each record after the context, cut to fit, divided by that without context.

    See Xie et al., "ReCaLL: Membership Inference via Relative Conditional Log-Likelihoods" (2024).
    """
    layout, context = candidates.layout, candidates.context or Records.from_lists([])
    room = getattr(getattr(candidates.model, "config", None), "max_position_embeddings", None) or np.inf
    longest = max(layout.record_words, int(candidates.lengths.max(initial=0)))
    prefix = context.tokens[: context.offsets[context.offsets + longest <= room].max(initial=0)].tolist()
    if not prefix:
        raise InputError(
            "attack recall: found no held-out record that is not attacked and fits into the model before other "
            "records; lower --records, or choose another attack"
        )
    texts = Records.from_lists([[*prefix, *record.tolist()] for record in candidates.records])
    texts = replace(texts, prompts=np.full(len(texts), len(prefix)))
    longer = replace(layout, record_words=layout.record_words + len(prefix))
    log_probs = log_probabilities(candidates.model, texts, longer)[:, len(prefix) :]
    return scores.mean_log_probability(log_probs, candidates.lengths) / loss(candidates)


def divergence(candidates: Candidates) -> Floats:
    return scores.divergence(candidates.log_probs, candidates.unigram_log_probs, candidates.tokens, candidates.lengths)


def quantile_statistics(candidates: Candidates) -> Floats:
    """Return each record's mean log-probability, then statistics without the model [N, 4]."""
    compressed = scores.compressed_bytes(candidates.texts)
    return np.column_stack([loss(candidates), blind_statistics(candidates), compressed])


def quantile_of_others(statistics: Floats, is_member: NDArray[np.bool_]) -> Learned:
    """Return the first statistic minus its quantile among non-members, which is linear in the other statistics."""
    place, scale = _standard(statistics[:, 1:])

    def features(values: Floats) -> Floats:
        return (values[:, 1:] - place) / scale

    others = statistics[~is_member]
    weights = scores.quantile_fit(features(others), others[:, 0], LEVEL)
    return lambda values: values[:, 0] - weights[0] - features(values) @ weights[1:]


def blind_statistics(candidates: Candidates) -> Floats:
    """Return the number of words of each record, and its mean log-probability by the unigram [N, 2]."""
    unigram = scores.mean_log_probability(candidates.unigram_log_probs, candidates.lengths)
    return np.column_stack([candidates.words.astype(np.float64), unigram])


def logistic(statistics: Floats, is_member: NDArray[np.bool_]) -> Learned:
    """Return the log-odds of membership that are linear in the statistics."""
    place, scale = _standard(statistics)
    weights = scores.logistic_fit((statistics - place) / scale, is_member)
    return lambda values: (values - place) / scale @ weights


def _standard(values: Floats) -> tuple[Floats, Floats]:
    """Return means and standard deviations [F]; 1 for a statistic that does not vary."""
    deviations = values.std(axis=0)
    return values.mean(axis=0), np.where(deviations > 0, deviations, 1.0)


BLIND = Attack("blind", blind_statistics, logistic)
BY_DEFAULT: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack("loss", loss),
        Attack("reference", reference),
        Attack("zlib", zlib),
        Attack("min-k", min_k),
        Attack("min-k++", min_k_plus_plus),
        Attack("neighbourhood", neighbourhood),
        Attack("gradient", gradient),
        Attack("quantile", quantile_statistics, quantile_of_others),
        BLIND,
    )
}
ON_REQUEST = (
    Attack("ez", error_zone),
    Attack("wbc", window_based),
    Attack("recall", conditional),
    Attack("dc-pdd", divergence),
)
BUILT_IN: dict[str, Attack] = BY_DEFAULT | {attack.name: attack for attack in ON_REQUEST}


def attack_named(name: str) -> Attack:
    """Return a built-in attack, or the `Attack` or function of `Candidates` at ``path/to/file.py:NAME``.

    Raises InputError if it is neither, or has the name of a built-in attack.
    """
    named = resolve(name, BUILT_IN, "attack")
    if not is_custom(name):
        return named
    attack = named if isinstance(named, Attack) else Attack(short_name(name), named)
    if isinstance(named, type) or not (callable(attack.score) and (attack.fit is None or callable(attack.fit))):
        raise InputError(
            f"{name}: found {named!r:.60}; use a flsim.attacks.membership.Attack of functions, or a function of "
            "candidates"
        )
    if attack.name in BUILT_IN:
        raise InputError(f"{name}: flsim has an attack {attack.name}, whose rows this attack would replace; rename it")
    return replace(attack, source=name)


# The records of an attack: members from training, and non-members by other authors, of equal lengths.

FEW, FEW_AUTHORS = 100, 10  # numbers of members and of their authors below which a table has a note
RECORDS = 2**16  # records of a split that are read at once
SHOTS = 7  # largest number of records of a context
NEVER_TRAINED = ("heldout", "test")


@dataclass(frozen=True, eq=False)
class Targets:
    """Members and non-members in random order: N pairs, each a member and a non-member with equal numbers of words."""

    records: Records  # the 2N records
    keys: Sequence[str]  # 2N names, such as ``"heldout:17"``
    authors: Sequence[str]  # 2N authors of the records
    is_member: Flags  # bool [2N]
    pairs: Ints  # int64 [2N], number of each record's pair
    notes: tuple[str, ...] = ()  # sentences about limits
    context: Records | None = None  # non-members outside the pairs, at most `SHOTS`


def targets_of(run: Run, rounds: int, count: int) -> Targets:
    """Draw members and non-members of a run after a number of rounds (central training: steps), from the run's seed.

    Members are records that training read, and no canary replaced; non-members those by other authors.
    """
    corpus, train = run.corpus, run.corpus.split("train")
    others, notes = never_trained(corpus)
    return pairs_of(train, members_of(run, rounds), others, count, run.config.seed, run.path, notes)


def pairs_of(
    train: Split,
    members: Ints,
    others: Sequence[tuple[Split, Ints]],
    count: int,
    seed: int,
    folder: Path,
    notes: Sequence[str] = (),
) -> Targets:
    """Draw at most `count` pairs of a member and a non-member of equal lengths, from positions in splits.

    Texts that occur more than once are excluded, see `of_single_texts`.
    """
    notes = list(notes)
    sides = [(train, members), *others]
    members, *rest_of = of_single_texts(sides)
    excluded = sum(len(chosen) for _, chosen in sides) - len(members) - sum(map(len, rest_of))
    exclusion = [f"{excluded:,} records are excluded, because their texts occur more than once."] if excluded else []
    notes += exclusion
    others = [(split, chosen) for (split, _), chosen in zip(others, rest_of, strict=True)]
    lengths_out = np.concatenate([_lengths(split, chosen) for split, chosen in others])
    rng = stream(seed, "membership targets")
    chosen_in, chosen_out = matched(_lengths(train, members), lengths_out, count, rng)
    if not len(chosen_in):
        raise InputError(
            f"{folder}: no member has the length of a non-member, so no pairs can be formed; use a corpus or file "
            f"with more held-out text{'. '.join(['', *exclusion])}"
        )
    pairs = len(chosen_in)
    if pairs < FEW:
        notes.append(f"Only {pairs} pairs of a member and a non-member of equal length, so the intervals are wide.")
    places = [(train, members[chosen_in])]
    owner = np.repeat(np.arange(len(others)), [len(chosen) for _, chosen in others])
    positions = np.concatenate([chosen for _, chosen in others])
    rest = np.setdiff1d(np.flatnonzero(lengths_out), chosen_out)
    rest = stream(seed, "membership context").permutation(rest)[:SHOTS]
    order, context = [np.arange(pairs)], []
    for index, (split, _) in enumerate(others):
        is_own = owner[chosen_out] == index
        places.append((split, positions[chosen_out][is_own]))
        order.append(np.flatnonzero(is_own))
        context.append(split.records_at(positions[rest[owner[rest] == index]]))
    shuffled = rng.permutation(2 * pairs)
    records = Records.joined([split.records_at(chosen) for split, chosen in places])
    keys = [f"{split.folder.name}:{position}" for split, chosen in places for position in chosen.tolist()]
    authors = [author_of(split.names[user]) for split, chosen in places for user in split.owners(chosen).tolist()]
    inside, outside = len({*authors[:pairs]}), len({*authors[pairs:]})
    if min(inside, outside) < FEW_AUTHORS:
        notes.append(f"Members have {inside} authors, and non-members {outside}, so the intervals can be too narrow.")
    return Targets(
        Records.joined([Records(records[index], np.array([0, len(records[index])])) for index in shuffled.tolist()]),
        [keys[index] for index in shuffled],
        [authors[index] for index in shuffled],
        (np.arange(2 * pairs) < pairs)[shuffled],
        np.concatenate(order)[shuffled],
        tuple(notes),
        Records.joined(context),
    )


def members_of(run: Run, rounds: int) -> Ints:
    """Return the positions, in the corpus, of records that training read and no canary replaced in any round [n]."""
    users = run.users
    is_read = run.config.records_read(users, rounds)
    is_read[users.overlay.records] = False
    places = np.flatnonzero(is_read)
    return in_whole(users.split, places if users.twin is None else users.twin.order[places])


def matched(members: Ints, others: Ints, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return at most `count` indices of lengths of members and of others, with equally likely pairs of equal length."""
    longest = int(max(members.max(initial=0), others.max(initial=0)))
    counts = np.minimum(*(np.bincount(lengths, minlength=longest + 1) for lengths in (members, others)))
    counts[0] = 0  # empty records are useless
    possible = np.repeat(np.arange(longest + 1), counts)
    if len(possible) > count:
        counts = np.bincount(rng.choice(possible, count, replace=False), minlength=longest + 1)
    return _of_lengths(members, counts, rng), _of_lengths(others, counts, rng)


def unigram_of(corpus: Corpus) -> Floats:
    """Return `unigram_over` all splits, so that the unigram covers the text of members and non-members."""
    return unigram_over([corpus.split(name) for name in ("train", *NEVER_TRAINED)], corpus.layout)


def unigram_over(splits: Sequence[Split], layout: Layout) -> Floats:
    """Return log-probabilities of single tokens in splits together, float64 [V], with one added to each count."""
    counts = np.ones(layout.vocabulary_size)
    for split in splits:
        for _, tokens in windows(split.tokens):
            counts += np.bincount(tokens, minlength=layout.vocabulary_size)
        for _, offsets in windows(split.record_offsets, overlap=1):
            counts[layout.eos] += layout.ends_with_eos(np.diff(offsets)).sum()
    return np.asarray(np.log(counts / counts.sum()))


def fingerprints(split: Split) -> Iterator[NDArray[np.uint64]]:
    """Yield a hash of each record of a split, in order: uint64 [n] at a time."""
    weights = stream(0, "fingerprints").integers(2**63, size=split.layout.record_words, dtype=np.uint64) * np.uint64(2)
    weights += np.uint64(1)
    for _, offsets in windows(split.record_offsets, RECORDS, overlap=1):
        lengths, starts = np.diff(offsets), offsets - offsets[0]
        tokens = piece(split.tokens, int(offsets[0]), int(offsets[-1])).astype(np.uint64) + np.uint64(1)
        products = tokens * weights[np.arange(len(tokens)) - np.repeat(starts[:-1], lengths)]  # modulo 2^64, like sums
        sums = np.concatenate([np.zeros(1, np.uint64), products.cumsum(dtype=np.uint64)])
        yield sums[starts[1:]] - sums[starts[:-1]]


def never_trained(corpus: Corpus) -> tuple[list[tuple[Split, Ints]], list[str]]:
    """Return splits with their records by authors outside training, and sentences about exclusions."""
    in_training = set(map(author_of, corpus.split("train").names))
    splits, notes = list[tuple[Split, Ints]](), list[str]()
    for name in NEVER_TRAINED:
        split = corpus.split(name)
        is_other = np.array([author_of(user) not in in_training for user in split.names], np.bool_)
        if name == "test" and not is_other.all():
            notes.append(
                "Test users are excluded, because some of them are authors of training users: the split is not by "
                "author."
            )
            continue
        sizes: Ints = np.diff(split.user_offsets)
        if (positions := np.flatnonzero(np.repeat(is_other, sizes))).size:
            splits.append((split, positions))
    if not splits:
        raise InputError(
            f"{corpus.path}: no author is held out of training, so there are no non-members; import the corpus "
            "with a larger --heldout"
        )
    return splits, notes


def of_single_texts(sides: Sequence[tuple[Split, Ints]]) -> list[Ints]:
    """Return those of the chosen records of each split whose text occurs once among all chosen records.

    If only non-members were compared with the other side, text that many authors write would remain only among
    members, and an attack would detect frequent text instead of membership.
    """
    hashes = [np.concatenate([*fingerprints(split), np.empty(0, np.uint64)])[chosen] for split, chosen in sides]
    _, place, counts = np.unique(np.concatenate(hashes), return_inverse=True, return_counts=True)
    is_single = np.split(counts[place] == 1, np.cumsum([len(part) for part in hashes])[:-1])
    return [chosen[single] for (_, chosen), single in zip(sides, is_single, strict=True)]


def _of_lengths(lengths: Ints, counts: NDArray[np.integer[Any]], rng: np.random.Generator) -> Ints:
    """Draw ``counts[n]`` indices of each length n, in the order of lengths."""
    order = rng.permutation(len(lengths))
    order = order[np.argsort(lengths[order], kind="stable")]
    starts = np.searchsorted(lengths[order], np.arange(len(counts)))
    taken = [order[start : start + count] for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(taken)


def _lengths(split: Split, positions: Ints) -> Ints:
    offsets = np.asarray(split.record_offsets)
    return offsets[positions + 1] - offsets[positions]
