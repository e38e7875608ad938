"""`flsim bench`: how fast the platform is here, figures side by side in one run."""

import json
from typing import Annotated

import typer

from flsim.cli.options import Json

bench = typer.Typer(help="Measure how fast the platform is here.", no_args_is_help=True)


@bench.command(epilog="Example: flsim bench training --json")
def training(as_json: Json = False) -> None:
    """Users per second of the engine alone and of the whole system."""
    from flsim.bench.training import bench_training, describe

    measured = bench_training()
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench data --reader tff-sqlite --reader jsonl --sentences 500000")
def data(
    sentences: Annotated[int, typer.Option(min=400, help="Sentences in each generated file.")] = 2_000_000,
    reader: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Sentences per second and peak memory of an import, by format, at two sizes.

    Takes about ten minutes and 2 GB of disk in the folder for temporary files.
    """
    from flsim.bench.data import bench_data, describe

    measured = bench_data(sentences, reader or ())
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench scale --users 10000")
def scale(
    users: Annotated[int, typer.Option(min=1, help="Training users of 2,000 words; default the paper's.")] = 392_000,
    as_json: Json = False,
) -> None:
    """A corpus of the paper's size: made, planted, opened, its IID twin too, cohorts read.

    Takes about two minutes and 5 GB of disk in the folder for temporary files.
    """
    from flsim.bench.scale import bench_scale, describe

    measured = bench_scale(users)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))
