"""Write docs/command-line.md and docs/configuration.md, the pages that are made from the code."""

from collections.abc import Iterator
from pathlib import Path

import click
import typer
from typer.testing import CliRunner

from flsim.cli import app

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Command line

This page has the help of every command. `python .ci/reference.py` writes it from the code.

Results go to standard output, and progress and errors to standard error. An error is one line. The exit code is 0 after
success, 2 for wrong input, and 1 where a run or a disk failed. After Ctrl-C it is 130, and after SIGTERM 143.

## Completion

The Tab key completes commands, options and file names in bash and zsh. Set this up once:

    flsim --install-completion

This adds a line to the start file of the shell that you use: `~/.bashrc` or `~/.zshrc`. Then open a new shell.

To change no file, run one of these lines in a shell. It holds until you leave the shell:

    eval "$(_FLSIM_COMPLETE=source_bash flsim)"     # bash
    eval "$(_FLSIM_COMPLETE=source_zsh flsim)"      # zsh, after: autoload -Uz compinit && compinit

`flsim --show-completion` prints the script that completes.
"""


def documents() -> dict[Path, str]:
    """Return the text of each page by its file."""
    return {
        DOCS / "command-line.md": "\n".join(_command_line()),
        DOCS / "configuration.md": _output("settings", "--format", "md"),
    }


def _command_line() -> Iterator[str]:
    yield HEAD
    for path in _paths(typer.main.get_command(app), ()):
        yield f"## {' '.join(('flsim', *path))}\n\n```text\n{_output(*path, '--help').strip()}\n```\n"


def _paths(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from _paths(command.commands[name], (*path, name))


def _output(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, prog_name="flsim", env={"COLUMNS": "80"}, catch_exceptions=False)
    return "".join(f"{line.rstrip()}\n" for line in click.unstyle(done.stdout).splitlines())


if __name__ == "__main__":
    for page, text in documents().items():
        page.write_text(text, encoding="utf-8")
        print(page)
