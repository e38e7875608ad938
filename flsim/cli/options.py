"""Options that several commands share, and how help texts are laid out."""

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.markup import escape
from typer.core import TyperGroup

from flsim.base.errors import InputError
from flsim.base.machine import refuse_missing_device

# Headings of `flsim --help`.
START = "Start"
DATA = "Data"
TRAIN = "Train"
MEASURE = "Measure"
TABLES = "Tables and figures"
PANELS = (START, DATA, TRAIN, MEASURE, TABLES)
# Headings of options that concern the machines.
MACHINES = "Machines"

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting, e.g. training.rounds=100; repeatable. flsim settings lists all. Paths are relative "
        "to the current folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of a running Ray cluster to join, e.g. auto or 10.0.0.1:6379.",
        show_default="starts Ray on this machine",
        rich_help_panel=MACHINES,
    ),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Largest number of runs to train at the same time, e.g. 4.",
        show_default="as many as CPU cores and GPUs allow",
        rich_help_panel=MACHINES,
    ),
]
TorchDevice = Annotated[
    str, typer.Option(metavar="DEVICE", help="Device for torch: cpu or cuda.", rich_help_panel=MACHINES)
]


class Format(StrEnum):
    """Format of a table."""

    md = "md"
    csv = "csv"
    latex = "latex"
    parquet = "parquet"


FormatOption = Annotated[
    Format, typer.Option(metavar="FORMAT", help="Format of the output: md, csv, latex or parquet.")
]


def refuse_two_prints(format: Format, out: Path | None, as_json: bool = False) -> None:
    """Raise InputError where --json and --format both say how to print, or where Parquet would be printed."""
    if as_json and format is not Format.md:
        raise InputError(f"--json and --format {format}: choose one of them")
    if format is Format.parquet and out is None:
        raise InputError("--format parquet: not for a terminal; name a file with --out")


def refuse_json_and_csv(as_json: bool, as_csv: bool) -> None:
    """Raise InputError where both are set, as each says how to print."""
    if as_json and as_csv:
        raise InputError("--json and --csv: choose one of them")


def print_or_write(text: str, out: Path | None) -> None:
    """Print a text, or write it to the file of --out, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    from flsim.base.files import named_file

    if out is None:
        typer.echo(text, nl=False)
    else:
        with named_file(out) as partial:
            partial.write_text(text, encoding="utf-8")


def check_device(device: str) -> None:
    """Raise InputError where torch has no such device."""
    refuse_missing_device(device, "--device")


class InPanels(TyperGroup):
    """A group whose commands are in the order of `PANELS`; typer would list groups such as `data` last."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        names = super().list_commands(ctx)
        panels = {name: getattr(self.commands[name], "rich_help_panel", None) for name in names}
        return sorted(names, key=lambda name: PANELS.index(panels[name]) if panels[name] in PANELS else len(PANELS))


def lay_out(app: typer.Typer) -> None:
    """Give each command of `app` its docstring as help text, with each paragraph on one line.

    Rich keeps the line breaks of the source in all paragraphs but the first, and reads brackets as markup.
    """
    for command in app.registered_commands:
        paragraphs = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
        command.help = escape("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
