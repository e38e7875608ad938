"""Options that several commands share, and how help texts are laid out."""

import inspect
from typing import Annotated

import click
import typer
from rich.markup import escape
from typer.core import TyperGroup

from flsim.base.errors import InputError

# Headings of `flsim --help`.
START = "Start"
DATA = "Data"
TRAIN = "Train"
MEASURE = "Measure"
TABLES = "Tables and figures"
DEVELOPMENT = "Development"
PANELS = (START, DATA, TRAIN, MEASURE, TABLES, DEVELOPMENT)
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


def check_device(device: str) -> None:
    """Raise InputError where torch has no such device."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: torch has none here; use cpu") from error


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
