"""Canaries from a file: phrases that may be in the training data of a model, and phrases that are not."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import from_json
from flsim.base.settings import Natural, Probability, Whole, bounds, input_error, pydantic, settings
from flsim.canaries.spec import Canary
from flsim.data.tokenizer import TokenVocabulary
from flsim.data.vocabulary import Layout, Vocabulary

UNREADABLE = (OSError, ValueError, TypeError, csv.Error, pa.ArrowException)  # errors of `read_table`


SPLIT = pydantic and pydantic.BeforeValidator(lambda value: value.split() if isinstance(value, str) else value)


@settings
class Listed:
    """A canary in a file: its phrase as `words` of the vocabulary or as `tokens` (ids); see `Canary`."""

    id: Annotated[str, bounds(min_length=1)]
    words: str | tuple[str, ...] | None = None
    tokens: Annotated[tuple[Whole, ...] | None, SPLIT] = None
    p_u: Probability = math.nan
    p_e: Probability = math.nan
    copies: Natural | None = None  # 0 for a control

    def __post_init__(self) -> None:
        if (self.words is None) == (self.tokens is None):
            raise InputError("this row must have words or tokens, not both")


def read_listed(path: Path, layout: Layout, vocabulary: Vocabulary | None) -> tuple[Canary, ...]:
    """Return the canaries of a CSV file with a header, or of a JSON file with a list of objects, as of `Listed`.

    Words or tokens are separated by spaces, or in JSON a list. InputError for other files.
    """
    if path.suffix.lower() not in (".csv", ".json"):
        raise InputError(f"{path}: canaries must be in a .csv or .json file")
    try:
        rows = read_table(path)
    except UNREADABLE as error:
        raise InputError(f"{path}: cannot be read as {path.suffix.lower()} ({in_one_line(error):.200})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: must be a list of objects, each a canary")
    if not rows:
        raise InputError(f"{path}: the file has no canary; list at least one canary")
    canaries = tuple(_canary(f"{path}, canary {index}", row, layout, vocabulary) for index, row in enumerate(rows, 1))
    for id_, count in Counter(canary.id for canary in canaries).items():
        if count > 1:
            raise InputError(f"{path}: canary {id_} is listed twice; give each canary a different id")
    return canaries


def read_table(path: Path, columns: Sequence[str] | None = None) -> list[dict[Any, Any]]:
    """Return the rows of a file, .parquet, .csv, .json or JSON lines; of .parquet, these columns, by default all."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return list(pq.read_table(path, columns=None if columns is None else list(columns)).to_pylist())
    if suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [*csv.DictReader(file, strict=True)]
    text = path.read_text(encoding="utf-8-sig")
    if suffix == ".json":
        return from_json(text)  # type: ignore[no-any-return]
    return [from_json(line) for line in text.split("\n") if line.strip()]


def _canary(where: str, row: Mapping[Any, Any], layout: Layout, vocabulary: Vocabulary | None) -> Canary:
    if None in row:
        raise InputError(f"{where}: has more fields than the header; quote a field that has a comma in it")
    given = {key: value for key, value in row.items() if value not in (None, "")}
    try:
        listed: Listed = pydantic.TypeAdapter(Listed).validate_python(given | {"id": str(row.get("id", "")).strip()})
    except pydantic.ValidationError as error:
        raise input_error(error, Listed, where) from error
    tokens = encoded(where, listed.words, vocabulary) if listed.tokens is None else listed.tokens
    refuse_special(where, tokens, layout)
    return Canary(listed.id, tokens, listed.p_u, listed.p_e, listed.copies, is_planted=listed.copies != 0)


def refuse_special(where: str, tokens: tuple[int, ...], layout: Layout) -> None:
    """Raise InputError if a token is not a token of text, such as OOV; `where` names the phrase in messages."""
    text = layout.text_ids
    for token in tokens:
        if token not in text:
            raise InputError(
                f"{where}: token {token} is not the id of a word; word ids are {text.start} to {text.stop - 1}"
            )


def encoded(where: str, value: Any, vocabulary: Vocabulary | None) -> tuple[int, ...]:
    """Return the tokens of a text, or of a list of words; raise InputError if the vocabulary lacks a word."""
    if vocabulary is None:
        raise InputError(
            f"{where}: this row has words, but there is no vocabulary; give a vocabulary or a corpus, or list tokens"
        )
    if isinstance(vocabulary, TokenVocabulary):
        if not isinstance(value, str):
            raise InputError(f"{where}: words must be text, which the tokenizer of the corpus cuts")
        return tuple(vocabulary.encode_text(value))
    words = vocabulary.split(value) if isinstance(value, str) else list(value)
    for word in words:
        if word not in vocabulary.ids:
            raise InputError(f'{where}: "{word}" is not in the vocabulary')
    return tuple(vocabulary.encode(words))
