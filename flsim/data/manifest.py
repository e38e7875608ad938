"""The manifest.json of a corpus: its files and values, whose types are checked when it is read."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from flsim.base.errors import InputError
from flsim.base.files import from_json
from flsim.data.records import TOKENIZER, By, Layout, token_type_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA = 2
SPLITS = ("train", "heldout", "test")
# Further splits of an import that cuts authors into users: the same test and held-out authors, complete.
WHOLE = {"heldout": "heldout-whole", "test": "test-whole"}
TOKEN_FILES = {"uint16": ("tokens.u16", "<u2"), "uint32": ("tokens.u32", "<u4")}  # file and its values, by type
UNNAMED = "uint16"  # the type if a manifest has none, as in older manifests
FLAT_FILES = ("records.i64", "users.i64", "names.json")
PROMPTS = "prompts.u32"  # of layouts with prompts
# Files of a tokenizer with its special tokens or templates of chats.
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PLANTED = tuple(f"planted/{name}" for name in ("roster.parquet", "overlay.i64", "overlay.u16", "planting.json"))
Sealed = dict[str, tuple[int, str]]


class LayoutDescription(TypedDict):
    """A `flsim.data.records.Layout` as JSON, without defaults; see `description_of`."""

    vocabulary_size: int
    record_words: int
    name: str
    pieces: NotRequired[int]
    prompts: NotRequired[bool]
    tokens: NotRequired[Literal["uint16", "uint32"]]


class Step(TypedDict):
    """A step that made a corpus from another corpus, with further keys that depend on the step."""

    label: NotRequired[str]


class SourceEntry(TypedDict):
    name: str
    bytes: int
    format: NotRequired[str]


class Parameters(TypedDict):
    """The parameters of a corpus that are checked when it is read."""

    by: NotRequired[By]
    read: NotRequired[dict[str, int]]
    steps: NotRequired[list[Step]]


class File(TypedDict):
    bytes: int
    sha256: str


class Manifest(TypedDict):
    schema: Any
    layout: LayoutDescription
    dropped: dict[str, int]
    sources: list[SourceEntry]
    parameters: Parameters
    files: dict[str, File]
    warnings: NotRequired[list[str]]
    notes: NotRequired[list[str]]


@cache
def _checker() -> "TypeAdapter[Manifest]":
    from pydantic import TypeAdapter  # not at the top, because splits and layouts need only torch and numpy

    return TypeAdapter(Manifest)


def splits_in(files: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a corpus' splits: `SPLITS`, then those of `WHOLE` that have files."""
    folders = {name.partition("/")[0] for name in files}
    return (*SPLITS, *(split for split in WHOLE.values() if split in folders))


def named(layout: Layout, splits: Iterable[str] = SPLITS) -> tuple[str, ...]:
    """Return the names of the files that every corpus with this layout and these splits has."""
    prompts = (PROMPTS,) if layout.prompts else ()
    files = (TOKEN_FILES[layout.token_type][0], *FLAT_FILES, *prompts, "split.json")
    cut = ("tokens.i64", "tokenizer/tokenizer.json") if layout.name == TOKENIZER else ()
    return ("vocabulary.tsv", *cut, *(f"{split}/{name}" for split in splits for name in files))


def layout_in(described: dict[str, Any]) -> Layout:
    layout = dict(described["layout"])
    more = int(layout.get("pieces", 0)), bool(layout.get("prompts", False))
    return Layout(int(layout["vocabulary_size"]), int(layout["record_words"]), str(layout["name"]), *more)


def description_of(layout: Layout) -> dict[str, Any]:
    """Return a layout in the form of a manifest, without defaults that older manifests lack, so digests stay equal."""
    described = {name: value for name, value in asdict(layout).items() if value or name not in ("pieces", "prompts")}
    return described | ({} if layout.token_type == UNNAMED else {"tokens": layout.token_type})


def by_in(manifest: dict[str, Any]) -> By:
    """Return whether the words of a corpus are words, which is the default, or single characters."""
    return cast(By, manifest["parameters"].get("by", "words"))


def read_manifest(text: str | bytes, source: object) -> tuple[dict[str, Any], Sealed]:
    from pydantic import ValidationError

    try:
        manifest = from_json(text)
        schema = manifest["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{source}: not a corpus; make one with `flsim data import`") from error
    if schema != SCHEMA:
        raise InputError(
            f"{source}: corpus schema {schema!s:.40}, but this version reads {SCHEMA}; import the corpus again"
        )
    try:
        _checker().validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InputError(f"{source}: its manifest is damaged ({wrong:.200}); import the corpus again") from error
    sealed = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
    tokens, size = str(manifest["layout"].get("tokens", UNNAMED)), manifest["layout"]["vocabulary_size"]
    if tokens != token_type_of(size):
        raise InputError(
            f"{source}: its manifest has tokens of type {tokens}, but {size:,} ids need {token_type_of(size)}; "
            "import the corpus again"
        )
    for name in named(layout_in(manifest), splits_in(sealed)):
        if name not in sealed:
            raise InputError(f"{source}: its manifest has no entry for {name}; import the corpus again")
    return manifest, sealed
