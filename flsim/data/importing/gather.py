"""Steps 2 to 4 of an import: texts of authors become balanced users, and with a tokenizer, records of tokens.

Test and held-out authors are also stored complete, one user each, in the splits `WHOLE`. Line i of the words of a
bucket is token i of its users. The settings of an import are also here.
"""

import json
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError
from flsim.base.files import new_file
from flsim.base.pool import Pool, Report, Task
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import Count, Fraction, Natural, settings
from flsim.data.corpus import CorpusWriter
from flsim.data.importing.scratch import Pieces, Range, hash_of, lines_of, read_lines, write_lines
from flsim.data.manifest import SPLITS, WHOLE
from flsim.data.records import LAYOUTS, TOKENIZER, By, Layout, spans
from flsim.data.sentences import word_ends
from flsim.data.tokenizer import Tokenizer, TokenMap, TokenVocabulary, train_tokenizer

NEW_SETTINGS: dict[str, Any] = {"by": "words", "ascii": False, "drop_authors": ()}


@settings
class ImportHParams:
    """Settings of an import; the defaults are those of Thakkar et al. (2020).

    Attributes:
        vocabulary_size: number of token ids, the four special ones included.
        record_words: a record is a sentence cut at this many words. In a corpus by tokens, a record has at most this
            many tokens of a text, and a longer text becomes several records.
        words_per_user: authors who wrote fewer words are dropped. The others are cut into users who wrote at least this
            many. Punctuation is not counted, and sentences are counted before they are cut. In a corpus by tokens,
            words are counted too, so users do not depend on the tokenizer. None keeps authors complete; otherwise test
            and held-out authors are also stored complete, in separate splits.
        heldout: expected share of authors kept out of training, for attacks that need texts of non-members. Authors are
            not counted if the source states their split.
        test: expected share of authors kept out of training to measure utility, with the same exception.
        seed: determines which authors are kept out.
        layout: layout of token ids; a key of `flsim.data.records.LAYOUTS`.
        by: "characters" makes each character of a sentence a word, including spaces and punctuation. The other settings
            then count characters; set a larger `record_words`, e.g. 600. "tokens" trains a byte-level BPE tokenizer of
            `vocabulary_size` tokens on the train users, unless an import has a tokenizer.
        ascii: whether characters outside ASCII are removed from plain text, as in TensorFlow Federated's Stack Overflow
            data. Formats that publish sentences as tokens are read as they are.
        drop_authors: names of authors whose posts are dropped, such as ``[deleted]``.

    Examples:
        >>> flsim.ImportSettings(vocabulary_size=5_000, words_per_user=500)    # doctest: +SKIP
    """

    vocabulary_size: int = 10_000
    record_words: int = 20
    words_per_user: Count | None = 2_000
    heldout: Fraction = 0.1
    test: Fraction = 0.1
    seed: Natural = 0
    layout: str = "tff"
    by: By = "words"
    ascii: bool = False
    drop_authors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Layout(self.vocabulary_size, self.record_words, self.layout)
        if self.layout == TOKENIZER and self.by != "tokens":
            raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, found {self.layout!r}")
        if self.ascii and self.by == "tokens":
            raise InputError("ascii removes characters, but a tokenizer has tokens for all characters; remove ascii")
        if self.heldout + self.test >= 1:
            raise InputError(
                "heldout + test must be less than 1, or no author remains for training, found "
                f"{self.heldout + self.test}"
            )

    @property
    def counted(self) -> str:
        """Return what `words_per_user` counts: words, or characters."""
        return "characters" if self.by == "characters" else "words"

    @property
    def described(self) -> dict[str, Any]:
        """Return the settings by name, without defaults of `NEW_SETTINGS`, so digests of corpora do not change."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in NEW_SETTINGS or value != NEW_SETTINGS[name]
        }

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the corpus' splits: including those of `WHOLE` if authors are cut or dropped."""
        return SPLITS if self.words_per_user is None else (*SPLITS, *WHOLE.values())


# Balanced users: which tokens are words, where an author is cut into users, and which split an author belongs to.
#
# Thakkar et al. (2020), "Dataset Construction": users of fewer than 2,000 words are discarded, the others are cut
# into balanced users of about 2,000 words each, and remainders are discarded.
#
# Words are those that an author wrote: before sentences are cut to the model's length, which would then determine which
# authors are long enough, and without punctuation, which the model reads as words of its own.
#
# For a tokenizer, the text of an author is a list of passages, each with its number of words; a text longer than a user
# becomes several passages. One passage takes the place of one "word" in this module, and a later step makes tokens.
# Therefore users do not depend on the tokenizer, and a tokenizer can be trained on only the train users.


def written(tokens: Collection[str]) -> Flags:
    """Return which tokens are words and not punctuation, bool [tokens]: those with a letter or a digit."""
    return np.fromiter((any(map(str.isalnum, token)) for token in tokens), np.bool_, len(tokens))


def entry_of(words: int, text: str, prompt: str | None = None) -> str:
    """Return a passage as in a line of step 1: JSON of its number of words, its text, and its prompt if any."""
    return json.dumps([words, text] if prompt is None else [words, text, prompt], ensure_ascii=False)


def words_in(entry: str) -> int:
    return int(entry[1 : entry.index(",")])


def passages(text: str, most: int | None) -> Iterator[tuple[int, str]]:
    """Yield the passages of a text with their numbers of words, `most` or fewer in the last one; None is no limit."""
    ends = word_ends(text)
    bounds = ends[most - 1 : -1 : most] if most else []
    for first, last in pairwise([0, *bounds, len(text)]):
        yield bisect_right(ends, last) - bisect_right(ends, first), text[first:last]


def cut(written_words: NDArray[np.integer], words_per_user: int) -> Ints:
    """Return the index after each user's last record [users], from the written words of an author's records [records].

    A user ends with the record that reaches `words_per_user`; the remainder after the last user has fewer words.
    """
    total = np.cumsum(written_words, dtype=np.int64)
    ends: list[int] = []
    before = 0
    while len(total) and total[-1] - before >= words_per_user:
        ends.append(int(np.searchsorted(total, before + words_per_user)) + 1)
        before = total[ends[-1] - 1]
    return np.array(ends, np.int64)


def split_of(author: str, heldout: float, test: float, seed: int) -> str:
    """Return the split of all of an author's users: a function of (seed, name) only."""
    draw = stream(seed, "split", author).random()
    return "test" if draw < test else "heldout" if draw < test + heldout else "train"


class BucketUsers(NamedTuple):
    """Users of one split of a bucket; token ids are places in the bucket's words."""

    names: list[str]
    tokens: NDArray[np.uint32]
    record_words: NDArray[np.uint32]
    user_records: NDArray[np.uint32]


def balance_bucket(_report: Report, ranges: list[Range], path: Path, hparams: ImportHParams) -> dict[str, Any]:
    """Balance the authors of a range of hashes, and write their users, see `users_of`, and the words to .words.

    Returns ``read`` and ``dropped``, see `flsim.data.importing.tasks.read_part`; ``authors`` with enough words by
    split; ``longest``, words and name of the longest dropped author; and ``words``, the number of different words.
    """
    authors = _authors(ranges)
    tokens, lengths, bounds, words = _encode(authors, hparams.by)
    starts = np.cumsum(lengths) - lengths
    if hparams.by == "tokens":
        sizes = written_words = np.array(list(map(words_in, words)), np.int64)[tokens]
    elif hparams.by == "characters":
        sizes = written_words = lengths
    else:
        sizes, written_words = lengths, np.add.reduceat(written(words)[tokens], starts, dtype=np.int64)
    author_words = np.add.reduceat(written_words, bounds[:-1])
    is_short = author_words < (hparams.words_per_user or 1)

    cut_lengths = np.minimum(lengths, hparams.record_words)  # of passages 1, which are cut into records later
    is_balanced = np.zeros(len(lengths), np.bool_)
    by_split: dict[str, BucketUsers] = {}
    drawn = list(_users(authors, bounds, written_words, hparams))
    for split in hparams.splits:
        names = [user.name for user in drawn if user.split == split]
        first, last = np.array([user[2:] for user in drawn if user.split == split], np.int64).reshape(-1, 2).T
        records = spans(first, last - first)
        is_balanced[records] |= split in SPLITS
        of_split = tokens[spans(starts[records], cut_lengths[records])]
        record_words, user_records = cut_lengths[records].astype(np.uint32), (last - first).astype(np.uint32)
        by_split[split] = BucketUsers(names, of_split, record_words, user_records)
    ids, different = _write_words(path.with_name(f"{path.name}.words"), by_split, words)
    arrays: dict[str, NDArray[np.generic]] = {}
    for split, users in by_split.items():
        arrays |= {
            f"{split}.names": np.frombuffer(json.dumps(users.names).encode(), np.uint8),
            f"{split}.tokens": ids[users.tokens],
            f"{split}.record_words": users.record_words,
            f"{split}.user_records": users.user_records,
        }
    with new_file(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    is_of_short = np.repeat(is_short, np.diff(bounds))
    is_remainder = ~(is_of_short | is_balanced)
    first_records = set(bounds.tolist())
    return {
        "read": {"users": len(authors)},
        "dropped": {
            "users_too_short": int(np.count_nonzero(is_short)),
            "records_of_short_users": int(np.count_nonzero(is_of_short)),
            "words_of_short_users": int(sizes[is_of_short].sum()),
            "remainder_records": int(np.count_nonzero(is_remainder)),
            "remainder_words": int(sizes[is_remainder].sum()),
            "words_truncated": int((lengths - cut_lengths)[is_balanced].sum()),
        },
        "authors": Counter(user.split for user in drawn if user.split in SPLITS and user.first in first_records),
        "longest": max(((int(author_words[i]), authors[i].name) for i in np.flatnonzero(is_short)), default=(0, "")),
        "words": different,
    }


class _Author(NamedTuple):
    split: str
    name: str
    texts: list[bytes]


def _authors(ranges: list[Range]) -> list[_Author]:
    """Return the authors in the order of the sha256 of their names, with texts in the order of the sources."""
    texts: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for line in read_lines(ranges):
        author, _, text = line.partition(b"\t")
        texts[author].append(text)
    by_author = ((json.loads(author), lines) for author, lines in texts.items())
    authors = [_Author(split, name, lines) for (split, name), lines in by_author]
    return sorted(authors, key=lambda author: (hash_of(author.name), author.name, author.split))


def _encode(authors: list[_Author], by: By) -> tuple[NDArray[np.uint32], Ints, Ints, list[str]]:
    """Return token ids by first occurrence [words], words of records, bounds of authors among records, and the words.

    The authors' texts are emptied.
    """
    ids: defaultdict[str, int] = defaultdict()
    ids.default_factory = ids.__len__
    tokens: list[NDArray[np.uint32]] = []
    lengths: list[list[int]] = []
    for author in authors:
        records = b"\t".join(author.texts).decode().split("\t")
        author.texts.clear()
        if by == "characters":
            words: Sequence[str] = "".join(records)
            lengths.append(list(map(len, records)))
        elif by == "tokens":
            words = records
            lengths.append([1] * len(records))
        else:
            words = " ".join(records).split(" ")
            lengths.append([record.count(" ") + 1 for record in records])
        tokens.append(np.fromiter(map(ids.__getitem__, words), np.uint32, len(words)))
    return np.concatenate(tokens), np.concatenate(lengths), np.cumsum([0, *map(len, lengths)]), list(ids)


class _User(NamedTuple):
    split: str
    name: str
    first: int  # first record
    last: int  # end of the records


def _users(authors: list[_Author], bounds: Ints, written_words: Ints, hparams: ImportHParams) -> Iterator[_User]:
    """Yield the users of authors with enough words, and the authors of the splits `WHOLE`."""
    for author, (first, last) in zip(authors, pairwise(bounds.tolist()), strict=True):
        split = author.split or split_of(author.name, hparams.heldout, hparams.test, hparams.seed)
        words, begin = written_words[first:last], first
        if (whole := WHOLE.get(split)) in hparams.splits:
            yield _User(str(whole), author.name, first, last)
        if hparams.words_per_user is None and words.any():
            yield _User(split, author.name, first, last)
        for number, end in enumerate(cut(words, hparams.words_per_user) if hparams.words_per_user else ()):
            yield _User(split, f"{author.name}#{number}", begin, first + int(end))
            begin = first + int(end)


def _write_words(path: Path, by_split: dict[str, BucketUsers], words: list[str]) -> tuple[NDArray[np.uint32], int]:
    """Write words with counts in train users, by hash; return the new id of each token, and the number of words."""
    counts = {split: np.bincount(users.tokens, minlength=len(words)) for split, users in by_split.items()}
    occurring = np.flatnonzero(sum(counts.values()))
    spelled = [words[index].encode() for index in occurring]
    hashes = np.array([zlib.crc32(word) for word in spelled], np.uint64) << np.uint64(32)
    order = np.argsort(hashes, kind="stable")
    ids = np.zeros(len(words), np.uint32)
    ids[occurring[order]] = np.arange(len(order))
    in_train = counts["train"][occurring[order]].tolist()
    lines = (b"%b\t%d\n" % (spelled[index], count) for index, count in zip(order.tolist(), in_train, strict=True))
    write_lines(path, hashes[order].tolist(), lines)
    return ids, len(order)


def users_of(path: Path) -> dict[str, BucketUsers]:
    with np.load(path) as arrays:
        splits = dict.fromkeys(name.partition(".")[0] for name in arrays.files)
        return {
            split: BucketUsers(
                json.loads(arrays[f"{split}.names"].tobytes()),
                *(arrays[f"{split}.{name}"] for name in ("tokens", "record_words", "user_records")),
            )
            for split in splits
        }


# Steps 3 and 4 of an import with a tokenizer: passages become records of tokens, and the corpus gets its ids.
#
# Tasks encode the passages of buckets with the model's ids; their counts determine the corpus' ids, which users get.

Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Cutting:
    """The settings that cut text into tokens: the tokenizer, and the key or column of prompts, if any."""

    tokenizer: Tokenizer | None = None
    prompt_column: str | None = None

    @property
    def described(self) -> dict[str, Any]:
        """Return the settings as parameters of a corpus."""
        tokenizer = self.tokenizer
        given = {"name": tokenizer.folder.resolve().name, "files": tokenizer.files} if tokenizer else "trained"
        return {"tokenizer": given, **({"prompt_column": self.prompt_column} if self.prompt_column else {})}


def entries(path: Path) -> Iterator[tuple[list[Any], int]]:
    """Yield the passages in the words of a bucket, in order, each with its count in train users."""
    for line in lines_of(path):
        entry, _, count = line.partition(b"\t")
        yield json.loads(entry), int(count)


def train_on(_report: Report, buckets: Sequence[Path], size: int, folder: Path) -> dict[str, Any]:
    """Train a tokenizer on the passages of train users, prompts included; see `train_tokenizer`."""
    passages = (passage for path in buckets for passage in entries(path))
    texts = (text for (_, *texts), count in passages for text in texts for _ in range(count))
    folder.mkdir(exist_ok=True)
    train_tokenizer(texts, size, folder)
    return {}


def encode_bucket(_report: Report, words: Path, tokenizer: Path, record_words: int, path: Path) -> dict[str, Any]:
    """Write the records of a bucket's passages.

    A text of more than `record_words` tokens becomes several records. A prompt and its answer are one record, and
    tokens after the longest record are cut off. A prompt that leaves no room for an answer has no record.
    """
    splitter = Tokenizer(tokenizer)
    tokens: list[list[int]] = []
    prompts, records, lost, copies = [], [], [], []
    for (_, text, *prompt), count in entries(words):
        before = splitter.encode(prompt[0]) if prompt else []
        ids = before + splitter.encode(text)
        if prompt:
            parts = [ids[:record_words]] if len(before) < min(record_words, len(ids)) else []
            lost.append(len(ids) - record_words if len(ids) > record_words and parts else 0)
        else:
            parts = [ids[first : first + record_words] for first in range(0, len(ids), record_words)]
            lost.append(0)
        tokens += parts
        prompts += [len(before)] * len(parts)
        copies += [count] * len(parts)
        records.append(len(parts))
    flat = np.fromiter((id_ for part in tokens for id_ in part), np.uint32)
    lengths = np.array([len(part) for part in tokens], np.uint32)
    counts = np.bincount(flat, np.repeat(np.array(copies, float), lengths), minlength=splitter.rows)
    arrays = {
        "tokens": flat,
        "record_words": lengths,
        "prompts": np.array(prompts, np.uint32),
        "records": np.array(records, np.uint32),
        "lost": np.array(lost, np.uint32),
        "counts": counts.astype(np.int64),
    }
    with new_file(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return {}


def _chosen(lengths: Integers, chosen: Integers) -> Ints:
    """Return the positions of the elements of chosen pieces; all pieces are consecutive and have these lengths."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return spans(starts[chosen], lengths[chosen].astype(np.int64))


def vocabulary_of(tokenizer: Tokenizer, counts: NDArray[np.int64], record_words: int, prompts: bool) -> TokenVocabulary:
    """Return the vocabulary of a corpus with the ids of its tokens, by their counts in train users [rows]."""
    layout, ids = tokenizer.table(counts)
    layout = replace(layout, record_words=record_words, prompts=prompts)
    text = ids[layout.text_ids.start : layout.text_ids.stop]
    words = tuple(map(tokenizer.token, text.tolist()))
    map_ = TokenMap(layout, ids, tokenizer.folder)
    return TokenVocabulary(words, tuple(counts[text].tolist()), TOKENIZER, "tokens", map=map_)


def encode(
    pieces: Pieces, pool: Pool, buckets: list[Path], hparams: ImportHParams, cutting: Cutting
) -> TokenVocabulary:
    """Run step 3 with a tokenizer, which is trained first if none is given, and return the vocabulary."""
    words = [bucket.with_name(f"{bucket.name}.words") for bucket in buckets]
    tokenizer = cutting.tokenizer
    if tokenizer is None:
        folder = pieces.folder / "tokenizer"
        task = Task("tokenizer", train_on, (words, hparams.vocabulary_size, folder))
        pieces.run(pool, "training the tokenizer", {"trained": task})
        tokenizer = Tokenizer(folder)
    tasks = {
        f"tokens-{bucket.name}": Task(
            f"tokens of {bucket.name}", encode_bucket, (path, tokenizer.folder, hparams.record_words, _encoded(bucket))
        )
        for bucket, path in zip(buckets, words, strict=True)
    }
    pieces.run(pool, "encoding", tasks)
    counts = np.sum([_arrays(_encoded(bucket))["counts"] for bucket in buckets], axis=0)
    if not counts.any():
        raise InputError(
            f"no record of train users has a token to predict; a prompt must be shorter than --words-per-record "
            f"{hparams.record_words}"
        )
    return vocabulary_of(tokenizer, counts, hparams.record_words, cutting.prompt_column is not None)


def write_users(writer: CorpusWriter, tokens: TokenMap, buckets: list[Path], dropped: Counter[str]) -> dict[str, int]:
    """Run step 4 with a tokenizer; return the number of unknown tokens by split, and add to the counts of drops."""
    layout = writer.layout
    without = "records_with_long_prompts" if layout.prompts else "records_without_words"
    unknown = dict.fromkeys(writer.splits, 0)
    for bucket in tracked("writing users", buckets):
        encoded = _arrays(_encoded(bucket))
        all_ids = tokens.from_model[encoded["tokens"]].astype(layout.token_type)
        for split, users in users_of(bucket).items():
            passages = users.tokens
            records = _chosen(encoded["records"], passages)
            record_words, prompts = encoded["record_words"][records], encoded["prompts"][records]
            ids = all_ids[_chosen(encoded["record_words"], records)]
            ends = np.cumsum(np.append(0, encoded["records"][passages]))[np.cumsum(np.append(0, users.user_records))]
            writer.splits[split].extend(users.names, ids, record_words, np.diff(ends), prompts)
            unknown[split] += int(np.count_nonzero(ids == layout.oov))
            if split in SPLITS:
                dropped[without] += int(np.count_nonzero(encoded["records"][passages] == 0))
                dropped["tokens_truncated"] += int(encoded["lost"][passages].sum())
    return unknown


def _encoded(bucket: Path) -> Path:
    return bucket.with_name(f"{bucket.name}.tokens")


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as arrays:
        return dict(arrays)
