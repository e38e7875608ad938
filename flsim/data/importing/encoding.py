"""Steps 3 and 4 of an import with a tokenizer: passages become records of tokens, and the corpus gets its ids.

Tasks encode the passages of buckets with the model's ids; their counts determine the corpus' ids, which users get.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.files import new_file
from flsim.base.pool import Pool, Report, Task
from flsim.base.progress import say, tracked
from flsim.data.corpus import CorpusWriter
from flsim.data.importing.gather import ImportHParams, Users, users_of
from flsim.data.importing.scratch import Pieces, lines_of
from flsim.data.manifest import SPLITS
from flsim.data.tokenizer import Tokenizer, TokenMap, TokenVocabulary, train_tokenizer
from flsim.data.vocabulary import TOKENIZER

Integers = NDArray[np.integer[Any]]
LOST = {
    "records_with_long_prompts": "{:,} records dropped: their prompts leave no room for an answer in {} tokens; set a "
    "larger --words-per-record",
    "tokens_truncated": "{:,} tokens of answers cut off: a prompt and its answer are one record of {} tokens; set a "
    "larger --words-per-record",
}


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
    """Write the records of a bucket's passages, and return ``records``, their number.

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
    return {"records": len(tokens)}


class Encoded:
    """The records of a bucket's passages by `encode_bucket`; `counts` [rows] of the model's ids are in train users."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._tokens, self._records, self._lost = arrays["tokens"], arrays["records"], arrays["lost"]
            self._lengths, self._prompts = arrays["record_words"], arrays["prompts"]
            self.counts = arrays["counts"]

    def users(self, users: Users) -> tuple[Integers, Integers, Integers, Integers, int, int]:
        """Return the records of users whose tokens are passages.

        These are the model's ids [tokens]; numbers of tokens and of tokens in the prompt of each record; number of
        records of each user; number of passages without a record; and number of tokens that were cut off.
        """
        passages = users.tokens
        records = _spread(self._records, passages)
        ends = np.cumsum(np.concatenate([[0], self._records[passages]]), dtype=np.int64)
        user_ends = np.cumsum(np.concatenate([[0], users.user_records]), dtype=np.int64)
        tokens = self._tokens[_spread(self._lengths, records)]
        empty, lost = int(np.count_nonzero(self._records[passages] == 0)), int(self._lost[passages].sum())
        return tokens, self._lengths[records], self._prompts[records], np.diff(ends[user_ends]), empty, lost


def _spread(lengths: Integers, chosen: Integers) -> Integers:
    """Return the positions of the elements of chosen pieces; all pieces are consecutive and have these lengths."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    chosen_lengths = lengths[chosen].astype(np.int64)
    ends = np.cumsum(chosen_lengths)
    return np.repeat(starts[chosen] - ends + chosen_lengths, chosen_lengths) + np.arange(chosen_lengths.sum())


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
            f"tokens of {bucket.name}",
            encode_bucket,
            (path, tokenizer.folder, hparams.record_words, _encoded(bucket)),
        )
        for bucket, path in zip(buckets, words, strict=True)
    }
    pieces.run(pool, "encoding", tasks, "records", lambda result: result["records"])
    counts = np.sum([Encoded(_encoded(bucket)).counts for bucket in buckets], axis=0)
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
        encoded = Encoded(_encoded(bucket))
        for split, users in users_of(bucket).items():
            of_model, record_words, prompts, user_records, empty, lost = encoded.users(users)
            ids = tokens.from_model[of_model].astype(layout.token_type)
            unknown[split] += int(np.count_nonzero(ids == layout.oov))
            writer.splits[split].extend(users.names, ids, record_words, user_records, prompts)
            if split in SPLITS:
                dropped.update({without: empty, "tokens_truncated": lost})
    for reason, line in LOST.items():
        if dropped[reason]:
            say(line.format(dropped[reason], layout.record_words))
    return unknown


def _encoded(bucket: Path) -> Path:
    return bucket.with_name(f"{bucket.name}.tokens")
