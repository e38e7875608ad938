"""A corpus on disk: flat files that are memory-mapped, which opens instantly and is shared by all processes.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Ints
from flsim.base.errors import InputError
from flsim.base.files import HashedFile, digest, file_digest, from_json, inside, refuse_missing_folder, write_json
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
from flsim.data.records import Records, Tokens, Unchanging
from flsim.data.stores import fetched, is_uri
from flsim.data.tokenizer import TokenMap, TokenVocabulary
from flsim.data.vocabulary import Layout, Vocabulary


def memory_map(path: Path, dtype: str) -> NDArray[Any]:
    """Return a read-only array over a flat file; an empty file gives an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


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
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        position = np.repeat(starts - offsets[:-1], lengths)
        position += np.arange(len(position))
        prompts = None if self.prompts is None else np.asarray(self.prompts).take(index)
        return Records(tokens.take(position), offsets, prompts)

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
