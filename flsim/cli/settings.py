"""`flsim settings`: list the settings of a configuration file, as a table for the terminal or as Markdown."""

import difflib
import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flsim.base.errors import InputError

if TYPE_CHECKING:
    from flsim.runs.config.listing import Architecture, Section

NETWORKS_AFTER = "model"  # the section that selects a built-in network
WIDTH = 80
COLUMNS = (20, 16, 22)  # widths of key, type and default; the unit has the rest
ABOUT = """\
A configuration is a TOML file with the sections below. Every setting has a default except `data.corpus`. Defaults
follow Thakkar et al. (2020). The paper does not state batch size, learning rate and number of epochs of local training,
so those defaults are flsim's.

A key that flsim does not know is an error. On the command line, `--set section.key=value` replaces a setting. To use
custom code, name it as `path/to/file.py:NAME`. `flsim settings` prints this list in a terminal."""


Format = Literal["text", "md"]


def settings(
    section: Annotated[str | None, typer.Argument(show_default="all sections")] = None,
    format: Annotated[Format, typer.Option(metavar="FORMAT")] = "text",
) -> None:
    """List the settings of a configuration file.

    Prints the type, default, unit and description of each setting. The list of section model also describes the
    built-in networks.

    Example: flsim settings model

    Example: flsim settings training.rounds

    Example: flsim settings --format md > configuration.md

    Args:
        section: Section to list, e.g. model, or one setting, e.g. model.layers.
        format: Format of the list: text or md.
    """
    from flsim.runs.config.listing import architectures, sections

    listed = _selected(sections(), section)
    networks = architectures() if section in (None, NETWORKS_AFTER) else []
    if format == "md":
        typer.echo("\n".join(_markdown(listed, networks, with_title=section is None)))
    else:
        typer.echo("\n".join(_text(listed, networks)))


def _selected(listed: "list[Section]", name: str | None) -> "list[Section]":
    """Return the sections, or the one setting, of a name; InputError if there is none."""
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
    raise InputError(f"{name}: no such section or setting; did you mean {close}?")


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
    """Return the list as lines of Markdown, with a heading per section and a definition list of settings."""
    lines = ["# Configuration", "", ABOUT, ""] if with_title else []
    for section in listed:
        lines += [f"## {_title(section)}", ""]
        lines += [marked(section.description), ""] if section.description else []
        for setting in section.settings:
            facts = [setting.type, f"default `{setting.default}`" if setting.default != "required" else "required"]
            facts += [f"unit: {setting.unit}"] if setting.unit else []
            lines += _entry(setting.name, f"*{'; '.join(facts)}.* {marked(setting.description)}")
        if section.name == NETWORKS_AFTER and networks:
            lines += ["## Architectures", "", _counted(), ""]
            for network in networks:
                lines += _entry(network.name, f"*{_sizes(network)}.* {marked(network.description)}")
    return lines[:-1]


def _entry(term: str, definition: str) -> list[str]:
    return [f"`{term}`", f": {definition}", ""]


def marked(text: str) -> str:
    """Return a sentence of the help as Markdown: options, settings, paths and values as code, without other markup."""
    return " ".join(_marked_word(word) for word in text.split())


def _marked_word(word: str) -> str:
    start, core, end = re.fullmatch(r"([(\"]*)(.*?)([)\",;:.]*)", word).groups()  # type: ignore[union-attr]
    is_code = (
        re.match(r"--?[a-z]|[\w.-]+/[\w{]|\w+://|\{\w", core)
        or re.search(r"\w=\w|[a-z]_[a-z]|\w\.(py|toml|csv|md|jsonl|html|png|txt|h5)\b", core)
        or re.fullmatch(r"[a-z]+(\.[a-z_]+)+|[A-Z]+_[A-Z_]+", core)
    )
    if not is_code or re.search(r"[\^|()]", core) or core in ("e.g", "i.e", "and/or"):
        return re.sub(r"([*_<\[\]|])", r"\\\1", word)
    return f"{start}`{core}`{end}"


def _counted() -> str:
    from flsim.runs.config.listing import VOCABULARY

    return f"Parameters are counted at the default sizes, with {VOCABULARY:,} token ids."


def _sizes(network: "Architecture") -> str:
    parameters = f"{network.parameters:,} parameters; " if network.parameters else ""
    return f"{parameters}reads {', '.join(network.sizes[:-1])} and {network.sizes[-1]}"
