"""The command line: each command is a call of the platform.

Results go to standard output, all other output to standard error.
"""

import platform
import signal
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Annotated

import click
import typer

from flsim.base.errors import InputError, Interrupted, RunFailed, Terminated
from flsim.base.extensions import custom_code_errors, restrict_custom_code
from flsim.cli import attacks, checks, privacy, results, training
from flsim.cli.data import data
from flsim.cli.options import DATA, MEASURE, START, TABLES, TRAIN, InPanels, lay_out

PACKAGES = ("flwr", "ray", "torch")

app = typer.Typer(
    name="flsim",
    cls=InPanels,
    help="Simulate federated learning, and measure what the model memorized.",
    epilog="Start with: flsim demo. Help on one command: flsim COMMAND --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    """Print the versions of flsim, Python and `PACKAGES`, without importing large packages."""
    if is_asked:
        others = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
        typer.echo(f"flsim {_version('flsim-memorization')}\nPython {platform.python_version()}, {others}")
        raise typer.Exit


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def _version_option(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print versions of main packages, and exit."
        ),
    ] = False,
) -> None:
    """Define the options of `flsim`; typer reads this signature."""


COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    START: (training.demo, training.settings),
    TRAIN: (training.run, training.sweep, training.tune, privacy.plan, checks.verify),
    MEASURE: (
        *(checks.evaluate, checks.quantize, checks.export, privacy.privacy),
        *(attacks.audit, attacks.forgetting, attacks.membership, attacks.extract, attacks.reveal),
    ),
    TABLES: (results.table, results.plot, results.canaries, results.compare, results.trace, results.report),
}
# Commands that read runs do not execute code of a run, except for custom models; docs/security.md lists them.
READING = {
    attacks.audit,
    attacks.forgetting,
    results.table,
    results.plot,
    results.compare,
    results.trace,
    results.report,
}
OF_MODEL = {attacks.membership, attacks.extract, results.canaries}
for panel, commands in COMMANDS.items():
    for command in commands:
        if command in READING:
            command = restrict_custom_code()(command)
        elif command in OF_MODEL:
            command = restrict_custom_code("architecture", "attack")(command)
        app.command(rich_help_panel=panel)(command)
app.add_typer(data, name="data", rich_help_panel=DATA)
for group in (app, data):
    lay_out(group)


def main() -> None:
    """Run the command that `sys.argv` names, and exit.

    An error is one line on standard error. The exit code is 2 for bad input, 1 if a run or a disk failed.
    """
    # SystemExit lets `finally` remove temporary files, unlike the default action of the signal.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with custom_code_errors(with_all_exits=False):
            code = app(standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "flsim"
        _fail(f"{error.format_message()} (see {command} --help)", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except InputError as error:
        _fail(str(error), 2)
    except Interrupted as error:
        _fail(str(error), 128 + error.signal)
    except RunFailed as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"{error.filename or 'disk'}: {error.strerror or error}", 1)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    else:
        sys.exit(code)


def _terminate(number: int, _: FrameType | None) -> None:
    _print_error("terminated")
    raise Terminated(128 + number)


def _fail(message: str, code: int) -> None:
    _print_error(message)
    sys.exit(code)


def _print_error(message: str) -> None:
    print(f"flsim: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
