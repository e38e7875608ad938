"""The help of every command: examples, panels, whole sentences, 80 columns, and pages of docs/ that are current."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import typer
from helpers import Flsim
from rich.text import Text

from flsim.cli import app
from flsim.cli.options import PANELS

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command by its path, groups included."""
    yield path, command
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from commands(part, (*path, name))


COMMANDS = dict(commands(GROUP))


def name_of(path: tuple[str, ...]) -> str:
    return " ".join(("flsim", *path))


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_help_has_an_example_and_fits_80_columns(path: tuple[str, ...], flsim: Flsim) -> None:
    code, out, err = flsim(*path, "--help")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    example = name_of(path) if path else "flsim demo"
    assert re.search(rf"(Example|Start with): .*{example}", out)


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_every_option_has_a_sentence_that_is_printed_as_written(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        text = getattr(parameter, "help", None) or ""
        assert re.fullmatch(r"[A-Z].*\.", text), (parameter.name, text)
        assert not text.startswith("Of "), (parameter.name, text)
        assert Text.from_markup(text).plain == text  # brackets would be read as markup


def test_the_first_page_groups_all_commands_and_fits_a_terminal(flsim: Flsim) -> None:
    _, out, _ = flsim("--help")
    lines = out.splitlines()
    assert len(lines) <= 50
    assert [match[1] for line in lines if (match := re.match(r"╭─ ([\w ]+?) ─", line))] == ["Options", *PANELS]
    assert {path[0] for path in COMMANDS if path} == set(re.findall(r"^│ (\w+) ", out, re.MULTILINE))


def test_version_names_the_main_packages_without_importing_them(flsim: Flsim) -> None:
    code, out, _ = flsim("--version")
    assert (code, out.splitlines()[0]) == (0, f"flsim {version('flsim-memorization')}")
    assert f"torch {version('torch')}" in out
    loads = "import sys, flsim.cli as cli; cli._version('torch'); print({'flwr', 'ray', 'torch'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", loads], text=True, cwd=ROOT) == "set()\n"


def test_the_pages_that_are_made_from_the_code_are_current() -> None:
    """Where this fails, run: python .ci/reference.py."""
    for page, text in runpy.run_path(str(ROOT / ".ci" / "reference.py"))["documents"]().items():
        assert page.read_text(encoding="utf-8") == text, page
