"""Canaries for a training without flsim: records that replace records of users, and the law that drew them.

A folder of such canaries has these files:

    canaries.json      the law: settings, seed, layout, known words, unit; and a digest of each other file
    words.txt          the words of phrases, one per line; or tokenizer/ and tokens.i64, which determine the words
    users.csv          user, records: the users, or clients, and the number of records of each
    roster.parquet     a row per canary (`flsim.canaries.population.SCHEMA`)
    records.jsonl      the records to replace (or .csv, .parquet): user, record (from 0 among those of the user), id of
                       the canary, and its text, or for instruction tuning its prompt and completion

flsim draws everything again when it reads the folder, and refuses a phrase that somebody chose, because a rank is a
p-value only for random phrases.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flsim.base.errors import InputError, at_least_one, in_one_line
from flsim.base.extensions import custom_call_errors, is_custom, resolve
from flsim.base.files import digest, file_digest, from_json, inside, naming, new_folder, write_json
from flsim.canaries.planting import UNREADABLE, Planting, draw_canaries, plant, read_table, refuse_too_many
from flsim.canaries.population import BY_ROUND, FILE, refuse_by_round, roster_of, write_roster
from flsim.canaries.spec import Canary, CanaryHParams, crowding
from flsim.data.corpus import Split
from flsim.data.records import SPECIAL_TOKENS, TOKENIZER, Layout, Vocabulary
from flsim.data.tokenizer import FOLDER, Tokenizer, TokenMap, TokenVocabulary

MANIFEST, WORDS, USERS = "canaries.json", "words.txt", "users.csv"
CONFIG = "config.json"  # of a model, with its number of tokens
SCHEMA = 1
RECORD_TOKENS = 1_024  # longest phrase by a tokenizer
Unit = Literal["user", "record"]
Rows = Literal["jsonl", "csv", "parquet", "instructions"]
FILES: dict[Rows, str] = {
    "jsonl": "records.jsonl",
    "csv": "records.csv",
    "parquet": "records.parquet",
    "instructions": "records.jsonl",
}


@dataclass(frozen=True)
class WordList:
    """The words of phrases, without any text."""

    path: Path
    vocabulary: Vocabulary
    layout: Layout
    splits: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, layout: str = "tff") -> "WordList":
        """Read a file with one different word per line, in the order of token ids; text after a tab is ignored."""
        try:
            words = [line.split("\t")[0].strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not a readable file of words ({in_one_line(error)})") from error
        if not words or len(set(words)) < len(words) or any(len(word.split()) != 1 for word in words):
            raise InputError(f"{path}: must have one word per line, at least one, and each word once")
        vocabulary = Vocabulary(tuple(words), (0,) * len(words), layout)
        return cls(path, vocabulary, Layout(len(words) + SPECIAL_TOKENS, name=layout))

    @classmethod
    def of_tokenizer(cls, folder: Path) -> "WordList":
        """Return the words of a Hugging Face tokenizer: tokens that are a space and letters."""
        tokenizer = Tokenizer(folder)
        tokenizer.refuse_unusable()
        layout, ids = tokenizer.table(np.zeros(tokenizer.rows, np.int64))
        layout = replace(layout, record_words=RECORD_TOKENS)
        spelled = tuple(tokenizer.token(id_) for id_ in ids[list(layout.text_ids)].tolist())
        of_tokens = TokenMap(layout, ids, folder)
        return cls(folder, TokenVocabulary(spelled, (0,) * len(spelled), TOKENIZER, "tokens", map=of_tokens), layout)

    def write(self, folder: Path) -> None:
        """Write the words into an existing folder, from which `within` reads them."""
        if isinstance(self.vocabulary, TokenVocabulary):
            self.vocabulary.map.write(folder)
            if (self.path / CONFIG).is_file():
                (folder / FOLDER / CONFIG).write_bytes((self.path / CONFIG).read_bytes())
        else:
            text = "".join(f"{word}\n" for word in self.vocabulary.words)
            (folder / WORDS).write_text(text, encoding="utf-8")

    @classmethod
    def within(cls, folder: Path, layout: str) -> "WordList":
        """Return the words in a folder that `write` wrote; raise the errors of the other readers."""
        return cls.of_tokenizer(folder / FOLDER) if layout == TOKENIZER else cls.read(folder / WORDS, layout)

    def split(self, name: str) -> Split:
        """Refuse to return text."""
        raise InputError(f'canaries.source "{name}": needs a corpus with text; use "words" or "template"')


def read_rows(path: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return columns of a file of training data, .parquet, .csv or .jsonl, as a row of texts; a null is empty."""
    try:
        rows = read_table(path, columns)
        unfit = next((row for row in rows if not row.keys() >= {*columns}), None)
        if unfit is not None:
            raise ValueError(f"found columns {', '.join(unfit) or 'none'}")
        return [tuple(_text_of(row[column]) for column in columns) for row in rows]
    except (*UNREADABLE, AttributeError) as error:
        raise InputError(
            f"{path}: columns {', '.join(columns)} cannot be read ({in_one_line(error):.200}); name another file "
            f"(.jsonl, .csv or .parquet), or other columns"
        ) from error


def _text_of(value: Any) -> str:
    """Return a field as text; UnicodeEncodeError for half of a surrogate pair."""
    text = "" if value is None else str(value)
    text.encode()
    return text


@dataclass(frozen=True)
class OtherUsers:
    names: tuple[str, ...]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def user_offsets(self) -> NDArray[np.int64]:
        """Return int64 [users + 1], the start of each user's records, and the end of the last one."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    @classmethod
    def alike(cls, users: int, records: int) -> "OtherUsers":
        """Return users named user0, user1, ... with equal numbers of records."""
        at_least_one(users=users, records=records)
        return cls(tuple(f"user{index}" for index in range(users)), np.full(users, records, np.int64))

    @classmethod
    def in_file(cls, path: Path, column: str = "user") -> "OtherUsers":
        """Count the records of each user in a file of training data, see `read_rows`, in the order of first rows."""
        users = [user for (user,) in read_rows(path, [column])]
        if not users:
            raise InputError(f"{path}: has no record; name the training data")
        if "" in users:
            raise InputError(f"{path}: record {users.index('') + 1} has no {column}; name the user of each record")
        counts = pd.Series(users, dtype="object").value_counts(sort=False)
        return cls(tuple(counts.index), np.asarray(counts, np.int64))


@dataclass(frozen=True)
class CanarySet:
    """Canaries that were drawn for a training elsewhere.

    `prefix` is the number of a phrase's first words that an attacker knows; in instruction rows these are the prompt.
    """

    words: WordList
    users: OtherUsers
    hparams: CanaryHParams
    seed: int
    prefix: int
    planting: Planting

    @classmethod
    def draw(cls, words: WordList, users: OtherUsers, hparams: CanaryHParams, seed: int, prefix: int) -> "CanarySet":
        """Draw canaries as in a run of flsim with these users, without settings of single rounds and natural text."""
        refuse_by_round(hparams, "only a run of flsim has rounds; remove this setting")
        if hparams.source in ("heldout", "phrases"):
            words.split(hparams.source)
        if not 1 <= prefix < hparams.length:
            raise InputError(f"prefix must be at least 1 and below the {hparams.length} words of a phrase")
        refuse_too_many(hparams, users.records)
        return cls(words, users, hparams, seed, prefix, plant(users, draw_canaries(words, hparams, seed), seed))

    @property
    def unit(self) -> Unit:
        """The unit of protection: a user; or a record if one holder has all records."""
        return "record" if len(self.users) == 1 else "user"

    @cached_property
    def identity(self) -> str:
        """Digest of the law, the words and the users, which determine everything else."""
        counts = self.users.counts.astype("<i8").tobytes()
        return digest(json.dumps(self._law(), sort_keys=True), "\n".join(self.words.vocabulary.words), counts)

    def _law(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.hparams).items() if name not in BY_ROUND}
        layout = self.words.layout.name
        return {"canaries": settings, "seed": self.seed, "prefix": self.prefix, "layout": layout, "unit": self.unit}

    @property
    def warning(self) -> str:
        """Return a sentence if canaries replace more than half of all records; empty otherwise."""
        return crowding(len(self.planting.overlay.records) / self.users.records)

    def records(self, is_instruction: bool = False) -> Iterator[dict[str, Any]]:
        """Yield a row for each record that a canary replaces, in the order of users and their records."""
        overlay, offsets = self.planting.overlay, self.users.user_offsets
        holders = np.searchsorted(offsets, overlay.records, side="right") - 1
        for record, holder, index in zip(overlay.records.tolist(), holders.tolist(), overlay.canaries, strict=True):
            canary = self.planting.canaries[index]
            place = {"user": self.users.names[holder], "record": record - int(offsets[holder]), "canary": canary.id}
            yield place | self.text_of(canary, is_instruction)

    def text_of(self, canary: Canary, is_instruction: bool = False) -> dict[str, str]:
        """Return the text of a canary; for instruction tuning, the known words as prompt and the rest as completion."""
        text, prompt = self.words.vocabulary.text(canary.tokens), self.known_text(canary)
        return {"prompt": prompt, "completion": text[len(prompt) :]} if is_instruction else {"text": text}

    def known_text(self, canary: Canary) -> str:
        known = canary.template.known if canary.template else self.prefix
        return self.words.vocabulary.text(canary.tokens[:known])

    def write(self, out: Path, rows: Rows = "jsonl") -> None:
        """Write the complete folder, or no folder after an error."""
        with new_folder(out) as folder:
            self.words.write(folder)
            with (folder / USERS).open("w", encoding="utf-8", newline="") as file:
                lines = csv.writer(file)
                lines.writerow(("user", "records"))
                lines.writerows(zip(self.users.names, self.users.counts.tolist(), strict=True))
            write_roster(folder, self.planting, self.words.vocabulary)
            _write_rows(folder / FILES[rows], list(self.records(rows == "instructions")), rows)
            written = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            files = {path.relative_to(folder).as_posix(): file_digest(path) for path in written}
            write_json(folder / MANIFEST, {"schema": SCHEMA, "law": self._law(), "rows": rows, "files": files})

    @classmethod
    def read(cls, folder: Path) -> "CanarySet":
        """Read a folder that `write` wrote, draw its canaries again, and raise InputError if they differ."""
        if not (folder / MANIFEST).is_file():
            raise InputError(f"{folder}: has no {MANIFEST}; name a folder that `flsim data canaries` wrote")
        try:
            manifest = from_json((folder / MANIFEST).read_text(encoding="utf-8"))
            law, files = manifest["law"], manifest["files"]
            moved = {name for name in FILES.values() if not (folder / name).exists()}  # drawn again, so not needed
            for name in sorted(set(files) - moved | {USERS, FILE}):
                if file_digest(inside(folder, name)) != files[name]:
                    raise ValueError(f"{name} has changed")
            words = WordList.within(folder, law["layout"])
            with (folder / USERS).open(encoding="utf-8", newline="") as file:
                listed = [(row["user"], int(row["records"])) for row in csv.DictReader(file, strict=True)]
            users = OtherUsers(tuple(name for name, _ in listed), np.array([count for _, count in listed], np.int64))
            canaries = cls.draw(words, users, CanaryHParams(**law["canaries"]), law["seed"], law["prefix"])
            stored = pd.read_parquet(folder / FILE)
        except (OSError, KeyError, TypeError, ValueError, OverflowError, csv.Error, pa.ArrowException) as error:
            raise InputError(
                f"{folder}: cannot be read ({in_one_line(error):.200}); draw the canaries again"
            ) from error
        if stored.to_json() != roster_of(canaries.planting, words.vocabulary).to_json():
            raise InputError(
                f"{folder}: the canaries are not those that the law draws, so they prove nothing; draw canaries again"
            )
        return canaries


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]], kind: Rows) -> None:
    texts = ("prompt", "completion") if kind == "instructions" else ("text",)
    fields = [("user", pa.string()), ("record", pa.int64()), ("canary", pa.string())]
    table = pa.Table.from_pylist(list(rows), pa.schema([*fields, *((name, pa.string()) for name in texts)]))
    with naming(path):
        if kind == "parquet":
            pq.write_table(table, path)
        elif kind == "csv":
            pa_csv.write_csv(table, path)
        else:
            path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


# A check that a training reads canaries: in a training file, with a tokenizer, a record length and a prompt mask.
#
# A token has loss if it is within the record length, is not in a masked prompt, and is not the first token of a record
# without a begin token. A canary without loss for any unknown word proves nothing.

Encode = Callable[[str], Sequence[int]]
ALL, PART, NONE = "all", "part", "none"


@dataclass(frozen=True)
class ReadingOfRecords:
    """The settings of a training that decide how records are read: `encode` returns ids without special tokens.

    A record is cut after `length` tokens, with that with which each record begins, if `begins`.
    """

    encode: Encode
    length: int | None = None
    masks_prompt: bool = False
    begins: bool = True

    def targets(self, prompt: str, text: str, first: int, last: int) -> tuple[int, int]:
        """Return the number of tokens of characters `first` to `last` of prompt and text, and of those with loss."""
        start, end = len(self.encode(text[: max(0, first)])), len(self.encode(text[:last]))
        lowest = len(self.encode(prompt)) if self.masks_prompt else 0
        lowest = max(lowest, 0 if self.begins else 1)
        highest = end if self.length is None else self.length - self.begins
        return end - start, max(0, min(end, highest) - max(start, lowest))


def encoder(name: str | None) -> Encode:
    """Return a function text -> token ids: of a Hugging Face folder, of a custom file, or words if the name is None."""
    if name is None:
        return lambda text: range(len(text.split()))
    if is_custom(name):
        function: Encode = resolve(name, {}, "tokenizer")

        def encode(text: str) -> Sequence[int]:
            with custom_call_errors(name, "a function from text to a list of token ids", InputError):
                return list(function(text))

        return encode
    tokenizer = Tokenizer(Path(name))
    tokenizer.refuse_unusable()
    return tokenizer.encode


def preflight(drawn: CanarySet, training: ReadingOfRecords, records: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """Return a row for each canary that has planned copies or copies in the records.

    Records have ``prompt`` and ``text``, without the prompt. Columns: ``canary``; ``planned`` and ``found``, numbers of
    copies; and of the copy with the smallest share of loss, ``tokens`` of unknown words, those with ``loss``, and
    ``trained``, whether "all", "part" or "none" of them have loss. Raises InputError if a custom tokenizer failed.
    """
    texts = [(row["prompt"], row["prompt"] + row["text"]) for row in records]
    rows = []
    for canary, planned in zip(drawn.planting.canaries, drawn.planting.insertions.tolist(), strict=True):
        known, phrase = drawn.known_text(canary), drawn.text_of(canary)["text"]
        targets = [
            training.targets(prompt, text, at + len(known), at + len(phrase))
            for prompt, text in texts
            for at in _places(phrase, text)
        ]
        if planned or targets:
            tokens, loss = min(targets, key=lambda counts: counts[1] / max(1, counts[0]), default=(0, 0))
            trained = NONE if not loss else ALL if loss == tokens else PART
            counts = {"canary": canary.id, "planned": planned, "found": len(targets)}
            rows.append(counts | {"tokens": tokens, "loss": loss, "trained": trained})
    return pd.DataFrame(rows, columns=["canary", "planned", "found", "tokens", "loss", "trained"])


def _places(phrase: str, text: str) -> Iterator[int]:
    """Yield the positions of a phrase among the complete words of a text; at its begin, the leading space is absent."""
    bare = phrase.lstrip()
    for match in re.finditer(rf"(?<!\w){re.escape(bare)}(?!\w)", text):
        yield match.start() - (len(phrase) - len(bare))


def read_records(path: Path, text: str = "text", prompt: str | None = None) -> list[dict[str, str]]:
    """Return the rows of a training file as ``prompt`` (empty for none) and ``text``; see `read_rows`."""
    rows = read_rows(path, [text] if prompt is None else [prompt, text])
    return [{"prompt": "".join(prompts), "text": text} for *prompts, text in rows]
