"""`flsim settings`: list the settings of a configuration file, as a table for the terminal or as Markdown."""

import difflib
import textwrap
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flsim.base.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flsim.runs.config.listing import Architecture, Section

NETWORKS_AFTER = "model"  # the section that names one of them
WIDTH = 80
COLUMNS = (20, 16, 22)  # of key, type and default; the unit has the rest
ABOUT = (
    "A configuration is a TOML file with these sections. Every setting has a default but data.corpus; the defaults are "
    "those of Thakkar et al. (2020) as far as the paper states them, which it does not for local training: its batch "
    "size, learning rate and number of epochs are ours. A key that flsim does not know is an error. On the command "
    "line, --set section.key=value replaces a setting, and path/to/file.py:NAME names your own code."
)


class Format(StrEnum):
    """Format of the list."""

    text = "text"
    md = "md"


def settings(
    section: Annotated[
        str | None,
        typer.Argument(
            help="Section to list, e.g. model, or one setting, e.g. model.layers.", show_default="all sections"
        ),
    ] = None,
    format: Annotated[Format, typer.Option(metavar="FORMAT", help="Format of the list: text or md.")] = Format.text,
) -> None:
    """List the settings of a configuration file.

    Each setting has its type, its default, its unit, and what it sets. The list of section model also describes the
    built-in networks.

    Example: flsim settings model

    Example: flsim settings training.rounds

    Example: flsim settings --format md > configuration.md
    """
    from flsim.runs.config.listing import architectures, sections

    listed = _selected(sections(), section)
    networks = architectures() if section in (None, NETWORKS_AFTER) else []
    if format is Format.md:
        typer.echo("\n".join(_markdown(listed, networks, with_title=section is None)))
    else:
        typer.echo("\n".join(_text(listed, networks)))


def _selected(listed: "list[Section]", name: str | None) -> "list[Section]":
    """Return the sections, or the one setting, of a name; InputError where there is none."""
    from dataclasses import replace

    if name is None:
        return listed
    chosen = [section for section in listed if section.name == name]
    for section in listed:
        named = tuple(setting for setting in section.settings if name == _key(section, setting.name))
        chosen += [replace(section, settings=named)] if named else []
    if chosen:
        return chosen
    keys = {_key(section, setting.name) for section in listed for setting in section.settings}
    names = sorted({section.name for section in listed if section.name} | keys)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise InputError(f"{name}: neither a section nor a setting; did you mean {close}?")


def _key(section: "Section", name: str) -> str:
    return f"{section.name}.{name}" if section.name else name


def _title(section: "Section") -> str:
    where = f"[{section.name}]" if section.name else "Outside of sections"
    return where + (f" of {section.kind} training" if section.kind else "")


def _text(listed: "list[Section]", networks: "list[Architecture]") -> list[str]:
    lines: list[str] = []
    for section in listed:
        lines += [_title(section), *_wrapped(section.description, 2), "", _row("Setting", "Type", "Default", "Unit")]
        for setting in section.settings:
            lines += [_row(setting.name, setting.type, setting.default, setting.unit)]
            lines += _wrapped(setting.description, 6)
        if section.name == NETWORKS_AFTER and networks:
            lines += ["", *_wrapped(f"Architectures. {_counted()}", 0), ""]
            for network in networks:
                named = f"  {network.name:<13} {_sizes(network)}"
                lines += textwrap.wrap(named, WIDTH, subsequent_indent=" " * 16)
                lines += _wrapped(network.description, 6)
        lines += [""]
    return lines[:-1]


def _row(*cells: str) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, COLUMNS, strict=False)]
    return f"  {' '.join([*padded, cells[-1]])}".rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _markdown(listed: "list[Section]", networks: "list[Architecture]", with_title: bool) -> list[str]:
    lines = ["# Configuration", "", ABOUT, ""] if with_title else []
    for section in listed:
        lines += [f"## {_title(section)}", ""]
        lines += [section.description, ""] if section.description else []
        lines += ["| Setting | Type | Default | Unit | Meaning |", "|---|---|---|---|---|"]
        for setting in section.settings:
            cells = (f"`{setting.name}`", setting.type, f"`{setting.default}`", setting.unit, setting.description)
            lines += [_markdown_row(cells)]
        lines += [""]
        if section.name == NETWORKS_AFTER and networks:
            lines += ["## Architectures", "", _counted(), "", "| Architecture | Size | Network |", "|---|---|---|"]
            lines += [
                _markdown_row((f"`{network.name}`", _sizes(network), network.description)) for network in networks
            ]
            lines += [""]
    return lines[:-1]


def _markdown_row(cells: "Sequence[str]") -> str:
    return "".join(f"| {cell} " for cell in (cell.replace("|", "\\|") for cell in cells)) + "|"


def _counted() -> str:
    from flsim.runs.config.listing import VOCABULARY

    return f"Parameters are counted at the default sizes, with {VOCABULARY:,} token ids."


def _sizes(network: "Architecture") -> str:
    return f"{network.parameters:,} parameters; reads {', '.join(network.sizes[:-1])} and {network.sizes[-1]}"
