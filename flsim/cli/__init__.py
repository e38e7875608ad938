"""The command line: one call into the platform each. Results on standard output, everything else on standard error."""

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import click
import typer

from flsim.base.errors import InputError, Interrupted, RunFailed
from flsim.base.extensions import naming_own_code
from flsim.cli.bench import bench
from flsim.cli.canaries import EPILOG as CANARIES_EPILOG
from flsim.cli.canaries import canaries
from flsim.cli.compare import EPILOG as COMPARE_EPILOG
from flsim.cli.compare import compare
from flsim.cli.data import data
from flsim.cli.defences import add_defences
from flsim.cli.evaluate import EPILOG, evaluate
from flsim.cli.options import Overrides
from flsim.cli.plan import EPILOG as PLAN_EPILOG
from flsim.cli.plan import plan
from flsim.cli.privacy import privacy
from flsim.cli.quantize import EPILOG as QUANTIZE_EPILOG
from flsim.cli.quantize import quantize
from flsim.cli.report import EPILOG as REPORT_EPILOG
from flsim.cli.report import report
from flsim.cli.results import PLOT_EPILOG, TABLE_EPILOG, plot, table
from flsim.cli.sweep import EPILOG as SWEEP_EPILOG
from flsim.cli.sweep import sweep
from flsim.cli.trace import EPILOG as TRACE_EPILOG
from flsim.cli.trace import trace
from flsim.cli.verify import EPILOG as VERIFY_EPILOG
from flsim.cli.verify import verify

app = typer.Typer(
    name="flsim",
    help="Simulate federated learning, plant canaries, and measure what the model memorized.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
add_defences(data)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
app.command(
    epilog="Example: flsim privacy --users 392000 --cohort 5000 --rounds 7840 --noise-multiplier 1 --delta 1e-7"
)(privacy)
app.command(epilog=EPILOG)(evaluate)
app.command(epilog=QUANTIZE_EPILOG)(quantize)
app.command(epilog=CANARIES_EPILOG)(canaries)
app.command(epilog=TRACE_EPILOG)(trace)
app.command(epilog=VERIFY_EPILOG)(verify)
app.command(epilog=PLAN_EPILOG)(plan)
app.command(epilog=SWEEP_EPILOG)(sweep)
app.command(epilog=TABLE_EPILOG)(table)
app.command(epilog=PLOT_EPILOG)(plot)
app.command(epilog=REPORT_EPILOG)(report)
app.command(epilog=COMPARE_EPILOG)(compare)


@app.command(epilog="Example: flsim demo --out runs/demo")
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for everything; default runs/demo-DATE-TIME.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the corpus, the canaries and the training.")] = 0,
    set_: Overrides = None,
) -> None:
    """Train on a built-in corpus, IID and non-IID, and show what was memorized.

    Ends with a table of both worlds, a paired test on exposure, and a plot of RS, BS, exposure and perplexity.
    """
    from flsim.cli.demo import run_demo

    run_demo(out or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"), seed, set_ or ())


@app.command(epilog="Example: flsim run experiments/demo.toml --set data.world=iid --out runs/iid")
def run(
    config: Annotated[Path, typer.Argument(help="TOML file; see experiments/.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/ and the configuration's name.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the run, e.g. 3 (default as in CONFIG); as --set seed=3.")
    ] = None,
    set_: Overrides = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join, e.g. auto; else a local one.")] = None,
    head: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Start a Ray head there, for other machines to join.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of the local cluster, or head; default all.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its newest valid checkpoint.")
    ] = False,
    retrain_lost: Annotated[
        bool, typer.Option("--retrain-lost", help="With --resume: train rounds again that rounds.jsonl has lost.")
    ] = False,
) -> None:
    """Train one run, evaluating checkpoints meanwhile on Ray, and print its table.

    Federated training is Flower's on Ray; central training (training.kind = "central") a task on Ray.

    SIGTERM and Ctrl-C write a checkpoint and end; --resume goes on from there to the same result.
    """
    import flsim

    path = out or Path("runs") / config.stem
    flsim.run(
        config,
        path,
        overrides=[*(set_ or ()), *([] if seed is None else [f"seed={seed}"])],
        resume=resume,
        retrain_lost=retrain_lost,
        address=address,
        cpus=cpus,
        head=head,
    )
    table([path])


def main() -> None:
    """Entry point, with one line for whatever failed: exit code 2 for bad input, 1 for a run or a disk."""
    signal.signal(signal.SIGTERM, lambda number, _: _fail("terminated", 128 + number))  # what is half-written goes
    try:
        with naming_own_code():
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


def _fail(message: str, code: int) -> None:
    print(f"flsim: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
