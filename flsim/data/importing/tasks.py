"""Import of dumps as a corpus of balanced users: in parallel, in bounded memory, and resumable after a kill.

1. Parts of the decompressed files are read independently, and sentences are written to disk by author.
2. For each range of authors, those with few words are dropped, and the others are cut into balanced users. Sentences
   are cut at `record_words` words, and the words of train users are counted.
3. For each range of words, counts are summed. The most frequent words of all ranges are the vocabulary.
4. The users of all splits are written, one range at a time, with the vocabulary's token ids.

The result of each piece of steps 1 and 2, and of step 3 with a tokenizer, stays in a scratch folder until the corpus is
complete. The corpus is a function of the sources and the parameters only, byte for byte. Users are in the order of
their authors' hashes, so the order of sources only matters for authors who are in several of them.
"""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flsim.base.errors import InputError, as_list, at_least_one
from flsim.base.machine import cores
from flsim.base.pool import Pool, Report, Task
from flsim.base.progress import say, tracked
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.formats import posts
from flsim.data.formats.known import format_named, format_of
from flsim.data.formats.posts import OOV_WORD, Format, Part, Reading, unpacked_name
from flsim.data.formats.rows import CSV, TEXT, read_word_count, text_format
from flsim.data.formats.stackexchange import STACKEXCHANGE, site_of
from flsim.data.importing import gather
from flsim.data.importing.scratch import (
    MADE,
    Pieces,
    cuts,
    hash_of,
    lines_of,
    ranges_of,
    read_lines,
    scratch,
    write_lines,
)
from flsim.data.importing.sources import (
    Source,
    blaming_changes,
    changed,
    check,
    hashed,
    is_compressed,
    names_of,
    open_sources,
    refuse_twice,
    unpack_sources,
)
from flsim.data.manifest import SCHEMA
from flsim.data.records import SPECIAL_TOKENS, TOKENIZER, By, Layout, Vocabulary
from flsim.data.tokenizer import SMALLEST, Tokenizer, TokenVocabulary

# Step 1 of an import: a part of a source becomes files of lines, with one line for the texts of an author in this part.
#
# A line is JSON of the author's split (if the source states it) and name, then the sentences, separated by tabs,
# which neither JSON nor a word contains. Lines are in the order of the sha256 of names.

ALIVE = 100  # posts between two progress reports
# these units are counted among the posts
REASONS_OF_READ_ROWS = ("posts_without_words", "rows_with_forbidden_characters")


def parts_of(
    _report: Report, format: Format, data: Path, source: Path, columns: tuple[str, str], reading: Reading
) -> list[Part]:
    return [replace(part, reading=reading) for part in format.parts(data, source, columns)]


def read_part(
    report: Report,
    format: Format,
    part: Part,
    stem: Path,
    piece: int,
    by: By,
    drop_authors: Collection[str] = (),
    words_per_user: int | None = None,
) -> dict[str, Any]:
    """Read a part of a source, and write its sentences by author, by tokens as passages, to `stem`.0, .1, and so on.

    A file has `piece` characters of sentences, which only its last post may exceed. Returns ``files``, their number;
    ``read`` and ``dropped``, counts by unit or reason.
    """
    authors: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)
    dropped: Counter[str] = Counter()
    posts = records = words = files = pending = 0
    for post in format.read(part, dropped):
        if not post.user.strip():
            dropped["posts_without_user"] += 1
            continue
        if post.user in drop_authors:
            dropped["posts_of_dropped_authors"] += 1
            continue
        posts += 1
        if posts % ALIVE == 0:
            report(0)
        dropped["posts_without_words"] += not post.sentences
        if not post.sentences:
            continue
        sentences = post.sentences
        if by == "tokens":  # an answer to a prompt is one passage of any length
            most = words_per_user if post.prompt is None else None
            cut = (passage for text in sentences for passage in gather.passages(text, most))
            sentences = [gather.entry_of(words_of_part, text, post.prompt) for words_of_part, text in cut]
        authors[post.split, post.user] += sentences
        records += len(sentences)
        pending += sum(map(len, sentences))
        if pending > piece:
            words += _write(stem.with_name(f"{stem.name}.{files}"), authors, by)
            files, pending = files + 1, 0
            authors.clear()
    if authors:
        words += _write(stem.with_name(f"{stem.name}.{files}"), authors, by)
        files += 1
    read = Counter(posts=posts, records=records, words=words)
    for reason, count in dropped.items():
        read[reason.split("_")[0]] += count * (reason not in REASONS_OF_READ_ROWS)
    return {"files": files, "read": read, "dropped": dropped}


def _write(path: Path, authors: dict[tuple[str | None, str], list[str]], by: By) -> int:
    ordered = sorted((hash_of(name), split or "", name) for split, name in authors)
    hashes, lines = [], []
    words = 0
    for author_hash, split, name in ordered:
        sentences = authors.pop((split or None, name))
        text = "\t".join(sentences)
        breaks = text.count("\t")
        if by == "tokens":
            words += sum(map(gather.words_in, sentences))
        else:
            words += len(text) - breaks if by == "characters" else text.count(" ") + breaks + 1
        hashes.append(author_hash)
        lines.append(f"{json.dumps([split, name])}\t{text}\n".encode())
    write_lines(path, hashes, lines)
    return words


def refuse_equal_names(sources: Sequence[Source], formats: Sequence[Format]) -> None:
    """Raise InputError for two sources of one site or text file, a part of author names, whose authors would merge."""
    first: dict[tuple[str, str], Path] = {}
    for source, format in zip(sources, formats, strict=True):
        if format.name not in (STACKEXCHANGE.name, TEXT.name):
            continue
        name = site_of(source.path) if format.name == STACKEXCHANGE.name else unpacked_name(source.path)
        key = (format.name, name)
        if key in first:
            raise InputError(
                f"{source.path}: has the same name {name!r} as {first[key]}, so two authors would become one author; "
                "rename one of the files"
            )
        first[key] = source.path


# Step 3 of an import: the words of buckets become the vocabulary.


def count_words(files: Sequence[Path], words: int, most: int) -> dict[str, int]:
    """Return the most frequent words of train users in files of ``word<TAB>count``; ties are in alphabetical order.

    Words are counted in ranges of hashes, so memory does not grow with `words`, the sum of the numbers of lines.
    """
    ranges = 1 + words // COUNTED
    bounds = cuts(files, ranges)
    ranked: list[tuple[str, int]] = []
    for index in tracked("counting words", range(ranges)):
        counts: defaultdict[bytes, int] = defaultdict(int)
        for line in read_lines(ranges_of(files, bounds, index)):
            word, _, count = line.partition(b"\t")
            counts[word] += int(count)
        ranked += ((word.decode(), count) for word, count in counts.items() if count and word != OOV_WORD.encode())
        ranked = sorted(ranked, key=lambda item: (-item[1], item[0]))[:most]
    return dict(ranked)


# The steps of an import: their tasks and their counts.

PIECE = 2**24  # characters of sentences in a file of step 1
BUCKET = 2**23  # bytes of sentences for a task of step 2
COUNTED = 2**20  # words of buckets in a range of step 3
SILENCE = 300.0  # seconds without progress after which a fragile reader is killed


def _silence(format: Format) -> float | None:
    return SILENCE if format.fragile else None


def words_short(words: int, hparams: gather.ImportHParams) -> str:
    """Return the line about a vocabulary that is smaller than the default one, with the equivalent --vocabulary."""
    return (
        f"vocabulary: the text has only {words:,} different {hparams.by}, so all are used (--vocabulary "
        f"{words + SPECIAL_TOKENS} instead of {hparams.vocabulary_size})"
    )


WITH_PROMPTS = ("jsonl", "json", "csv", "parquet")


@dataclass
class ImportSteps:
    """The steps of one import, and their counts."""

    pieces: Pieces
    pool: Pool
    hparams: gather.ImportHParams
    fit_vocabulary: bool = False
    text: Format | None = None  # replaces the format text if lines per author are set
    delimiter: str | None = None
    cutting: gather.Cutting | None = None
    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def make(
        self,
        sources: list[Source],
        format: Format | None,
        columns: tuple[str, str],
        supplied: Vocabulary | None,
        word_file: dict[str, str] | None,
    ) -> Path:
        with blaming_changes(sources):
            formats = [format or format_of(source.data, source.path) for source in sources]
        formats = self.with_lines(formats, sources)
        for source, source_format in zip(sources, formats, strict=True):
            if format is None:
                say(f"{source.path}: {source_format.name}")
            if self.prompt_column is not None and source_format.name not in WITH_PROMPTS:
                raise InputError(
                    f"{source.path}: --prompt-column is for {', '.join(WITH_PROMPTS)}, and this is "
                    f"{source_format.name}; remove it"
                )
        refuse_equal_names(sources, formats)
        sources, files = self.read_parts(sources, formats, columns)
        buckets, words = self.balance(sources, files)
        vocabulary = supplied or self.count(sources, buckets, words)
        made = self.pieces.folder / MADE
        with suppress(FileNotFoundError):  # an earlier call was killed while it wrote the corpus from these pieces
            shutil.rmtree(made)
        made.mkdir()
        layout = vocabulary.map.layout if isinstance(vocabulary, TokenVocabulary) else self.layout
        with CorpusWriter(made, vocabulary, layout, self.hparams.splits) as writer:
            oov_words = self.write(writer, vocabulary, buckets)
            writer.finish(
                dropped=dict(self.dropped),
                sources=[
                    {
                        "name": source.path.name,
                        "format": source_format.name,
                        **(source.digest or {}),
                        **source_format.about,
                    }
                    for source, source_format in zip(sources, formats, strict=True)
                ],
                parameters={
                    **self.hparams.described,
                    "read": dict(self.read),
                    "oov_words": oov_words,
                    "vocabulary_from": word_file,
                    **(self.cutting.described if self.cutting else {}),
                },
            )
        return made

    @property
    def prompt_column(self) -> str | None:
        return self.cutting.prompt_column if self.cutting else None

    def with_lines(self, formats: list[Format], sources: list[Source]) -> list[Format]:
        """Return the formats with the requested lines per author; InputError for an option without a source for it."""
        for option, value, name in (
            ("--delimiter", self.delimiter, CSV.name),
            ("--lines-per-author", self.text, TEXT.name),
        ):
            if value is not None and all(format.name != name for format in formats):
                raise InputError(
                    f"{names_of(sources)}: {option} is for {name}, and this is {formats[0].name}; remove {option}, or "
                    f"set --format {name}"
                )
        return [self.text if self.text and format.name == TEXT.name else format for format in formats]

    @property
    def layout(self) -> Layout:
        return Layout(self.hparams.vocabulary_size, self.hparams.record_words, self.hparams.layout)

    def read_parts(
        self, sources: list[Source], formats: list[Format], columns: tuple[str, str]
    ) -> tuple[list[Source], list[Path]]:
        """Run step 1, and return the sources with their digests, and the files of sentences in order."""
        sources = hashed(sources, self.pieces, self.pool)
        refuse_twice(sources)
        with blaming_changes(sources):
            files = self._read(sources, formats, columns)
            if not files:
                drops = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in self.dropped.items() if count]
                why = f" ({', '.join(drops)})" if drops else ""
                raise InputError(f"{names_of(sources)}: no text of any user in {self.read['posts']:,} posts{why}")
        return sources, files

    def _read(self, sources: list[Source], formats: list[Format], columns: tuple[str, str]) -> list[Path]:
        described: dict[int, list[Part]] = {}
        whole = self.cutting is not None, self.prompt_column
        reading = Reading(self.hparams.ascii, self.delimiter, *whole)
        self.pool.run(
            [
                Task(
                    f"{source.path}",
                    parts_of,
                    (source_format, source.data, source.path, columns, reading),
                    _silence(source_format),
                )
                for source, source_format in zip(sources, formats, strict=True)
            ],
            described.__setitem__,
        )
        tasks = {}
        for index, (source, source_format) in enumerate(zip(sources, formats, strict=True)):
            parts = described[index]
            for number, part in enumerate(parts):
                name = f"part-{index}-{number}"
                label = f"{source.path}: part {number + 1} of {len(parts)}"
                tasks[name] = Task(
                    label,
                    read_part,
                    (
                        *(source_format, part, self.pieces.folder / name, PIECE),
                        *(self.hparams.by, self.hparams.drop_authors, self.hparams.words_per_user),
                    ),
                    _silence(source_format),
                )
        results = self.pieces.run(self.pool, "reading", tasks)
        files = []
        for name, result in zip(tasks, results, strict=True):
            self.read.update(result["read"])
            self.dropped.update(result["dropped"])
            files += [self.pieces.folder / f"{name}.{number}" for number in range(result["files"])]
        return files

    def balance(self, sources: list[Source], files: list[Path]) -> tuple[list[Path], int]:
        """Run step 2, and hash sources again; return the buckets in order and the sum of their numbers of words."""
        (size,) = cuts(files, 1)[:, 1:].sum(axis=0).tolist()
        count = 1 + size // BUCKET
        bounds = cuts(files, count)
        tasks = {}
        for index in range(count):
            if ranges := ranges_of(files, bounds, index):
                name = f"bucket-{index}"
                label = f"authors, range {index + 1} of {count}"
                tasks[name] = Task(label, gather.balance_bucket, (ranges, self.pieces.folder / name, self.hparams))
        authors: Counter[str] = Counter()
        longest = (0, "")
        words = 0
        checks = {f"check-{index}": Task(str(of.path), check, (of,)) for index, of in enumerate(sources)}
        self.pieces.run(self.pool, "checking sources", checks)
        results = self.pieces.run(self.pool, "balancing", tasks)
        for result in results:
            self.read.update(result["read"])
            self.dropped.update(result["dropped"])
            authors.update(result["authors"])
            longest = max(longest, tuple(result["longest"]))
            words += result["words"]
        self._refuse_too_few(sources, authors, longest)
        return [self.pieces.folder / name for name in tasks], words

    def _refuse_too_few(self, sources: list[Source], authors: Counter[str], longest: tuple[int, str]) -> None:
        if not authors:
            words, name = longest
            if not words:
                raise InputError(f"{names_of(sources)}: no user has words, only punctuation")
            asked = self.hparams.words_per_user or 1
            raise InputError(
                f"{names_of(sources)}: no user has {asked:,} {self.hparams.counted}; the longest, "
                f"{name!r}, has {words:,}: import more text, or give --words-per-user {words} or less"
            )
        if not authors["train"]:
            raise InputError(
                f"{names_of(sources)}: no train users, because heldout and test have all {authors.total()} "
                "authors that are long enough; set a smaller --heldout or --test or another --seed, or add a "
                "source of train users"
            )

    def count(self, sources: list[Source], buckets: list[Path], words: int) -> Vocabulary:
        """Run step 3, and return the vocabulary."""
        if self.cutting:
            try:
                return gather.encode(self.pieces, self.pool, buckets, self.hparams, self.cutting)
            except InputError as error:
                raise InputError(f"{names_of(sources)}: {error}") from error
        files = [bucket.with_name(f"{bucket.name}.words") for bucket in buckets]
        counted = count_words(files, words, self.layout.words)
        if self.fit_vocabulary and 0 < len(counted) < self.layout.words:
            say(words_short(len(counted), self.hparams))
            self.hparams = replace(self.hparams, vocabulary_size=len(counted) + SPECIAL_TOKENS)
        try:
            return Vocabulary.most_frequent(counted, self.hparams.vocabulary_size, self.hparams.layout, self.hparams.by)
        except InputError as error:
            raise InputError(f"{names_of(sources)}: {error}") from error

    def write(self, writer: CorpusWriter, vocabulary: Vocabulary, buckets: list[Path]) -> dict[str, int]:
        """Run step 4, and return the number of words outside the vocabulary, by split."""
        if isinstance(vocabulary, TokenVocabulary):
            return gather.write_users(writer, vocabulary.map, buckets, self.dropped)
        oov = writer.layout.oov
        ids = {word.encode(): id for word, id in vocabulary.ids.items() if word != OOV_WORD}
        oov_words = dict.fromkeys(writer.splits, 0)
        for bucket in tracked("writing users", buckets):
            words = [line.partition(b"\t")[0] for line in lines_of(bucket.with_name(f"{bucket.name}.words"))]
            table = np.fromiter((ids.get(word, oov) for word in words), writer.layout.token_type, len(words))
            for split, users in gather.users_of(bucket).items():
                tokens = table[users.tokens]
                oov_words[split] += int(np.count_nonzero(tokens == oov))
                writer.splits[split].extend(users.names, tokens, users.record_words, users.user_records)
        return oov_words


# The import, from the sources to the corpus.

VERSION = 5  # version of pieces; pieces of other versions are ignored
SMALL = 2**23  # bytes of sources up to which one process is faster
MOST_WORKERS = 12  # all workers together need less than 2 GB
UNPACKED = 8  # bytes of a task, approximately, for compressed sources


def import_corpus(
    sources: Iterable[Path | str],
    out: Path | str,
    hparams: gather.ImportHParams,
    format: str | Format | None = None,
    *,
    vocabulary_from: Path | str | None = None,
    columns: tuple[str, str] = ("user", "text"),
    workers: int | None = None,
    fit_vocabulary: bool = False,
    lines_per_author: int | None = None,
    delimiter: str | None = None,
    tokenizer: Path | str | None = None,
    prompt_column: str | None = None,
) -> Corpus:
    """Import sources as one corpus; users that occur in several sources are one user.

    An import that is interrupted by a kill, a full disk or Ctrl-C leaves a folder ``.NAME.importing`` next to `out`.
    The same call continues the import.

    Args:
        sources: files, read in this order; compressed files are decompressed first.
        out: folder of the new corpus; it must not exist, and is not created if there is an error.
        format: format of all sources: a format, a key of `FORMATS`, or ``path/to/file.py:NAME`` of a custom reader; by
            default detected from each file's content.
        vocabulary_from: a file of words with counts to take the vocabulary from, instead of counting.
        columns: names of the columns of user and text, for formats that name them.
        workers: number of processes; by default one per core up to `MOST_WORKERS`, or only this process for small
            sources.
        fit_vocabulary: whether a corpus or a file with too few different words gets a vocabulary of all its words,
            instead of an error.
        lines_per_author: number of consecutive lines of plain text that count as an author; by default 200.
        delimiter: the character between two fields of CSV; by default a tab in ``.tsv`` files, and a comma in others.
        tokenizer: folder of a tokenizer that cuts the text, with tokenizer.json, if `hparams` are by tokens; by default
            a tokenizer is trained. The number of its tokens replaces `vocabulary_size`.
        prompt_column: name of the column of prompts, for formats with columns and corpora by tokens. The texts are then
            answers, and models are trained to write only the answers.

    Returns:
        The new corpus.

    Raises:
        InputError: a source cannot be read as its format; no author has enough words; there are no train users; there
            are fewer different words than the vocabulary needs; a vocabulary of words is named for a corpus by
            characters or tokens; a tokenizer or prompts are named for another corpus; a tokenizer cannot be used;
            `lines_per_author` is less than 1 or no source is plain text; `delimiter` is not one character; two sources
            have the same name; or `out` exists or is being imported to.
        RunFailed: the disk is full.

    Examples:
        >>> settings = flsim.ImportSettings(vocabulary_size=5_000)             # doctest: +SKIP
        >>> flsim.import_corpus([Path("ai.Posts.xml")], Path("corpora/ai"), settings)              # doctest: +SKIP
    """
    if workers is not None:
        at_least_one(workers=workers)
    paths, out = [Path(source) for source in as_list("sources", sources)], Path(out)
    tokenizer = None if tokenizer is None else Path(tokenizer)
    vocabulary_from = None if vocabulary_from is None else Path(vocabulary_from)
    text = None if lines_per_author is None else text_format(lines_per_author)
    if vocabulary_from is not None and hparams.by != "words":
        raise InputError(
            f"{vocabulary_from}: this file counts words, but the corpus is by {hparams.by}; remove --vocabulary-from"
        )
    if hparams.by != "tokens" and (tokenizer is not None or prompt_column is not None):
        what = "a tokenizer" if tokenizer is not None else f"the column of prompts {prompt_column!r}"
        raise InputError(f"{what} needs a corpus by tokens, but this one is by {hparams.by}; set --train-tokenizer")
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise InputError(f"delimiter must be one character, and not a quote or line feed, found {delimiter!r:.40}")
    if isinstance(format, str):
        format = format_named(format)
    opened = open_sources(paths)
    vocabulary, word_file = None, None
    if vocabulary_from is not None:
        read, sha256 = read_word_count(vocabulary_from, hparams.vocabulary_size, fit_vocabulary)
        vocabulary, word_file = replace(read, layout=hparams.layout), {"name": vocabulary_from.name, "sha256": sha256}
        if (words := len(read.words)) + SPECIAL_TOKENS < hparams.vocabulary_size:
            say(words_short(words, hparams))
            hparams = replace(hparams, vocabulary_size=words + SPECIAL_TOKENS)
    cutting = None
    if hparams.by == "tokens":
        cutting = gather.Cutting(Tokenizer(tokenizer) if tokenizer else None, prompt_column)
        hparams = _sized(hparams, cutting.tokenizer)
    cuts = cutting.described if cutting else {}
    plan = {
        "version": [VERSION, SCHEMA, PIECE, BUCKET, posts.PART_BYTES, posts.PART_RECORDS],
        "sources": [source.identity for source in opened],
        "parameters": hparams.described,
        "format": format and ([format.name, dict(format.about)] if format.about else format.name),
        "columns": columns,
        "delimiter": delimiter,
        "lines_per_author": lines_per_author,
        "vocabulary_from": word_file,
        **cuts,
    }
    with scratch(out, plan) as pieces:
        size = sum(of.data.stat().st_size * (UNPACKED if is_compressed(of.data) else 1) for of in opened)
        default = min(cores(), MOST_WORKERS) if size > SMALL else 1
        with Pool(workers or default) as pool:
            steps = ImportSteps(pieces, pool, hparams, fit_vocabulary, text, delimiter, cutting)
            made = steps.make(unpack_sources(opened, pieces, pool), format, columns, vocabulary, word_file)
        for source in opened:
            source.refuse_if_changed()
        if tokenizer is not None and cutting and cutting.described != cuts:
            raise changed(tokenizer)
        pieces.finish(made)
    return Corpus.open(out)


def _sized(hparams: gather.ImportHParams, tokenizer: Tokenizer | None) -> gather.ImportHParams:
    """Return the settings of a corpus by tokens with the number of its ids, or raise InputError if it is too small."""
    if tokenizer is not None:
        tokenizer.refuse_unusable()
        layout, _ = tokenizer.table(np.zeros(tokenizer.rows, np.int64))
        return replace(hparams, vocabulary_size=layout.vocabulary_size, layout=TOKENIZER)
    if hparams.vocabulary_size < SMALLEST:
        raise InputError(
            f"a tokenizer of {hparams.vocabulary_size:,} tokens cannot be trained: 260 are special or bytes; give "
            f"--train-tokenizer {SMALLEST} or more"
        )
    return replace(hparams, layout=TOKENIZER)
