"""`flsim settings`: list the settings of a configuration file."""

import difflib
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from flsim.base.errors import InputError

if TYPE_CHECKING:
    from flsim.runs.config.listing import Section

WIDTH = 80
COLUMNS = (20, 16, 22)  # widths of key, type and default; the unit has the rest


def settings(section: Annotated[str | None, typer.Argument(show_default="all sections")] = None) -> None:
    """List the settings of a configuration file.

    Prints the type, default, unit and description of each setting. The list of section model also describes the
    built-in networks.

    Example: flsim settings model

    Example: flsim settings training.rounds

    Args:
        section: Section to list, e.g. model, or one setting, e.g. model.layers.
    """
    from flsim.runs.config.listing import sections

    typer.echo("\n".join(_text(_selected(sections(), section))))


def _selected(listed: "list[Section]", name: str | None) -> "list[Section]":
    """Return the sections, or the one setting, of a name; InputError if there is none."""
    from dataclasses import replace

    if name is None:
        return listed
    chosen = [section for section in listed if section.name == name]
    for section in listed:
        named = tuple(setting for setting in section.settings if name == section.key(setting))
        chosen += [replace(section, settings=named)] if named else []
    if chosen:
        return chosen
    keys = {section.key(setting) for section in listed for setting in section.settings}
    names = sorted({section.name for section in listed if section.name} | keys)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise InputError(f"{name}: no such section or setting; did you mean {close}?")


def _text(listed: "list[Section]") -> list[str]:
    lines: list[str] = []
    for section in listed:
        lines += [section.title, *_wrapped(section.description, 2), "", _row("Setting", "Type", "Default", "Unit")]
        for setting in section.settings:
            lines += [_row(setting.name, setting.type, setting.default, setting.unit)]
            lines += _wrapped(setting.description, 6)
        lines += [""]
    return lines[:-1]


def _row(*cells: str) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, COLUMNS, strict=False)]
    return f"  {' '.join([*padded, cells[-1]])}".rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)
