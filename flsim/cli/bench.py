"""`flsim bench`: how fast the platform is here, figures side by side in one run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import Json

bench = typer.Typer(help="Measure how fast the platform is here.", no_args_is_help=True)


@bench.command(epilog="Example: flsim bench training --json")
def training(
    peers: Annotated[
        Path | None, typer.Option(help="Python that has pfl-research; default .venv-peers, which `make peers` makes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Users per second of the engines, of the whole system, and of pfl-research and Flower on the same users.

    Takes about three minutes on two processors.
    """
    from flsim.bench.training import PEERS, bench_training, describe

    measured = bench_training(peers or PEERS)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench central --json")
def central(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Records in a step, repeatable; default 32, 256.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, on a CPU.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Records per second of central training, against a plain PyTorch loop over the same steps.

    Takes about two minutes on two processors.
    """
    from flsim.bench.central import CentralBenchHParams, bench_central, describe

    hparams = CentralBenchHParams(batch_sizes=tuple(batch or (32, 256)), threads=threads)
    measured = bench_central(hparams, device)
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


@bench.command(epilog="Example: flsim bench interference --json")
def interference(as_json: Json = False) -> None:
    """How much evaluation beside training slows it, against the evaluator's share of the processors.

    Takes about three minutes.
    """
    from flsim.bench.interference import bench_interference, describe

    measured = bench_interference()
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench evaluation --canaries 90 --references 2000000 --json")
def evaluation(
    canaries: Annotated[int, typer.Option(min=1, help="Canaries to decide on.")] = 90,
    references: Annotated[int, typer.Option(min=1, help="|R|, number of random continuations.")] = 2_000_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Exact ranks and decisions of random sampling, against scoring every reference in full.

    The model is the full one in mid-training, which takes about a minute to make. On a CPU every tenth canary is
    ranked.
    """
    from flsim.bench.evaluation import bench_evaluation, describe

    measured = bench_evaluation(canaries, references, device)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench durability --json")
def durability(as_json: Json = False) -> None:
    """What it costs a round that its files are synced to the disk, beside rounds without syncs.

    Takes about two minutes, and measures the disk of the folder for temporary files.
    """
    from flsim.bench.durability import bench_durability, describe

    measured = bench_durability()
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))
