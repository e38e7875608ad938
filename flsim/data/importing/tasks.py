"""The steps of an import, see `flsim.data.importing.run`: their tasks and their counts."""

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flsim.base.errors import InputError
from flsim.base.pool import Pool, Task
from flsim.base.progress import say, tracked
from flsim.data.corpus import CorpusWriter
from flsim.data.formats import canonical
from flsim.data.formats.known import FORMATS, is_fragile
from flsim.data.formats.posts import OOV_WORD, Format, Part, Reading
from flsim.data.importing import lengths
from flsim.data.importing.count import count_words, merge, words_of
from flsim.data.importing.gather import balance_bucket, users_of
from flsim.data.importing.read import detect, parts_of, read_part
from flsim.data.importing.removal import Removal
from flsim.data.importing.scratch import MADE, Pieces
from flsim.data.importing.settings import ImportHParams
from flsim.data.importing.sites import with_sites
from flsim.data.importing.sources import Source, blaming_changes, checks, hashed, names_of, refuse_twice
from flsim.data.importing.spill import cuts, ranges_of
from flsim.data.vocabulary import SPECIAL_TOKENS, Layout, Vocabulary

PIECE = 2**24  # characters of sentences in a file of step 1
BUCKET = 2**23  # bytes of sentences for a task of step 2
COUNTED = 2**20  # words of buckets for a task of step 3
SILENCE = 300.0  # seconds, of a fragile reader


@dataclass(frozen=True)
class Given:
    """A vocabulary that was given, and the file that it was read from."""

    vocabulary: Vocabulary
    path: Path
    sha256: str
    warnings: list[str]

    @property
    def size(self) -> int:
        """Return the number of token ids, the four special ones included."""
        return len(self.vocabulary.words) + SPECIAL_TOKENS

    @property
    def parameter(self) -> dict[str, str]:
        """Return the vocabulary's entry in the manifest."""
        return {"name": self.path.name, "sha256": self.sha256}


def _without_folders(warning: str, sources: list[Source], supplied: Given | None) -> str:
    """Return a warning without the folders of files, which are private and no property of the corpus."""
    for path in [*(source.path for source in sources), *([supplied.path] if supplied else [])]:
        warning = warning.replace(str(path), path.name)
    return warning


def _silence(format: Format) -> float | None:
    return SILENCE if format.fragile else None


def words_short(words: int, hparams: ImportHParams) -> str:
    """Return the line about a vocabulary that is smaller than the default one, as --vocabulary would set it."""
    return (
        f"vocabulary: the text has only {words:,} different {hparams.by}, so that all are taken (--vocabulary "
        f"{words + SPECIAL_TOKENS} instead of {hparams.vocabulary_size})"
    )


class Steps:
    """The steps of one import, and what they counted."""

    def __init__(
        self,
        pieces: Pieces,
        pool: Pool,
        hparams: ImportHParams,
        fit_vocabulary: bool = False,
        text: Format | None = None,
        sites: Sequence[str] = (),
        delimiter: str | None = None,
    ) -> None:
        self.text = text  # in place of the format text, if lines per author are set
        self.sites, self.delimiter = sites, delimiter
        self.pieces, self.pool, self.hparams, self.fit_vocabulary = pieces, pool, hparams, fit_vocabulary
        self.read: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.split_records: Counter[str] = Counter()
        self.split_users: Counter[str] = Counter()
        self.removal = Removal()

    def make(
        self, sources: list[Source], format: Format | None, columns: tuple[str, str], supplied: Given | None
    ) -> Path:
        """Run all steps, and return the folder of the complete corpus."""
        formats = self.with_lines([format] * len(sources) if format else self.detect(sources), sources)
        for source, source_format in zip(sources, formats, strict=True):
            if format is None:
                say(f"{source.path}: {source_format.name}")
        sources = with_sites(sources, formats, self.sites)
        notes = list(dict.fromkeys(source_format.lost for source_format in formats if source_format.lost))
        sources, files, warnings = self.read_parts(sources, formats, columns)
        buckets, words = self.balance(sources, files)
        format_names = {source_format.name for source_format in formats}
        warnings += canonical.warnings(format_names, self.split_users, self.split_records)
        warnings += supplied.warnings if supplied else []
        for line in (*notes, *warnings):
            say(line)
        warnings += self.removal.warnings  # said by `read_parts`
        vocabulary = supplied.vocabulary if supplied else self.count(sources, buckets, words)
        made = self.pieces.folder / MADE
        with suppress(FileNotFoundError):  # it was being written from these very pieces when an earlier call was killed
            shutil.rmtree(made)
        made.mkdir()
        with CorpusWriter(made, vocabulary, self.layout, self.hparams.splits) as writer:
            oov_words = self.write(writer, vocabulary, buckets)
            train = writer.splits["train"]
            words_per_user = self.hparams.words_per_user if self.hparams.by == "words" else None
            balanced = canonical.balanced_warnings(
                format_names, words_per_user, self.split_users, train.users, train.records
            )
            for line in balanced:
                say(line)
            warnings += balanced
            writer.finish(
                dropped=dict(self.dropped),
                sources=[
                    {
                        "name": source.path.name,
                        "format": source_format.name,
                        **({} if source.site is None else {"site": source.site}),
                        **(source.digest or {}),
                        **source_format.about,
                    }
                    for source, source_format in zip(sources, formats, strict=True)
                ],
                parameters={
                    **self.hparams.described,
                    "read": dict(self.read),
                    "oov_words": oov_words,
                    "vocabulary_from": supplied and supplied.parameter,
                },
                warnings=[_without_folders(warning, sources, supplied) for warning in warnings],
                notes=notes,
            )
        return made

    def detect(self, sources: list[Source]) -> list[Format]:
        """Return the formats of the sources."""
        names: dict[int, str] = {}
        tasks = [
            Task(str(source.path), detect, (source.data, source.path), SILENCE if is_fragile(source.data) else None)
            for source in sources
        ]
        with blaming_changes(sources):
            self.pool.run(tasks, names.__setitem__)
        return [FORMATS[names[index]] for index in range(len(sources))]

    def with_lines(self, formats: list[Format], sources: list[Source]) -> list[Format]:
        """Return the formats with the lines per author that were asked for in those of plain text.

        Raises:
            InputError: lines per author were asked for, and no source is plain text.
        """
        if self.text is None:
            return formats
        if all(format.name != self.text.name for format in formats):
            raise InputError(
                f"{names_of(sources)}: --lines-per-author is for plain text, and this is {formats[0].name}; leave it "
                "out, or give --format text"
            )
        return [self.text if format.name == self.text.name else format for format in formats]

    @property
    def layout(self) -> Layout:
        return Layout(self.hparams.vocabulary_size, self.hparams.record_words, self.hparams.layout)

    def read_parts(
        self, sources: list[Source], formats: list[Format], columns: tuple[str, str]
    ) -> tuple[list[Source], list[Path], list[str]]:
        """Run step 1, and return the sources with their digests, the files of sentences in order, and warnings."""
        sources = hashed(sources, self.pieces, self.pool)
        refuse_twice(sources)
        with blaming_changes(sources):
            files, warnings = self._read(sources, formats, columns)
            if not files:
                why = f"no text of any user in {self.read['posts']:,} posts{self.removal.reason}"
                raise InputError(f"{names_of(sources)}: {why}")
            if self.removal.removed:
                say(self.removal.line)  # before any error about what is left
        return sources, files, warnings

    def _read(
        self, sources: list[Source], formats: list[Format], columns: tuple[str, str]
    ) -> tuple[list[Path], list[str]]:
        """Read all parts, and return the files of sentences in order, and warnings."""
        described: dict[int, tuple[list[Part], list[str]]] = {}
        options = [Reading(self.hparams.ascii, source.site, self.delimiter) for source in sources]
        self.pool.run(
            [
                Task(
                    f"{source.path}",
                    parts_of,
                    (source_format, source.data, source.path, columns, reading),
                    _silence(source_format),
                )
                for source, source_format, reading in zip(sources, formats, options, strict=True)
            ],
            described.__setitem__,
        )
        tasks = {}
        for index, (source, source_format) in enumerate(zip(sources, formats, strict=True)):
            parts = described[index][0]
            for number, part in enumerate(parts):
                name = f"part-{index}-{number}"
                label = f"{source.path}: part {number + 1} of {len(parts)}"
                tasks[name] = Task(
                    label,
                    read_part,
                    (source_format, part, self.pieces.folder / name, PIECE, self.hparams.by, self.hparams.drop_authors),
                    _silence(source_format),
                )
        results = self.pieces.run(
            self.pool, "reading", tasks, "sentences", lambda result: result["read"].get("records", 0)
        )
        warnings = [warning for index in sorted(described) for warning in described[index][1]]
        files = []
        absent = set(self.hparams.drop_authors).difference(*(result["dropped_authors"] for result in results))
        warnings += [f"--drop-authors: no post of {name!r}" for name in sorted(absent)]
        for name, result in zip(tasks, results, strict=True):
            self.read.update(result["read"])
            self.dropped.update(result["dropped"])
            self.split_records.update(result["splits"])
            self.removal.add(result["characters"], result["removed"])
            files += [self.pieces.folder / f"{name}.{number}" for number in range(result["files"])]
        return files, warnings

    def balance(self, sources: list[Source], files: list[Path]) -> tuple[list[Path], int]:
        """Run step 2, and return the buckets in order and the sum of their numbers of words.

        A word in several buckets is counted several times. Sources are hashed again meanwhile, now that all of them
        were read.
        """
        (size,) = cuts(files, 1)[:, 1:].sum(axis=0).tolist()
        count = 1 + size // BUCKET
        bounds = cuts(files, count)
        tasks = {}
        for index in range(count):
            if ranges := ranges_of(files, bounds, index):
                name = f"bucket-{index}"
                label = f"authors, range {index + 1} of {count}"
                tasks[name] = Task(label, balance_bucket, (ranges, self.pieces.folder / name, self.hparams))
        authors: Counter[str] = Counter()
        longest = (0, "")
        words = 0
        again = checks(sources)
        results = self.pieces.run(
            self.pool,
            "balancing",
            {**again, **tasks},
            "authors",
            lambda result: result.get("read", {}).get("users", 0),
            dict.fromkeys(again, 0) | dict.fromkeys(tasks, 1),
        )
        for result in results[len(again) :]:
            self.read.update(result["read"])
            self.dropped.update(result["dropped"])
            self.split_users.update(result["read_users"])
            authors.update(result["authors"])
            longest = max(longest, tuple(result["longest"]))
            words += result["words"]
        by_length = lengths.summed(result["by_length"] for result in results[len(again) :])
        self._refuse_too_few(sources, authors, longest, by_length)
        self._advise(authors, results[len(again) :], by_length)
        return [self.pieces.folder / name for name in tasks], words

    def _refuse_too_few(
        self, sources: list[Source], authors: Counter[str], longest: tuple[int, str], by_length: lengths.Counts
    ) -> None:
        if not authors:
            words, name = longest
            if not words:
                why = f"no words of any user are left, only punctuation{self.removal.reason}"
                raise InputError(f"{names_of(sources)}: {why}")
            asked = self.hparams.words_per_user or 1
            shorter = lengths.suggestion(by_length, asked) or f"--words-per-user {words}"
            raise InputError(
                f"{names_of(sources)}: no user has {asked:,} {self.hparams.by}; the longest, "
                f"{name!r}, has {words:,}: import more text, or give {shorter}"
            )
        if not authors["train"]:
            raise InputError(
                f"{names_of(sources)}: no train users, since heldout and test took all of the {authors.total()} long "
                "enough; give a smaller --heldout or --test, or another --seed, or a source of train users too"
            )

    def _advise(self, authors: Counter[str], results: list[dict[str, Any]], by_length: lengths.Counts) -> None:
        """Print which shorter users there could be, if there are few."""
        shares = {"heldout": self.hparams.heldout, "test": self.hparams.test}
        missing = [split for split, share in shares.items() if share and not authors[split]]
        users = sum(result["users"] for result in results)
        if shorter := lengths.advice(by_length, users, self.hparams, missing):
            say(shorter)

    def count(self, sources: list[Source], buckets: list[Path], words: int) -> Vocabulary:
        """Run step 3, and return the vocabulary."""
        files = [bucket.with_name(f"{bucket.name}.words") for bucket in buckets]
        count = 1 + words // COUNTED
        bounds = cuts(files, count)
        tasks = {
            f"words-{index}": Task(
                f"words, range {index + 1} of {count}",
                count_words,
                (ranges_of(files, bounds, index), self.layout.words),
            )
            for index in range(count)
        }
        counted = merge(self.pieces.run(self.pool, "counting words", tasks), self.layout.words)
        if self.fit_vocabulary and 0 < len(counted) < self.layout.words:
            say(words_short(len(counted), self.hparams))
            self.hparams = replace(self.hparams, vocabulary_size=len(counted) + SPECIAL_TOKENS)
        try:
            return Vocabulary.most_frequent(counted, self.hparams.vocabulary_size, self.hparams.layout, self.hparams.by)
        except InputError as error:
            raise InputError(f"{names_of(sources)}: {error}") from error

    def write(self, writer: CorpusWriter, vocabulary: Vocabulary, buckets: list[Path]) -> dict[str, int]:
        """Run step 4, and return the number of words outside the vocabulary, by split."""
        oov = writer.layout.oov
        ids = {word.encode(): id for word, id in vocabulary.ids.items() if word != OOV_WORD}
        oov_words = dict.fromkeys(writer.splits, 0)
        for bucket in tracked("writing users", buckets):
            words = words_of(bucket.with_name(f"{bucket.name}.words"))
            table = np.fromiter((ids.get(word, oov) for word in words), writer.layout.token_type, len(words))
            for split, users in users_of(bucket).items():
                tokens = table[users.tokens]
                oov_words[split] += int(np.count_nonzero(tokens == oov))
                writer.splits[split].extend(users.names, tokens, users.record_words, users.user_records)
        return oov_words
