"""A corpus on disk: flat files that are memory-mapped, so that opening is free and every process shares one copy.

    manifest.json            schema, token layout, counts, drops by reason, digests of sources and of the files below
    vocabulary.tsv           word, count; most frequent first
    train/  heldout/  test/  tokens.u16    word ids of all records, one after another
                             records.i64   where each record starts in tokens.u16, and its end
                             users.i64     where each user starts in records.i64, and its end
                             names.json    the users' names

Held-out and test users are never trained on. All numbers are little-endian.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flsim.data.records import Records
from flsim.data.vocabulary import Layout, Vocabulary
from flsim.errors import InputError
from flsim.files import digest, file_digest, write_json

SCHEMA = 1
SPLITS = ("train", "heldout", "test")


def memory_map(path: Path, dtype: str) -> NDArray[Any]:
    """A read-only array over a flat file; an empty file is an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@dataclass(frozen=True)
class Split:
    """The users of one split, opened for reading; satisfies `Users`."""

    layout: Layout
    tokens: NDArray[np.uint16]
    record_offsets: NDArray[np.int64]
    user_offsets: NDArray[np.int64]
    folder: Path

    @classmethod
    def open(cls, folder: Path, layout: Layout) -> "Split":
        return cls(
            layout,
            memory_map(folder / "tokens.u16", "<u2"),
            memory_map(folder / "records.i64", "<i8"),
            memory_map(folder / "users.i64", "<i8"),
            folder,
        )

    def __len__(self) -> int:
        return len(self.user_offsets) - 1

    def __getitem__(self, user: int) -> Records:
        first, last = self.user_offsets[user], self.user_offsets[user + 1]
        offsets = np.asarray(self.record_offsets[first : last + 1])
        return Records(np.asarray(self.tokens[offsets[0] : offsets[-1]]), offsets - offsets[0])

    @property
    def records(self) -> int:
        return len(self.record_offsets) - 1

    @property
    def words(self) -> int:
        return len(self.tokens)

    @cached_property
    def names(self) -> list[str]:
        return list(json.loads((self.folder / "names.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Corpus:
    """An imported corpus. `digest` stands for everything in it."""

    path: Path
    manifest: dict[str, Any]
    digest: str

    @classmethod
    def open(cls, path: Path, verify: bool = False) -> "Corpus":
        """Open a corpus folder.

        Args:
            path: the folder.
            verify: read every file and compare its digest with the manifest's.

        Raises:
            InputError: not a corpus, of another schema, or its files are not what the manifest says.
        """
        try:
            text = (path / "manifest.json").read_text(encoding="utf-8")
            manifest = json.loads(text)
            schema, files = manifest["schema"], manifest["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a corpus; make one with `flsim data import`") from error
        if schema != SCHEMA:
            raise InputError(f"{path}: corpus schema {schema}, but this version reads {SCHEMA}; import it again")
        for name, written in files.items():
            file = path / name
            if not file.is_file() or file.stat().st_size != written["bytes"]:
                raise InputError(f"{file}: missing or of another size than the manifest says; import the corpus again")
            if verify and file_digest(file) != written["sha256"]:
                raise InputError(f"{file}: changed since the import (its sha256 differs); import the corpus again")
        return cls(path, manifest, digest(text))

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.manifest["layout"]["vocabulary_size"], self.manifest["layout"]["record_words"])

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self.path / "vocabulary.tsv")

    def split(self, name: str) -> Split:
        return Split.open(self.path / name, self.layout)


class SplitWriter:
    """Appends users to a split's flat files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.names: list[str] = []
        self.records = self.words = 0
        self._tokens, self._records, self._users = (
            (folder / name).open("wb") for name in ("tokens.u16", "records.i64", "users.i64")
        )
        _append(self._records, [0])
        _append(self._users, [0])

    def add(self, name: str, records: Records) -> None:
        """Append one user."""
        self._tokens.write(records.tokens.astype("<u2").tobytes())
        _append(self._records, self.words + records.offsets[1:])
        self.words += records.words
        self.records += len(records)
        _append(self._users, [self.records])
        self.names.append(name)

    def close(self) -> None:
        for file in (self._tokens, self._records, self._users):
            file.close()

    def counts(self) -> dict[str, int]:
        return {"users": len(self.names), "records": self.records, "words": self.words}


def _append(file: IO[bytes], values: Any) -> None:
    file.write(np.asarray(values, "<i8").tobytes())


class CorpusWriter:
    """Writes a corpus into an empty folder (see `flsim.files.new_folder`); `finish` makes it one.

    >>> with CorpusWriter(folder, vocabulary, layout) as writer:             # doctest: +SKIP
    ...     writer.splits["train"].add("ai/8", Records.of([[3, 1], [4]]))
    ...     writer.finish(dropped={"posts_without_owner": 2}, sources=[], parameters={})
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        vocabulary.write(folder / "vocabulary.tsv")
        self.splits = {name: SplitWriter(folder / name) for name in SPLITS}

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for split in self.splits.values():
            split.close()

    def finish(self, dropped: dict[str, int], sources: list[dict[str, Any]], parameters: dict[str, Any]) -> None:
        """Write names and the manifest, which seals the corpus.

        Args:
            dropped: reason -> count of everything that was read and is not here.
            sources: name, bytes and sha256 of each input file.
            parameters: how the corpus was made.
        """
        for split in self.splits.values():
            split.close()
            (split.folder / "names.json").write_text(json.dumps(split.names), encoding="utf-8")
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        write_json(
            self.folder / "manifest.json",
            {
                "schema": SCHEMA,
                "layout": {
                    "name": self.layout.name,
                    "vocabulary_size": self.layout.vocabulary_size,
                    "record_words": self.layout.record_words,
                },
                "splits": {name: split.counts() for name, split in self.splits.items()},
                "dropped": dropped,
                "sources": sources,
                "parameters": parameters,
                "files": {
                    path.relative_to(self.folder).as_posix(): {
                        "bytes": path.stat().st_size,
                        "sha256": file_digest(path),
                    }
                    for path in files
                },
            },
        )
