"""A corpus: its files and users' token ids, and the parts that training does not read.

A corpus on disk is flat files that are memory-mapped, which opens instantly and is shared by all processes:

    manifest.json            schema, token layout, counts, drops by reason, digests of sources and of the files below
    vocabulary.tsv           word, count; most frequent first
    train/  heldout/  test/  split.json    token layout and counts, so that a split can be read without the rest
                             tokens.u16    word ids of all records, one after another; tokens.u32 if the
                                           vocabulary has more than 65,536 ids
                             records.i64   start of each record among the tokens, and the end of the last one
                             users.i64     start of each user in records.i64, and the end of the last one
                             names.json    the users' names
                             prompts.u32   number of first tokens of each record in its prompt; if records have prompts
    heldout-whole/  test-whole/  the same authors, neither cut into users nor dropped; only if an import cut them

Held-out and test users are never trained on. All numbers are little-endian.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError
from flsim.base.files import (
    HashedFile,
    digest,
    file_digest,
    from_json,
    inside,
    new_folder,
    refuse_missing_folder,
    write_json,
)
from flsim.base.progress import progress
from flsim.base.rng import stream
from flsim.data.manifest import (
    FLAT_FILES,
    PROMPTS,
    SCHEMA,
    SPLITS,
    TOKEN_FILES,
    WHOLE,
    by_in,
    description_of,
    layout_in,
    read_manifest,
    splits_in,
)
from flsim.data.records import Layout, Records, RecordSource, Tokens, Unchanging, Vocabulary, spans, windows
from flsim.data.stores import fetched, is_uri
from flsim.data.tokenizer import TokenMap, TokenVocabulary


def memory_map(path: Path, dtype: str) -> NDArray[Any]:
    """Return a read-only array over a flat file; an empty file gives an empty array."""
    return np.empty(0, dtype) if path.stat().st_size == 0 else np.memmap(path, dtype=dtype, mode="r")


@dataclass(frozen=True, eq=False)
class Split(Unchanging):
    """The users of one split of a corpus, open for reading.

    ``split[user]`` is the records of a user, and ``len(split)`` the number of users. A split implements `UsersByRound`
    and `RecordsByRound`. Tokens are uint16 or uint32 [words]; offsets, int64, have the start of each record among the
    tokens and of each user among the records, and the end. Prompts are the numbers of first tokens of each record in
    its prompt; None if no record has one.
    """

    layout: Layout
    tokens: Tokens
    record_offsets: Ints
    user_offsets: Ints
    folder: Path
    prompts: NDArray[np.uint32] | None = None

    @classmethod
    def open(cls, folder: Path) -> "Split":
        """Open a split's folder; `split.json` in it names the layout of token ids."""
        try:
            layout = layout_in(from_json((folder / "split.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"{folder}: not a split of a corpus ({error}); import the corpus again") from error
        tokens, dtype = TOKEN_FILES[layout.token_type]
        return cls(
            layout,
            memory_map(folder / tokens, dtype),
            memory_map(folder / "records.i64", "<i8"),
            memory_map(folder / "users.i64", "<i8"),
            folder,
            memory_map(folder / PROMPTS, "<u4") if layout.prompts else None,
        )

    def __len__(self) -> int:
        return len(self.user_offsets) - 1

    def __getitem__(self, user: int) -> Records:
        first, last = self.user_offsets[user], self.user_offsets[user + 1]
        offsets = np.asarray(self.record_offsets[first : last + 1])
        prompts = None if self.prompts is None else np.asarray(self.prompts[first:last])
        return Records(np.asarray(self.tokens[offsets[0] : offsets[-1]]), offsets - offsets[0], prompts)

    def records_at(self, positions: NDArray[np.integer[Any]]) -> Records:
        """Return the records at integer [n] positions, counted over all users, in that order."""
        tokens, record_offsets = np.asarray(self.tokens), np.asarray(self.record_offsets)
        index = positions.astype(np.int64)
        starts = record_offsets.take(index)
        lengths = record_offsets.take(index + 1) - starts
        tokens.take(starts[lengths > 0])  # reads memory for all records at once, not one after another
        prompts = None if self.prompts is None else np.asarray(self.prompts).take(index)
        return Records(tokens.take(spans(starts, lengths)), np.append(0, np.cumsum(lengths)), prompts)

    def owners(self, positions: Ints) -> Ints:
        """Return the user of the record at each position, int64 [n]."""
        return np.searchsorted(np.asarray(self.user_offsets), positions, side="right") - 1

    @property
    def records(self) -> int:
        return len(self.record_offsets) - 1

    @property
    def words(self) -> int:
        return len(self.tokens)

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the users; raise InputError if the file does not have one for each."""
        try:
            names = from_json((self.folder / "names.json").read_text(encoding="utf-8"))
            if len(names) == len(self) and all(isinstance(name, str) for name in names):
                return list(names)
        except (OSError, ValueError, TypeError):
            pass
        raise InputError(f"{self.folder / 'names.json'}: does not have one name for each user; import the corpus again")


@dataclass(frozen=True)
class Corpus:
    """An imported corpus: its splits, its vocabulary and its manifest.

    Attributes:
        digest: sha256 of the manifest, which identifies the content of the corpus.

    Examples:
        >>> corpus = flsim.open_corpus("corpora/demo")                         # doctest: +SKIP
        >>> train = corpus.split("train")                                      # doctest: +SKIP
        >>> [corpus.vocabulary.text(record) for record in train[0]]            # doctest: +SKIP
    """

    path: Path
    manifest: dict[str, Any]
    digest: str

    @classmethod
    def open(cls, path: Path | str, verify: bool = False) -> "Corpus":
        """Open a corpus folder, or the URI of a corpus, which `flsim.data.stores` fetches first.

        With `verify`, every file is read and its digest compared with the manifest's. Raises InputError if the folder
        is not a corpus, has another schema, or its files differ from the manifest.
        """
        again = "import the corpus again"
        if is_uri(path):
            path = fetched(path)
            again = f"remove {path} to fetch the corpus again"
        path = Path(path)
        try:
            text = (path / "manifest.json").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = "" if path.is_dir() else " (no such folder; was it moved or renamed?)"
            raise InputError(f"{path}: not a corpus{why}; make one with `flsim data import`") from error
        manifest, sealed = read_manifest(text, path)
        for name, (size, sha256) in sealed.items():
            file = inside(path, name)
            refuse_missing_folder(file.parent)
            if not file.is_file() or file.stat().st_size != size:
                raise InputError(f"{file}: missing, or its size differs from the manifest; {again}")
            if verify and file_digest(file) != sha256:
                raise InputError(f"{file}: changed since the import (its sha256 differs); {again}")
        return cls(path, manifest, digest(text))

    @cached_property
    def layout(self) -> Layout:
        return layout_in(self.manifest)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary, read when it is first used."""
        read = Vocabulary.read(self.path / "vocabulary.tsv", self.layout.name, by_in(self.manifest))
        if self.token_map is None:
            return read
        return TokenVocabulary(read.words, read.counts, read.layout, read.by, map=self.token_map)

    @cached_property
    def token_map(self) -> TokenMap | None:
        """Return the model's ids of the corpus' token ids; None if no tokenizer cut the text."""
        return TokenMap.open(self.path, self.layout)

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits: "train", "heldout", "test", and "heldout-whole", "test-whole" if present."""
        return splits_in(self.manifest["files"])

    @property
    def test_users(self) -> Split:
        """Open the users that utility is measured on: complete test authors, or balanced test users without them."""
        return self.split(WHOLE["test"] if WHOLE["test"] in self.splits else "test")

    def split(self, name: str) -> Split:
        """Open one of the `splits`; raise InputError if it is missing, or has another layout than the manifest."""
        split = Split.open(self.path / name)
        if split.layout != self.layout:
            raise InputError(
                f"{split.folder}: token ids are in {split.layout}, but the manifest of the corpus has "
                f"{self.layout}; import the corpus again"
            )
        return split


class SplitWriter:
    def __init__(self, folder: Path, layout: Layout) -> None:
        folder.mkdir()
        self.folder, self.layout = folder, layout
        self._tokens, self._dtype = TOKEN_FILES[layout.token_type]
        self.users = self.records = self.words = 0
        names = (self._tokens, *FLAT_FILES, *([PROMPTS] if layout.prompts else []))
        self._files = {name: HashedFile((folder / name).open("wb")) for name in names}
        self._append("records.i64", np.zeros(1, np.int64))
        self._append("users.i64", np.zeros(1, np.int64))

    def add(self, name: str, records: Records) -> None:
        self.extend([name], records.tokens, np.diff(records.offsets), np.array([len(records)]), records.prompts)

    def extend(
        self,
        names: Sequence[str],
        tokens: Tokens,
        record_words: NDArray[np.integer[Any]],
        user_records: NDArray[np.integer[Any]],
        prompts: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Append users: tokens [words] of all records, words and prompt tokens of records, and records of users."""
        if self.layout.prompts:
            lengths = np.zeros(len(record_words), "<u4") if prompts is None else prompts.astype("<u4")
            self._files[PROMPTS].write(lengths.tobytes())
        self._files[self._tokens].write(tokens.astype(self._dtype).tobytes())
        self._append("records.i64", self.words + np.cumsum(record_words, dtype=np.int64))
        self._append("users.i64", self.records + np.cumsum(user_records, dtype=np.int64))
        names_json = json.dumps(list(names))[1:-1]
        if names:
            self._files["names.json"].write(f"{', ' if self.users else '['}{names_json}".encode())
        self.users += len(names)
        self.records += len(record_words)
        self.words += len(tokens)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def finish(self) -> dict[str, dict[str, Any]]:
        """Complete the files, and return their sizes and digests by name."""
        self._files["names.json"].write(b"]" if self.users else b"[]")
        self.close()
        write_json(self.folder / "split.json", {"layout": description_of(self.layout), **self.counts()})
        return {name: file.described() for name, file in self._files.items()}

    def counts(self) -> dict[str, int]:
        return {"users": self.users, "records": self.records, "words": self.words}

    def _append(self, name: str, offsets: Ints) -> None:
        self._files[name].write(offsets.astype("<i8").tobytes())


class CorpusWriter:
    """A writer of a corpus into an empty folder (see `flsim.base.files.new_folder`); `finish` completes the corpus.

    >>> with CorpusWriter(folder, vocabulary, layout) as writer:             # doctest: +SKIP
    ...     writer.splits["train"].add("ai/8", Records.from_lists([[3, 1], [4]]))
    ...     writer.finish(dropped={"posts_without_owner": 2}, sources=[], parameters={})
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, layout: Layout, splits: Iterable[str] = SPLITS) -> None:
        self.folder, self.layout = folder, layout
        vocabulary.write(folder / "vocabulary.tsv")
        self.splits = {name: SplitWriter(folder / name, layout) for name in splits}

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for split in self.splits.values():
            split.close()

    def finish(
        self,
        dropped: dict[str, int],
        sources: list[dict[str, Any]],
        parameters: dict[str, Any],
        warnings: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> None:
        """Complete the splits and write the manifest, which completes the corpus; `dropped` counts by reason."""
        written = {
            f"{name}/{file}": described
            for name, split in self.splits.items()
            for file, described in split.finish().items()
        }
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            if name not in written:
                written[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        write_json(
            self.folder / "manifest.json",
            {
                "schema": SCHEMA,
                "layout": description_of(self.layout),
                "splits": {name: split.counts() for name, split in self.splits.items()},
                "dropped": dropped,
                "sources": sources,
                "parameters": parameters,
                "warnings": list(warnings),
                "notes": list(notes),
                "files": written,
            },
        )


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


# The records of a split that a run trains on, without user holdouts, records beyond a cap, or records of coins.
#
# user_holdout     a share of each user's records, which no run trains on: fresh text of known users, for user inference
#                  (Kandpal et al., "User Inference Attacks on Large Language Models", 2023, section 3)
# max_records      at most this number of each user's other records: contributions are bounded before training (Charles
#                  et al., "Fine-Tuning Large Language Models with User-Level Differential Privacy", 2024, section 3)
# shadow           each user, or each record, is trained on only if a fair coin of the run's seed is heads: runs of many
#                  seeds are the shadow models of Carlini et al., "Membership Inference Attacks From First Principles"
#                  (2022), section 4

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
