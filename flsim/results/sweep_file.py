"""The types in a sweep.json; other types are refused when the file is read."""

from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

FILE = "sweep.json"
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Published(TypedDict, total=False):
    """A published row; other columns are numbers or texts of the table's own."""

    table: str
    data: str
    optimizer: str
    canaries: Count
    references: Count
    prefix: Count
    length: Count
    rs: Count
    bs: Count


class Run(TypedDict):
    """A run of the sweep."""

    name: str
    grid: str
    seed: Whole
    axes: dict[str, Any]
    published: Published | None


class Session(TypedDict, total=False):
    """A session of work on the sweep."""

    began: str
    seconds: Seconds
    peak_memory: Count | None
    cores: Count | None
    at_once: Count | None
    trained: list[str] | None
    failed: dict[str, str] | None


class Command(TypedDict):
    """A command that added runs, or changed how long runs are."""

    command: str
    runs: list[str]


class SweepFile(TypedDict):
    """The content of sweep.json."""

    name: str
    title: str
    question: str
    tier: str
    about: str
    command: str
    source: str | None
    versions: dict[str, str]
    sessions: list[Session]
    runs: list[Run]
    commands: NotRequired[list[Command]]
    shared: NotRequired[dict[str, Any] | None]
    synthetic: NotRequired[dict[str, Any] | None]
    tuned: NotRequired[str]
    chosen: NotRequired[list[str]]
    grids: NotRequired[list[str]]


SWEEP_FILE = TypeAdapter(SweepFile)


def is_sweep(path: Path) -> bool:
    """Return whether a folder is one of a sweep."""
    return (path / FILE).is_file()
