"""The command line: each command is one call into the platform.

Results go to standard output, everything else to standard error.
"""

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import click
import typer

from flsim.base.errors import InputError, Interrupted, RunFailed, Terminated
from flsim.base.extensions import custom_code_errors, restrict_custom_code
from flsim.cli.audit import EPILOG as AUDIT_EPILOG
from flsim.cli.audit import audit
from flsim.cli.canaries import EPILOG as CANARIES_EPILOG
from flsim.cli.canaries import canaries
from flsim.cli.compare import EPILOG as COMPARE_EPILOG
from flsim.cli.compare import compare
from flsim.cli.data import data
from flsim.cli.defences import add_defences
from flsim.cli.evaluate import EPILOG, evaluate
from flsim.cli.extract import EPILOG as EXTRACT_EPILOG
from flsim.cli.extract import extract
from flsim.cli.forgetting import EPILOG as FORGETTING_EPILOG
from flsim.cli.forgetting import forgetting
from flsim.cli.making import add_making
from flsim.cli.membership import EPILOG as MEMBERSHIP_EPILOG
from flsim.cli.membership import membership
from flsim.cli.options import (
    DATA,
    MACHINES,
    MEASURE,
    START,
    TABLES,
    TRAIN,
    Address,
    InPanels,
    Overrides,
    lay_out,
)
from flsim.cli.plan import EPILOG as PLAN_EPILOG
from flsim.cli.plan import plan
from flsim.cli.privacy import EPILOG as PRIVACY_EPILOG
from flsim.cli.privacy import privacy
from flsim.cli.quantize import EPILOG as QUANTIZE_EPILOG
from flsim.cli.quantize import quantize
from flsim.cli.report import EPILOG as REPORT_EPILOG
from flsim.cli.report import report
from flsim.cli.results import PLOT_EPILOG, TABLE_EPILOG, plot, table
from flsim.cli.settings import EPILOG as SETTINGS_EPILOG
from flsim.cli.settings import settings
from flsim.cli.sweep import EPILOG as SWEEP_EPILOG
from flsim.cli.sweep import sweep
from flsim.cli.trace import EPILOG as TRACE_EPILOG
from flsim.cli.trace import trace
from flsim.cli.tune import EPILOG as TUNE_EPILOG
from flsim.cli.tune import tune
from flsim.cli.verify import EPILOG as VERIFY_EPILOG
from flsim.cli.verify import verify
from flsim.cli.version import version_text

CONTINUE = "Continue a run"
RUN_EPILOG = """Example: flsim run experiments/demo.toml --set data.partition=iid --out runs/iid

Example: flsim run experiments/demo.toml --out runs/demo --resume"""

app = typer.Typer(
    name="flsim",
    cls=InPanels,
    help="Simulate federated learning, and measure what the model memorized.",
    epilog="Start with: flsim demo. Help on one command: flsim COMMAND --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print versions of main packages, and exit.",
        ),
    ] = False,
) -> None:
    """Take the options of `flsim` itself; typer reads this signature."""


@app.command(rich_help_panel=START, epilog="Example: flsim demo --out runs/demo")
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for everything, e.g. runs/demo.", show_default="runs/demo-DATE-TIME"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the corpus, the canaries and the training.")] = 0,
    set_: Overrides = None,
) -> None:
    """Train on a built-in corpus and show what was memorized.

    Trains twice: on IID users and on non-IID users. Prints a table of both runs and a paired test on exposure. Plots
    perplexity, exposure, and how many canaries Random Sampling (RS) and Beam Search (BS) extract. Takes about a minute
    on two cores.
    """
    from flsim.cli.demo import run_demo

    run_demo(out or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"), seed, set_ or ())


app.command(rich_help_panel=START, epilog=SETTINGS_EPILOG)(settings)
app.add_typer(data, name="data", rich_help_panel=DATA)


@app.command(rich_help_panel=TRAIN, epilog=RUN_EPILOG)
def run(
    config: Annotated[Path, typer.Argument(help="TOML file of the run, e.g. experiments/demo.toml.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder, e.g. runs/iid; new, or with --resume an old one.", show_default="runs/CONFIG"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Seed of the run, as with --set seed=N.", show_default="as in CONFIG"),
    ] = None,
    set_: Overrides = None,
    address: Address = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of this machine at which to start a Ray head that other machines join, e.g. 10.0.0.1:6379.",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="CPU cores for the Ray that this command starts, e.g. 8.",
            show_default="all",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Train in this process, without Ray: sooner begun, with the same result.",
            rich_help_panel=MACHINES,
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in --out from its newest valid checkpoint.", rich_help_panel=CONTINUE
        ),
    ] = False,
    retrain_lost: Annotated[
        bool,
        typer.Option(
            "--retrain-lost",
            help="With --resume: train those rounds again that are missing from rounds.jsonl.",
            rich_help_panel=CONTINUE,
        ),
    ] = False,
    begin_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Run of the other canaries.arm, e.g. runs/in: its rounds before the first window are taken over.",
            rich_help_panel=CONTINUE,
        ),
    ] = None,
) -> None:
    """Train one run on Ray, and print its table.

    Checkpoints are evaluated while training goes on. The file says whether training is federated (Flower on Ray) or
    central (training.kind = "central").

    SIGTERM and Ctrl-C write a checkpoint and end the run. With --resume the run goes on from there, to the same result.
    """
    import flsim

    path = out or Path("runs") / config.stem
    flsim.run(
        config,
        path,
        overrides=[*(set_ or ()), *([] if seed is None else [f"seed={seed}"])],
        resume=resume,
        retrain_lost=retrain_lost,
        begin_from=begin_from,
        address=address,
        cpus=cpus,
        head=head,
        in_process=in_process,
    )
    table([path])


app.command(rich_help_panel=TRAIN, epilog=SWEEP_EPILOG)(sweep)
app.command(rich_help_panel=TRAIN, epilog=TUNE_EPILOG)(tune)
app.command(rich_help_panel=TRAIN, epilog=PLAN_EPILOG)(plan)
app.command(rich_help_panel=TRAIN, epilog=VERIFY_EPILOG)(verify)
app.command(rich_help_panel=MEASURE, epilog=EPILOG)(evaluate)
app.command(rich_help_panel=MEASURE, epilog=QUANTIZE_EPILOG)(quantize)
# Commands that read runs execute no code of a run, except that some need a custom model; docs/security.md lists them.
reading, of_model = restrict_custom_code(), restrict_custom_code("architecture", "attack")
app.command(rich_help_panel=MEASURE, epilog=PRIVACY_EPILOG)(privacy)
app.command(rich_help_panel=MEASURE, epilog=AUDIT_EPILOG)(reading(audit))
app.command(rich_help_panel=MEASURE, epilog=FORGETTING_EPILOG)(reading(forgetting))
app.command(rich_help_panel=MEASURE, epilog=MEMBERSHIP_EPILOG)(of_model(membership))
app.command(rich_help_panel=MEASURE, epilog=EXTRACT_EPILOG)(of_model(extract))
app.command(rich_help_panel=TABLES, epilog=TABLE_EPILOG)(reading(table))
app.command(rich_help_panel=TABLES, epilog=PLOT_EPILOG)(reading(plot))
app.command(rich_help_panel=TABLES, epilog=CANARIES_EPILOG)(of_model(canaries))
app.command(rich_help_panel=TABLES, epilog=COMPARE_EPILOG)(reading(compare))
app.command(rich_help_panel=TABLES, epilog=TRACE_EPILOG)(reading(trace))
app.command(rich_help_panel=TABLES, epilog=REPORT_EPILOG)(reading(report))
add_making(data)
add_defences(data)
for commands in (app, data):
    lay_out(commands)


def main() -> None:
    """Run the command that `sys.argv` names, and exit.

    An error is one line on standard error. The exit code is 2 for bad input, 1 where a run or a disk failed.
    """
    # SystemExit, unlike death by the signal, lets `finally` remove files that are half-written.
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
