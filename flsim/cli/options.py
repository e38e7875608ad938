"""Options that several commands share, and the layout of help texts."""

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import click
import typer
from rich.markup import escape
from typer.core import TyperGroup

from flsim.base.errors import InputError
from flsim.base.machine import refuse_missing_device

if TYPE_CHECKING:
    from flsim.show.table import Table

# Headings of `flsim --help`.
START = "Start"
DATA = "Data"
TRAIN = "Train"
MEASURE = "Measure"
TABLES = "Tables and figures"
PANELS = (START, DATA, TRAIN, MEASURE, TABLES)
# Headings of options for machines.
COMMAND_LINE = click.core.ParameterSource.COMMANDLINE
of_machines = partial(typer.Option, rich_help_panel="Machines")

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting, e.g. training.rounds=100; repeatable. `flsim settings` lists all settings. Paths "
        "are relative to the current folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Address = Annotated[
    str | None,
    of_machines(
        metavar="ADDRESS",
        help="Address of a running Ray cluster to join, e.g. auto or 10.0.0.1:6379.",
        show_default="starts Ray on this machine",
    ),
]
AtOnce = Annotated[
    int | None,
    of_machines(
        min=1,
        metavar="N",
        help="Largest number of runs to train at the same time, e.g. 4.",
        show_default="as many as CPU cores and GPUs allow",
    ),
]


def check_device(device: str | None) -> str | None:
    """Return a device that torch has, or raise InputError."""
    if device not in (None, "cpu"):
        refuse_missing_device(str(device), "--device")
    return device


TorchDevice = Annotated[
    str, of_machines(metavar="DEVICE", callback=check_device, help="Device for torch: cpu or cuda.")
]

RUNS = "Run folders and sweep folders, e.g. runs/iid runs/non-iid."
of_point = partial(typer.Option, rich_help_panel="Point in training")
TableOut = Annotated[
    Path | None,
    typer.Option(
        help="File to write, e.g. table.md, with a suffix that fits --format; required for parquet. Replaces an "
        "existing file.",
        show_default="standard output",
    ),
]
Round = Annotated[
    int | None, of_point(help="Evaluated round of each run, e.g. 100.", show_default="the last of each run")
]
Epoch = Annotated[
    float | None,
    of_point(
        help="Evaluation after this many epochs, e.g. 10. In one epoch training reads as many records as the "
        "corpus has, therefore federated and central runs are comparable."
    ),
]


def check_figure(path: Path | None) -> Path | None:
    """Return the path of a figure that a command can write, or raise InputError."""
    if path is not None:
        from flsim.show.figure import refuse_other_than_figure

        refuse_other_than_figure(path)
    return path


FigureOut = Annotated[
    Path | None,
    typer.Option(
        callback=check_figure,
        help="Figure to write in addition, .png, .svg or .pdf, e.g. figure.png; replaces an existing file.",
        show_default="no figure",
    ),
]
CheckpointRound = Annotated[
    int | None, of_point(help="Round of the checkpoint, e.g. 100.", show_default="the newest of each run")
]
ClaimDelta = Annotated[
    float | None,
    typer.Option(help="Delta of the epsilon in the run's ledger, e.g. 1e-6.", show_default="that of each run"),
]
OneSetting = Annotated[bool, typer.Option("--over-seeds", help="Means and intervals over the seeds of each setting.")]

Format = Literal["md", "csv", "latex", "parquet"]  # of a table
SUFFIXES = {"md": (".md", ".txt"), "csv": (".csv",), "latex": (".tex",), "parquet": (".parquet",)}  # of its file
FormatOption = Annotated[
    Format, typer.Option(metavar="FORMAT", help="Format of the output: md, csv, latex or parquet.")
]


def refuse_wrong_output(format: Format, out: Path | None, as_json: bool = False) -> None:
    """Raise InputError for --json with --format, printed Parquet, and a file with the suffix of another format."""
    if as_json and format != "md":
        raise InputError(f"--json and --format {format}: choose one of them")
    if format == "parquet" and out is None:
        raise InputError("--format parquet: cannot be printed; name a file with --out")
    suffixes = (".json",) if as_json else SUFFIXES[format]
    if out is not None and out.suffix.lower() not in ("", *suffixes):  # a device such as /dev/stdout has no suffix
        name = "--json" if as_json else f"--format {format}"
        raise InputError(f"{out}: {name} writes {' or '.join(suffixes)}; use this suffix, or the --format of the file")


def refuse_json_and_csv(as_json: bool, as_csv: bool) -> None:
    """Raise InputError if both --json and --csv are set."""
    if as_json and as_csv:
        raise InputError("--json and --csv: choose one of them")


def write_table(table: "Table", format: Format, out: Path | None, markdown: str | None = None) -> None:
    """Write a table as Parquet, or print or write its text; `markdown` replaces its text in the format md."""
    from flsim.show.table import write_parquet

    if format == "parquet" and out is not None:
        write_parquet(table.frame, out)
    else:
        print_or_write(markdown if format == "md" and markdown is not None else table.text(format), out)


def show(value: Callable[[], object], text: Callable[[], str], as_json: bool) -> None:
    """Print a value as JSON, or a text that ends with a line break."""
    typer.echo(json.dumps(value(), indent=2, allow_nan=False) if as_json else text(), nl=as_json)


def print_or_write(text: str, out: Path | None) -> None:
    """Print a text, or write it to the file of --out, atomically; InputError if the file cannot be written."""
    from flsim.base.files import named_file

    if out is None:
        typer.echo(text, nl=False)
    else:
        with named_file(out) as partial:
            partial.write_text(text, encoding="utf-8")


def given(panel: str) -> list[str]:
    """Return the options of a panel that the command line has."""
    context = click.get_current_context()
    options = [option for option in context.command.params if getattr(option, "rich_help_panel", None) == panel]
    return [option.opts[0] for option in options if context.get_parameter_source(str(option.name)) is COMMAND_LINE]


class InPanels(TyperGroup):
    """A group whose commands are in the order of `PANELS`; typer lists groups such as `data` last."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        names = super().list_commands(ctx)
        panels = {name: getattr(self.commands[name], "rich_help_panel", None) for name in names}
        return sorted(names, key=lambda name: PANELS.index(panels[name]) if panels[name] in PANELS else len(PANELS))


def lay_out(app: typer.Typer) -> None:
    """Give each command of `app` the texts of its docstring: help, with a line per paragraph, options, and examples.

    Rich keeps the line breaks of the source in all paragraphs except the first, and reads brackets as markup.
    """
    for command in app.registered_commands:
        text, _, options = inspect.cleandoc(command.callback.__doc__ or "").partition("\n\nArgs:\n")
        parameters = inspect.signature(command.callback).parameters if command.callback else {}
        for name, described in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", options, re.MULTILINE):
            get_args(parameters[name].annotation)[1].help = " ".join(described.split())
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
        end = next((place for place, text in enumerate(paragraphs) if text.startswith("Example: ")), len(paragraphs))
        command.help, command.epilog = escape("\n\n".join(paragraphs[:end])), "\n\n".join(paragraphs[end:])
