"""From dumps to a corpus of balanced users, in three passes and bounded memory.

1. Every source is streamed once: posts become sentences, which go to disk by author.
2. A bucket of authors at a time: the short ones are dropped, the others cut into balanced users, their sentences cut at
   `record_words` words, and the words of train users counted.
3. A bucket at a time: the same again, encoded and written.

Memory is a bucket (about 1/1000 of a 100 GB dump) and the counts of different words. The corpus is a function of the
sources and the parameters, byte for byte; users are in the order of their authors' hashes, so the order of sources only
matters for authors who are in several of them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from flsim.data.balance import Author, Tally, balanced, count_tokens, split_of
from flsim.data.corpus import SPLITS, Corpus, CorpusWriter
from flsim.data.formats import reader_of
from flsim.data.posts import Post, Reader, Source
from flsim.data.records import Records
from flsim.data.spill import Spill
from flsim.data.text import sentences
from flsim.data.vocabulary import Layout, Vocabulary
from flsim.errors import InputError, at_least_one
from flsim.files import new_folder
from flsim.progress import progress

BUCKET = 2**25  # bytes of input for each bucket
MOST_BUCKETS = 1024


@dataclass(frozen=True)
class ImportHParams:
    """How a corpus is made of posts; the defaults are those of Thakkar et al. (2020).

    Attributes:
        vocabulary_size: token ids, the four special ones included.
        record_words: a record is a sentence cut at this many words.
        words_per_user: authors who wrote fewer words are dropped; the others are cut into users who wrote at least so
            many. Punctuation is not counted, and sentences are counted whole.
        heldout: expected share of authors kept out of training, for attacks that need texts of non-members.
        test: expected share of authors kept out of training, to measure utility.
        seed: decides which authors are kept out.
    """

    vocabulary_size: int = 10_000
    record_words: int = 20
    words_per_user: int = 2_000
    heldout: float = 0.1
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        Layout(self.vocabulary_size, self.record_words)
        at_least_one(words_per_user=self.words_per_user)
        for name in ("heldout", "test"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be a share of authors from 0 up to 1, found {getattr(self, name)}")
        if self.heldout + self.test >= 1:
            raise InputError(
                f"heldout + test must be less than 1, or nobody is left to train on, found {self.heldout + self.test}"
            )


def import_corpus(
    sources: Sequence[Path],
    out: Path,
    hparams: ImportHParams,
    format: str | None = None,
) -> Corpus:
    """Import sources as one corpus; users that occur in several of them are one user.

    Args:
        sources: files, read in this order.
        out: folder of the new corpus; absent, and absent again after any error.
        hparams: how.
        format: ``"stackexchange"`` or ``"jsonl"`` for all sources; told from each file's content if None.

    Raises:
        InputError: a source that cannot be read as its format; no author of enough words; no train users; fewer
            different words than the vocabulary is to have; `out` exists.
    """
    tally = Tally()
    if not sources:
        raise InputError("no sources: name at least one file to import")
    with ExitStack() as stack:
        opened = [stack.enter_context(Source(path)) for path in sources]
        readers = [reader_of(source, format) for source in opened]
        with new_folder(out) as folder:
            spill = Spill(folder / "spill", _buckets(opened))
            _read(opened, readers, spill, tally)
            vocabulary = _count(opened, spill, hparams, tally)
            layout = Layout(hparams.vocabulary_size, hparams.record_words)
            with CorpusWriter(folder, vocabulary, layout) as writer:
                oov_words = _write(writer, vocabulary, spill, hparams)
                spill.remove()
                writer.finish(
                    dropped=dict(tally.dropped),
                    sources=[source.described() for source in opened],
                    parameters={**asdict(hparams), "read": dict(tally.read), "oov_words": oov_words},
                )
    return Corpus.open(out)


def _buckets(sources: Sequence[Source]) -> int:
    """As few as keep a bucket small; as many as there may be where a pipe does not say how long it is."""
    if not all(source.size for source in sources):
        return MOST_BUCKETS
    return min(1 + sum(source.size for source in sources) // BUCKET, MOST_BUCKETS)


def _read(
    sources: Sequence[Source],
    readers: Sequence[Reader],
    spill: Spill,
    tally: Tally,
) -> None:
    """Pass 1: sentences of all sources to the spill, by author."""
    done = seen = 0
    size = sum(source.size for source in sources)
    with progress("reading", size) as advance:
        for source, reader in zip(sources, readers, strict=True):
            dropped: Counter[str] = Counter()
            for post in reader(source, dropped):
                tally.read["posts"] += 1
                records = _records(post, tally)
                if records:
                    spill.add(post.user, records)
                if size and done + source.bytes != seen:
                    seen = done + source.bytes
                    advance(seen, source.path.name)
            done += source.bytes
            tally.read["posts"] += dropped.total()
            tally.dropped.update(dropped)
    spill.flush()
    _refuse_twice(sources)
    if not tally.read["records"]:
        raise InputError(f"{_names(sources)}: no text of any user in {tally.read['posts']:,} posts")


def _records(post: Post, tally: Tally) -> list[str]:
    """A post's sentences, each its words joined by spaces."""
    found = sentences(post.text)
    tally.read["records"] += len(found)
    tally.read["words"] += sum(map(len, found))
    tally.dropped["posts_without_words"] += not found
    return [" ".join(sentence) for sentence in found]


def _count(sources: Sequence[Source], spill: Spill, hparams: ImportHParams, tally: Tally) -> Vocabulary:
    """Pass 2: what is dropped, and the vocabulary of the train users."""
    counts: Counter[str] = Counter()
    authors: Counter[str] = Counter()
    for author, split in _authors(spill, hparams, tally, "counting words"):
        authors[split] += 1
        if split == "train":
            for records in author.users:
                counts.update(" ".join(records).split(" "))
    if not authors:
        words, name = tally.longest
        raise InputError(
            f"{_names(sources)}: no user has {hparams.words_per_user:,} words; the longest, {name!r}, has {words:,}: "
            f"import more text, or use words_per_user of at most {words}"
        )
    if not authors["train"]:
        raise InputError(
            f"{_names(sources)}: no train users, since heldout and test took all of the {authors.total()} long enough; "
            "use smaller shares, or another seed"
        )
    try:
        return Vocabulary.of(counts, hparams.vocabulary_size)
    except InputError as error:
        raise InputError(f"{_names(sources)}: {error}") from error


def _write(writer: CorpusWriter, vocabulary: Vocabulary, spill: Spill, hparams: ImportHParams) -> dict[str, int]:
    """Pass 3: the balanced users, encoded.

    Returns:
        Words outside the vocabulary, by split.
    """
    oov_words = dict.fromkeys(SPLITS, 0)
    for author, split in _authors(spill, hparams, Tally(), "writing"):
        for number, texts in enumerate(author.users):
            records = _encode(texts, vocabulary)
            oov_words[split] += int(np.count_nonzero(records.tokens == writer.layout.oov))
            writer.splits[split].add(f"{author.name}#{number}", records)
    return oov_words


def _encode(texts: list[str], vocabulary: Vocabulary) -> Records:
    """Records of texts, each its words joined by spaces."""
    lengths = [text.count(" ") + 1 for text in texts]
    tokens = vocabulary.encode(" ".join(texts).split(" "))
    return Records(np.array(tokens, np.uint16), np.cumsum([0, *lengths], dtype=np.int64))


def _authors(spill: Spill, hparams: ImportHParams, tally: Tally, title: str) -> Iterator[tuple[Author, str]]:
    """The authors who are long enough, with their splits."""
    with progress(title, len(spill)) as advance:
        for bucket in range(len(spill)):
            for author in balanced(spill.read(bucket), hparams.words_per_user, tally):
                for records in author.users:
                    written = count_tokens(records)
                    records[:] = [_truncate(record, hparams.record_words) for record in records]
                    tally.dropped["words_truncated"] += written - count_tokens(records)
                yield author, split_of(author.name, hparams.heldout, hparams.test, hparams.seed)
            advance(bucket + 1)


def _truncate(record: str, words: int) -> str:
    return " ".join(record.split(" ", words)[:words])


def _refuse_twice(sources: Sequence[Source]) -> None:
    """The same text twice would be memorized twice as well."""
    first: dict[str, Path] = {}
    for source in sources:
        digest = source.described()["sha256"]
        if source.bytes and digest in first:
            raise InputError(f"{source.path}: the same content as {first[digest]}; give it once")
        first[digest] = source.path


def _names(sources: Sequence[Source]) -> str:
    others = len(sources) - 1
    return f"{sources[0].path}{f' and {others} more' if others else ''}"
