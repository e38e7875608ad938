"""The types of what a manifest.json says: others are refused when a corpus is opened, not where they are used."""

from typing import Any, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict


class Described(TypedDict):
    """A `flsim.data.vocabulary.Layout`, which checks the values."""

    vocabulary_size: int
    record_words: int
    name: str


class Step(TypedDict):
    """Of those that made a corpus of another one; others than these keys are the step's own."""

    label: NotRequired[str]


class Source(TypedDict):
    name: str
    bytes: int
    format: NotRequired[str]


class Parameters(TypedDict):
    read: NotRequired[dict[str, int]]
    steps: NotRequired[list[Step]]


class File(TypedDict):
    bytes: int
    sha256: str


class Manifest(TypedDict):
    schema: Any
    layout: Described
    dropped: dict[str, int]
    sources: list[Source]
    parameters: Parameters
    files: dict[str, File]
    warnings: NotRequired[list[str]]
    notes: NotRequired[list[str]]


MANIFEST = TypeAdapter(Manifest)


def what_is_wrong(text: str | bytes) -> str:
    """Of a manifest as JSON: the first key whose value is missing or of another type; empty where all is well."""
    try:
        MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""
