"""The records of a split that a run trains on, without user holdouts, records beyond a cap, or records of coins.

user_holdout     a share of each user's records, which no run trains on: fresh text of known users, for user inference
                 (Kandpal et al., "User Inference Attacks on Large Language Models", 2023, section 3)
max_records      at most this number of each user's other records: contributions are bounded before training (Charles et
                 al., "Fine-Tuning Large Language Models with User-Level Differential Privacy", 2024, section 3)
shadow           each user, or each record, is trained on only if a fair coin of the run's seed is heads: runs of many
                 seeds are the shadow models of Carlini et al., "Membership Inference Attacks From First Principles"
                 (2022), section 4
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError
from flsim.base.files import new_folder
from flsim.base.progress import progress
from flsim.base.rng import stream
from flsim.data.corpus import Corpus, CorpusWriter, Split, SplitWriter
from flsim.data.records import Records, RecordSource, windows

# Corpora that are derived from another corpus: the same users with a part of their records, or with other records.


BLOCK = 2**16  # records in memory at a time, or more if a user has more


def rewrite_corpus(
    corpus: Corpus,
    out: Path,
    step: dict[str, Any],
    *,
    source: RecordSource | None = None,
    kept: Flags | None = None,
    dropped: dict[str, int] | None = None,
    notes: Iterable[str] = (),
    write_more: Callable[[Path], None] = lambda _: None,
) -> Corpus:
    """Write a corpus with other train records; users (even empty users), other splits and the vocabulary do not change.

    The manifest is the old one with the drops, the notes, and the step, which becomes the last of ``parameters.steps``
    with the digest of the old corpus; its ``label``, if any, names runs over the new corpus. The train records come
    from `source`, of the same number, and only the `kept` [records] are written. `write_more` writes further files into
    the new folder, which is not created if there is an error.
    """
    train = corpus.split("train")
    with new_folder(out) as folder, CorpusWriter(folder, corpus.vocabulary, corpus.layout, corpus.splits) as writer:
        for name in corpus.splits:
            split = train if name == "train" else corpus.split(name)
            _copy(source if source and split is train else split, split, kept if split is train else None, writer)
        write_more(folder)
        before = corpus.manifest
        drops = dict(before["dropped"])
        for reason, count in (dropped or {}).items():
            drops[reason] = drops.get(reason, 0) + count
        parameters = dict(before["parameters"])
        parameters["read"] = {"records": train.records, **parameters.get("read", {})}
        parameters["steps"] = [*parameters.get("steps", []), {"corpus": corpus.digest, **step}]
        notes = [*before.get("notes", []), *notes]
        writer.finish(drops, before["sources"], parameters, before.get("warnings", []), notes)
    return Corpus.open(out)


def labelled_steps(corpus: Corpus) -> list[dict[str, Any]]:
    """Return the steps with a ``label``, such as defences, which tables name, without what differs between seeds."""
    steps = corpus.manifest["parameters"].get("steps", [])
    of_seed = ("corpus", "seed", "planted")
    common = [{name: value for name, value in step.items() if name not in of_seed} for step in steps]
    return [step for step in common if "label" in step]


def blocks(user_offsets: Ints, size: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of users with about `size` records, by default `BLOCK`, and at least one user each."""
    first, users = 0, len(user_offsets) - 1
    while first < users:
        last = int(np.searchsorted(user_offsets, user_offsets[first] + (size or BLOCK), side="right")) - 1
        last = min(max(last, first + 1), users)
        yield first, last
        first = last


def _copy(source: RecordSource, split: Split, kept: Flags | None, writer: CorpusWriter) -> None:
    into: SplitWriter = writer.splits[split.folder.name]
    user_offsets = np.asarray(split.user_offsets)
    with progress(f"writing {into.folder.name}", split.records, unit="records") as advance:
        for first, last in blocks(user_offsets):
            begin, end = user_offsets[first].item(), user_offsets[last].item()
            positions, owners = np.arange(begin, end), user_offsets[first : last + 1] - begin
            if kept is not None:
                chosen = kept[begin:end]
                positions, owners = positions[chosen], np.concatenate([[0], np.cumsum(chosen)])[owners]
            records = source.records_at(positions)
            lengths = np.diff(records.offsets)
            into.extend(split.names[first:last], records.tokens, lengths, np.diff(owners), records.prompts)
            advance(end)


Shadow = Literal["user", "record"]


@dataclass(frozen=True, eq=False)
class PartialSplit(Split):
    """Some records of a split, at ascending positions; users without remaining records are omitted.

    Tokens, `record_offsets` and `prompts` are those of the complete split. Everything else, including positions of
    records, refers only to the remaining records.
    """

    whole: Split = field(kw_only=True)
    positions: NDArray[np.integer[Any]] = field(kw_only=True)
    users: Ints = field(kw_only=True)

    @classmethod
    def select(cls, whole: Split, positions: NDArray[np.integer[Any]]) -> "PartialSplit":
        """Return the records of a split at ascending integer [n] positions."""
        # otherwise all are converted
        ends = positions.searchsorted(np.asarray(whole.user_offsets).astype(positions.dtype))
        users = np.flatnonzero(np.diff(ends))
        user_offsets = np.append(ends[users], len(positions))
        parts = whole.layout, whole.tokens, whole.record_offsets, user_offsets, whole.folder, whole.prompts
        return cls(*parts, whole=whole, positions=positions, users=users)

    def __getitem__(self, user: int) -> Records:
        first, last = self.user_offsets[user : user + 2].tolist()
        return self.whole.records_at(self.positions[first:last])

    def records_at(self, positions: NDArray[np.integer[Any]]) -> Records:
        return self.whole.records_at(self.positions[positions])

    @property
    def records(self) -> int:
        return len(self.positions)

    @property
    def words(self) -> int:
        return sum(int(words.sum()) for _, words in record_words(self))

    @cached_property
    def names(self) -> list[str]:
        names = self.whole.names
        return [names[user] for user in self.users]


def record_words(split: Split) -> Iterator[tuple[int, Ints]]:
    """Yield the numbers of words of consecutive records, each piece with the position of its first record."""
    first = 0
    for start, offsets in windows(split.record_offsets, overlap=1):
        words = np.diff(offsets)
        if not isinstance(split, PartialSplit):
            yield start, words
            continue
        end = int(split.positions.searchsorted(split.positions.dtype.type(start + len(words))))
        yield first, words[split.positions[first:end] - start]
        first = end


def in_whole(split: Split, positions: NDArray[np.integer[Any]]) -> Ints:
    """Return positions among the records of a split as positions in the corpus, int64 [n]."""
    return (split.positions[positions] if isinstance(split, PartialSplit) else positions).astype(np.int64)


def held_out(records: int, user: int, share: float) -> Ints:
    """Draw the records of a user that no run trains on, the same for all seeds and partitions, at most all but one."""
    count = min(int(share * records + 0.5), records - 1)
    if count <= 0:
        return np.empty(0, np.int64)
    return np.sort(stream(0, "user holdout", user).choice(records, count, replace=False))


def included(records: int, user: int, shadow: Shadow, seed: int) -> Flags:
    """Draw the coins of a user's records, bool [records]: one coin for all records, or one for each."""
    tosses = stream(seed, "shadow", user).random(1 if shadow == "user" else records) < 0.5
    return np.broadcast_to(tosses, records)


def without_withheld(
    split: Split, user_holdout: float, shadow: Shadow | None, seed: int, max_records: int | None = None
) -> Split:
    """Return the records that a run trains on: the complete split, or a part of it; InputError if none remains."""
    if not user_holdout and shadow is None and max_records is None:
        return split
    is_trained_on = np.ones(split.records, np.bool_)
    offsets = np.asarray(split.user_offsets)
    for user, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        is_trained_on[first + held_out(last - first, user, user_holdout)] = False
        if max_records is not None:
            others = first + np.flatnonzero(is_trained_on[first:last])
            is_trained_on[stream(0, "record cap", user).permutation(others)[max_records:]] = False
        if shadow is not None:
            is_trained_on[first:last] &= included(last - first, user, shadow, seed)
    if not is_trained_on.any():
        raise InputError(
            f"data.user_holdout and data.shadow exclude all records of {split.folder}; train on more users"
        )
    return PartialSplit.select(split, np.flatnonzero(is_trained_on).astype(position_type(split.records)))


def position_type(records: int) -> str:
    """Return the smallest type, by its name in files, that can represent this number of records."""
    return "<u4" if records < 2**32 else "<i8"
