"""The records of an attack: members from training, and non-members by other authors, of equal lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Records, author_of, piece, windows
from flsim.data.vocabulary import Layout
from flsim.data.withheld import in_whole
from flsim.runs.folder import Run

FEW = 100  # number of members below which a table has a note
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

    Members are records that training read, and no canary replaced; non-members those by other authors, with new texts.
    """
    corpus, train = run.corpus, run.corpus.split("train")
    splits, notes = never_trained(corpus)
    members = members_of(run, rounds)
    others = [(split, unseen(split, chosen, train)) for split, chosen in splits]
    return pairs_of(train, members, others, count, run.config.seed, run.path, notes)


def pairs_of(
    train: Split,
    members: Ints,
    others: Sequence[tuple[Split, Ints]],
    count: int,
    seed: int,
    folder: Path,
    notes: Sequence[str] = (),
) -> Targets:
    """Draw at most `count` pairs of a member and a non-member of equal lengths, from positions in splits."""
    notes = list(notes)
    lengths_out = np.concatenate([_lengths(split, chosen) for split, chosen in others])
    rng = stream(seed, "membership targets")
    chosen_in, chosen_out = matched(_lengths(train, members), lengths_out, count, rng)
    if not len(chosen_in):
        raise InputError(
            f"{folder}: no member has the length of a non-member, so no pairs can be formed; use a corpus or file "
            "with more held-out text"
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


def unseen(split: Split, chosen: Ints, train: Split) -> Ints:
    """Return those of the chosen records whose text is not a training record."""
    every = np.concatenate([*fingerprints(split), np.empty(0, np.uint64)])[chosen]
    known, place = np.unique(every, return_inverse=True)
    is_seen = np.zeros(len(known), bool)
    for part in fingerprints(train):
        at = known.searchsorted(part).clip(max=len(known) - 1)
        is_seen[at[known[at] == part]] = True
    return chosen[~is_seen[place]]


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
