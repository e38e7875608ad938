"""The command line: one call into the platform each. Results on standard output, everything else on standard error."""

import importlib
import json
import shutil
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from flsim.errors import InputError, RunFailed

app = typer.Typer(
    name="flsim",
    help="Simulate federated learning, plant canaries, and measure what the model memorized.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Make and inspect corpora.", no_args_is_help=True)
app.add_typer(data, name="data")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, as section.key=value; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class Format(StrEnum):
    """How a table is written."""

    md = "md"
    csv = "csv"
    latex = "latex"
    parquet = "parquet"


class Benchmark(StrEnum):
    """What `flsim bench` measures."""

    training = "training"


@app.command(epilog="Example: flsim demo --out runs/demo")
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for everything; default runs/demo-DATE-TIME.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the corpus, the canaries and the training.")] = 0,
    set_: Overrides = None,
) -> None:
    """Train on a built-in corpus, IID and non-IID, and show what was memorized.

    Ends with a table of both worlds, a paired test on exposure, and a plot of RS, BS and exposure against rounds.
    """
    from flsim.demo import run_demo

    run_demo(out or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"), seed, set_ or ())


@data.command("import", epilog="Example: flsim data import dumps/*.Posts.xml --out corpora/stackexchange")
def import_(
    sources: Annotated[
        list[Path], typer.Argument(help="Stack Exchange Posts.xml or JSON lines; several are one corpus.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new corpus.")],
    vocabulary: Annotated[int, typer.Option(help="Token ids, the four special ones included.")] = 10_000,
    words_per_user: Annotated[int, typer.Option(help="Words of a balanced user.")] = 2_000,
    heldout: Annotated[float, typer.Option(help="Share of authors kept out of training for attacks.")] = 0.1,
    test: Annotated[float, typer.Option(help="Share of authors kept out of training to measure utility.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Decides which authors are kept out.")] = 0,
    format: Annotated[str | None, typer.Option(help="stackexchange or jsonl; detected where not given.")] = None,
    as_json: Json = False,
) -> None:
    """Turn a dump into a corpus of balanced users."""
    from flsim.data.importing import ImportHParams, import_corpus
    from flsim.data.inspect import inspect

    hparams = ImportHParams(
        vocabulary_size=vocabulary, words_per_user=words_per_user, heldout=heldout, test=test, seed=seed
    )
    _print(inspect(import_corpus(sources, out, hparams, format)), as_json)


@data.command(epilog="Example: flsim data synthetic --out corpora/small --users 400 --words-per-user 250")
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder of the new corpus.")],
    users: Annotated[int, typer.Option(help="Training users.")] = 400,
    words_per_user: Annotated[int, typer.Option(help="Words of each user.")] = 250,
    vocabulary: Annotated[int, typer.Option(help="Token ids, the four special ones included.")] = 600,
    heterogeneity: Annotated[
        float, typer.Option(help="Dirichlet concentration of users' topics: small is heterogeneous.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Another seed, another corpus.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a corpus of random text: Zipf words, topics with their own word order, users with their own topics."""
    from flsim.data.inspect import inspect
    from flsim.data.synthetic import SyntheticHParams, make_synthetic

    hparams = SyntheticHParams(
        users=users, words_per_user=words_per_user, vocabulary_size=vocabulary, heterogeneity=heterogeneity
    )
    _print(inspect(make_synthetic(out, hparams, seed)), as_json)


@data.command("inspect", epilog="Example: flsim data inspect corpora/stackexchange --json")
def inspect_(corpus: Annotated[Path, typer.Argument(help="Folder of a corpus.")], as_json: Json = False) -> None:
    """Say what a corpus holds, and what was dropped on the way into it."""
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect

    _print(inspect(Corpus.open(corpus, verify=True)), as_json)


@app.command(epilog="Example: flsim run experiments/demo.toml --set data.world=iid --out runs/iid")
def run(
    config: Annotated[Path, typer.Argument(help="TOML file; see experiments/.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/ and the configuration's name.")] = None,
    set_: Overrides = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join, e.g. auto; else a local one.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its newest checkpoint.")
    ] = False,
) -> None:
    """Train one run with Flower on Ray, evaluating checkpoints meanwhile, and print its table."""
    from flsim.config import load
    from flsim.runs import Run

    settings = load(config, set_ or ())
    path = out or Path("runs") / config.stem
    training = Run.reopen(settings, path) if resume else Run.create(settings, path)
    try:
        importlib.import_module("server.launch").simulate(training, address)
    except InputError:
        if not (path / "rounds.jsonl").exists():  # nothing was trained: no cluster there, or none large enough
            shutil.rmtree(path)
        raise
    table([path])


@app.command(epilog="Example: flsim evaluate runs/demo/checkpoints/round-000100.safetensors --json")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run.")],
    of: Annotated[Path | None, typer.Option("--run", help="Its run folder; default the one it lies in.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure a checkpoint again, without Ray. Rows are stored in the run; the same ones change nothing."""
    from flsim.data.corpus import Corpus
    from flsim.results.rows import frame
    from flsim.runs import Run, evaluate_checkpoint

    if not checkpoint.is_file():
        raise InputError(f"{checkpoint}: no such checkpoint")
    folder = of or checkpoint.resolve().parent.parent
    Corpus.open(Run.open(folder).config.data.corpus, verify=True)
    rows = frame(evaluate_checkpoint(folder, checkpoint, device))
    if as_json:
        typer.echo(rows.to_json(orient="records"))
    else:
        typer.echo(rows.pivot(index="canary", columns="metric", values="value").to_string(na_rep=""))


@app.command(epilog="Example: flsim table runs/iid runs/non-iid --format csv")
def table(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    format: Annotated[Format, typer.Option(help="Of the table.")] = Format.md,
    out: Annotated[Path | None, typer.Option(help="File to write; needed for parquet, else standard output.")] = None,
    round: Annotated[int | None, typer.Option(help="Evaluated round to show; default each run's last.")] = None,
) -> None:
    """Tabulate what runs memorized, in the paper's columns."""
    from flsim.files import new_file
    from flsim.results import tables
    from flsim.results.store import read_run

    results = tables.memorization_table([read_run(path) for path in runs], round)
    if format is Format.parquet:
        if out is None:
            raise InputError("--format parquet: not for a terminal; name a file with --out")
        tables.write_parquet(results, out)
        return
    text = {Format.md: tables.to_markdown, Format.csv: tables.to_csv, Format.latex: tables.to_latex}[format](results)
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        with new_file(out) as partial:
            partial.write_text(text, encoding="utf-8")


@app.command(epilog="Example: flsim bench training --json")
def bench(
    what: Annotated[Benchmark, typer.Argument(help="What to measure.")] = Benchmark.training,
    as_json: Json = False,
) -> None:
    """Measure how fast the platform is here: figures side by side in one run."""
    from flsim.bench import bench_training

    measured = {Benchmark.training: bench_training}[what]()
    if as_json:
        typer.echo(json.dumps(measured, indent=2))
        return
    typer.echo(f"unit: {measured['unit']}")
    for name, rate in measured["users_per_second"].items():
        typer.echo(f"{name:<8} {rate:6.2f} users/s")
    typer.echo(f"system is {measured['ratio']:.2f} times local, with {measured['clients']} clients")


def _print(values: dict[str, Any], as_json: bool) -> None:
    from flsim.data.inspect import describe

    typer.echo(json.dumps(values, indent=2) if as_json else describe(values))


def main() -> None:
    """Entry point: exit code 2 and one line for bad input, 1 and one line for a run or a disk that failed."""
    try:
        code = app(standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "flsim"
        _fail(f"{error.format_message()} (see {command} --help)", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except InputError as error:
        _fail(str(error), 2)
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
