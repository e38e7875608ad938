"""Canaries from a file: phrases that may be in the training data of a model, and phrases that are not."""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.files import from_json
from flsim.canaries.spec import Canary
from flsim.data.tokenizer import TokenVocabulary
from flsim.data.vocabulary import Layout, Vocabulary

KEYS = {"id", "words", "tokens", "p_u", "p_e", "copies"}


def read_listed(path: Path, layout: Layout, vocabulary: Vocabulary | None) -> tuple[Canary, ...]:
    """Return the canaries of a CSV file with a header, or of a JSON file with a list of objects.

    Each canary has a different id, and words of the vocabulary or tokens (ids), separated by spaces, in JSON as a list.
    The keys p_u and p_e, see `Canary`, and copies, 0 for a control, are optional. InputError for other files.
    """
    rows = _read(path)
    if not rows:
        raise InputError(f"{path}: the file has no canary; list at least one canary")
    canaries = tuple(_canary(f"{path}, canary {index}", row, layout, vocabulary) for index, row in enumerate(rows, 1))
    for id_, count in Counter(canary.id for canary in canaries).items():
        if count > 1:
            raise InputError(f"{path}: canary {id_} is listed twice; give each canary a different id")
    return canaries


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            # Not lines of the text: a quoted field may contain a newline, and `splitlines` divides at U+2028 too.
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            return [_fields(f"{path}, canary {index}", row) for index, row in enumerate(reader, 1)]
        if path.suffix.lower() == ".json":
            rows = from_json(text)
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise InputError(f"{path}: must be a list of objects, each a canary")
            return rows
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except InputError:
        raise
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as {path.suffix.lower()} ({error})") from error
    raise InputError(f"{path}: canaries must be in a .csv or .json file")


def _fields(where: str, row: Mapping[str | None, Any]) -> dict[str, Any]:
    """Return the fields of a row that are not empty; refuse more than the header has, whose words would be lost."""
    if None in row:
        raise InputError(f"{where}: has more fields than the header; quote a field that has a comma in it")
    return {key: value for key, value in row.items() if key and value not in (None, "")}


def _canary(where: str, row: Mapping[str, Any], layout: Layout, vocabulary: Vocabulary | None) -> Canary:
    unknown = sorted(set(row) - KEYS)
    if unknown:
        raise InputError(f"{where}: unknown column {unknown[0]}; columns are {', '.join(sorted(KEYS))}")
    id_ = str(row.get("id", "")).strip()
    if not id_:
        raise InputError(f"{where}: this row has no id; add an id")
    if ("words" in row) == ("tokens" in row):
        raise InputError(f"{where}: this row must have words or tokens, not both")
    tokens = _tokens(where, row["tokens"]) if "tokens" in row else encoded(where, row["words"], vocabulary)
    refuse_special(where, tokens, layout)
    text = str(row.get("copies", ""))
    if "copies" in row and not text.isdecimal():
        raise InputError(f"{where}: copies must be an integer, 0 for a control, found {text}")
    copies = int(text) if "copies" in row else None
    p_u, p_e = _probability(where, row, "p_u"), _probability(where, row, "p_e")
    return Canary(id_, tokens, p_u, p_e, copies, is_planted=copies != 0)


def refuse_special(where: str, tokens: tuple[int, ...], layout: Layout) -> None:
    """Raise InputError if a token is not a token of text, such as OOV; `where` names the phrase in messages."""
    text = layout.text_ids
    for token in tokens:
        if token not in text:
            raise InputError(
                f"{where}: token {token} is not the id of a word; word ids are {text.start} to {text.stop - 1}"
            )


def encoded(place: str, value: Any, vocabulary: Vocabulary | None) -> tuple[int, ...]:
    """Return the tokens of a text, or of a list of words; raise InputError if the vocabulary lacks a word."""
    if vocabulary is None:
        raise InputError(
            f"{place}: this row has words, but there is no vocabulary; give a vocabulary or a corpus, or list tokens"
        )
    if isinstance(vocabulary, TokenVocabulary):
        if not isinstance(value, str):
            raise InputError(f"{place}: words must be text, which the tokenizer of the corpus cuts")
        return tuple(vocabulary.encode_text(value))
    words = vocabulary.split(value) if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{place}: words must be text, or a list of texts")
    for word in words:
        if word not in vocabulary.ids:
            raise InputError(f'{place}: "{word}" is not in the vocabulary')
    return tuple(vocabulary.encode(words))


def _tokens(where: str, value: Any) -> tuple[int, ...]:
    try:
        listed = [int(text) for text in value.split()] if isinstance(value, str) else value
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(type(token) is int for token in listed):
        raise InputError(f"{where}: tokens must be integers, found {value}")
    return tuple(listed)


def _probability(where: str, row: Mapping[str, Any], name: str) -> float:
    if row.get(name) is None:
        return math.nan
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value <= 1:
        raise InputError(f"{where}: {name} must be a probability above 0 and at most 1, found {row[name]}")
    return value
