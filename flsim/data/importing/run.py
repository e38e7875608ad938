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

from collections.abc import Iterable
from dataclasses import replace
from os import sched_getaffinity
from pathlib import Path

import numpy as np

from flsim.base.errors import InputError, as_list, at_least_one
from flsim.base.pool import Pool
from flsim.base.progress import say
from flsim.data.corpus import Corpus
from flsim.data.formats import posts
from flsim.data.formats.known import format_named
from flsim.data.formats.posts import Format
from flsim.data.formats.text import read_word_count, text_format
from flsim.data.importing import tasks
from flsim.data.importing.gather import Cutting, ImportHParams
from flsim.data.importing.scratch import scratch
from flsim.data.importing.sources import changed, is_compressed, open_sources, unpack_sources
from flsim.data.importing.tasks import Steps, SuppliedVocabulary, words_short
from flsim.data.manifest import SCHEMA
from flsim.data.tokenizer import SMALLEST, Tokenizer
from flsim.data.vocabulary import SPECIAL_TOKENS, TOKENIZER

VERSION = 5  # version of pieces; pieces of other versions are ignored
SMALL = 2**23  # bytes of sources up to which one process is faster
MOST_WORKERS = 12  # all workers together need less than 2 GB
UNPACKED = 8  # bytes of a task, approximately, for compressed sources


def import_corpus(
    sources: Iterable[Path | str],
    out: Path | str,
    hparams: ImportHParams,
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
    vocabulary = None
    if vocabulary_from is not None:
        read, sha256 = read_word_count(vocabulary_from, hparams.vocabulary_size, fit_vocabulary)
        vocabulary = SuppliedVocabulary(replace(read, layout=hparams.layout), vocabulary_from, sha256)
    if vocabulary and (size := len(vocabulary.vocabulary.words) + SPECIAL_TOKENS) < hparams.vocabulary_size:
        say(words_short(len(vocabulary.vocabulary.words), hparams))
        hparams = replace(hparams, vocabulary_size=size)
    cutting = None
    if hparams.by == "tokens":
        cutting = Cutting(Tokenizer(tokenizer) if tokenizer else None, prompt_column)
        hparams = _sized(hparams, cutting.tokenizer)
    cuts = cutting.described if cutting else {}
    plan = {
        "version": [VERSION, SCHEMA, tasks.PIECE, tasks.BUCKET, posts.PART_BYTES, posts.PART_RECORDS],
        "sources": [source.identity for source in opened],
        "parameters": hparams.described,
        "format": format and ([format.name, dict(format.about)] if format.about else format.name),
        "columns": columns,
        "delimiter": delimiter,
        "lines_per_author": lines_per_author,
        "vocabulary_from": vocabulary and vocabulary.parameter,
        **cuts,
    }
    with scratch(out, plan) as pieces:
        size = sum(of.data.stat().st_size * (UNPACKED if is_compressed(of.data) else 1) for of in opened)
        default = min(len(sched_getaffinity(0)), MOST_WORKERS) if size > SMALL else 1
        with Pool(workers or default) as pool:
            steps = Steps(pieces, pool, hparams, fit_vocabulary, text, delimiter, cutting)
            made = steps.make(unpack_sources(opened, pieces, pool), format, columns, vocabulary)
        for source in opened:
            source.refuse_if_changed()
        if tokenizer is not None and cutting and cutting.described != cuts:
            raise changed(tokenizer)
        pieces.finish(made)
    return Corpus.open(out)


def _sized(hparams: ImportHParams, tokenizer: Tokenizer | None) -> ImportHParams:
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
