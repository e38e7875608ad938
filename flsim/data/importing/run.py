"""From dumps to a corpus of balanced users: in parallel, in bounded memory, and in pieces that survive a kill.

1. Compressed files and pipes become files. Parts of them are read, each on its own: sentences go to disk by author.
2. A range of authors at a time: the short ones are dropped, the others cut into balanced users, their sentences cut at
   `record_words` words, and the words of train users counted.
3. A range of words at a time: their counts are summed, and the most frequent words of all are the vocabulary.
4. The balanced users are written, a range at a time, with the vocabulary's token ids.

Each piece of 1, 2 and 3 is a task for a pool of processes, and is kept in a scratch folder until the corpus is there.
The corpus is a function of the sources and the parameters, byte for byte, and of nothing else: not of the number of
processes, parts or ranges, nor of interruptions. Users are in the order of their authors' hashes, so the order of
sources only matters for authors who are in several of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from os import sched_getaffinity
from pathlib import Path

from flsim.base.errors import at_least_one
from flsim.base.pool import Pool
from flsim.base.progress import say
from flsim.data.corpus import Corpus
from flsim.data.formats import posts
from flsim.data.formats.known import format_named
from flsim.data.formats.posts import Format
from flsim.data.formats.wordcount import read_word_count
from flsim.data.importing import tasks
from flsim.data.importing.scratch import scratch
from flsim.data.importing.settings import ImportHParams as ImportHParams
from flsim.data.importing.sources import Source, copy_pipes, open_sources, unchanged, unpack_sources
from flsim.data.importing.tasks import Given, Steps, words_short
from flsim.data.importing.unpack import is_compressed
from flsim.data.manifest import SCHEMA

VERSION = 2  # of the pieces: what another version left is not used
SMALL = 2**23  # bytes of sources that are not worth other processes
MOST_WORKERS = 12  # together they stay below 2 GB
UNPACKED = 8  # bytes for each of a compressed source, more or less


def import_corpus(
    sources: Sequence[Path],
    out: Path,
    hparams: ImportHParams,
    format: str | Format | None = None,
    *,
    vocabulary_from: Path | None = None,
    columns: tuple[str, str] = ("user", "text"),
    workers: int | None = None,
    fit_vocabulary: bool = False,
) -> Corpus:
    """Import sources as one corpus; users that occur in several of them are one user.

    Interrupted, by a kill, a full disk or Ctrl-C, it leaves a folder ``.NAME.importing`` beside `out`, and the same
    call continues from there.

    Args:
        sources: files or pipes, read in this order; compressed ones are unpacked on the way.
        out: folder of the new corpus; absent, and absent again after any error.
        hparams: how.
        format: of all sources: a format, a key of `FORMATS`, or ``path/to/file.py:NAME`` of a user's own reader; told
            from each file's content if None.
        vocabulary_from: a file of words with counts to take the vocabulary from, instead of counting.
        columns: names of the columns of user and text, for formats that name them.
        workers: processes; if None, one for each core up to `MOST_WORKERS`, and none but this one where there is
            little to do.
        fit_vocabulary: whether a corpus, or a file of words, with fewer different words than the vocabulary is to have
            gets a vocabulary of all its words, in place of an error.

    Raises:
        InputError: a source that cannot be read as its format; no author of enough words; no train users; fewer
            different words than the vocabulary is to have; `out` exists or is being imported to.
        RunFailed: the disk is full.
    """
    if workers is not None:
        at_least_one(workers=workers)
    if isinstance(format, str):
        format = format_named(format)
    opened = open_sources(sources)
    vocabulary = None if vocabulary_from is None else _read_vocabulary(vocabulary_from, hparams, fit_vocabulary)
    if vocabulary and vocabulary.size < hparams.vocabulary_size:
        say(words_short(len(vocabulary.vocabulary.words), hparams.vocabulary_size))
        hparams = replace(hparams, vocabulary_size=vocabulary.size)
    with scratch(out) as place:
        opened = copy_pipes(opened, place.folder)
        pieces = place.plan(
            {
                "version": [
                    VERSION,
                    SCHEMA,
                    tasks.PIECE,
                    tasks.BUCKET,
                    tasks.COUNTED,
                    posts.PART_BYTES,
                    posts.PART_RECORDS,
                ],
                "sources": [source.identity for source in opened],
                "parameters": asdict(hparams),
                "format": format and ([format.name, dict(format.about)] if format.about else format.name),
                "columns": columns,
                "vocabulary_from": vocabulary and vocabulary.parameter,
            }
        )
        with Pool(workers or _workers(opened)) as pool:
            steps = Steps(pieces, pool, hparams, fit_vocabulary)
            made = steps.make(unpack_sources(opened, pieces, pool), format, columns, vocabulary)
        for source in opened:
            source.refuse_if_changed()
        pieces.finish(made)
    return Corpus.open(out)


def _read_vocabulary(path: Path, hparams: ImportHParams, fit: bool) -> Given:
    with unchanged(path) as sha256:
        vocabulary, warnings = read_word_count(path, hparams.vocabulary_size, fit)
    return Given(replace(vocabulary, layout=hparams.layout), path, sha256, warnings)


def _workers(sources: Iterable[Source]) -> int:
    """One process for each core, within limits; only this one where there is little to do."""
    size = sum(source.data.stat().st_size * (UNPACKED if is_compressed(source.data) else 1) for source in sources)
    return min(len(sched_getaffinity(0)), MOST_WORKERS) if size > SMALL else 1
