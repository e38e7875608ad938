"""`flsim bench`: measure how fast flsim is on this machine."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from flsim.base.errors import InputError
from flsim.cli.options import Json, TorchDevice

bench = typer.Typer(
    help="Measure how fast flsim is on this machine.",
    epilog="Example: flsim bench training",
    no_args_is_help=True,
)


@bench.command(epilog="Example: flsim bench training --precision bf16 --json")
def training(
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Python of an environment with pfl-research, such as the one that `make peers` makes.",
            show_default=".venv-peers/bin/python",
        ),
    ] = None,
    precision: Annotated[
        Literal["float32", "bf16"],
        typer.Option(help="Precision of the measured system; other platforms train in float32."),
    ] = "float32",
    as_json: Json = False,
) -> None:
    """Measure users per second of federated training.

    Compares the engines, the whole system, pfl-research and Flower on the same users; the last two also with a plain
    LSTM over padded records, as their own examples have it. Takes about five minutes on two cores.
    """
    from flsim.bench.training import PEERS, bench_training, describe

    measured = bench_training(peers or PEERS, precision=precision)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench central --json")
def central(
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Records in a step; repeatable.", show_default="32 and 256"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="CPU threads for torch.")] = 2,
    precision: Annotated[
        Literal["float32", "tf32", "bf16"],
        typer.Option(help="Precision to train in, beside float32; the plain loop trains in float32."),
    ] = "float32",
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure records per second of central training.

    Compares it with a plain PyTorch loop over the same steps. Takes about two minutes on two cores.
    """
    from flsim.bench.central import CentralBenchHParams, bench_central, describe

    hparams = CentralBenchHParams(
        batch_sizes=tuple(batch or (32, 256)), threads=threads, precisions=("float32", precision)
    )
    measured = bench_central(hparams, device)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench engine --at-once 4 --cohort 8 --both")
def engine(
    at_once: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Users that train at once; repeatable.", show_default="264 on a GPU, 4 on a CPU"
        ),
    ] = None,
    precision: Annotated[
        Literal["float32", "tf32", "bf16"], typer.Option(help='Precision to train in; "tf32" needs a GPU.')
    ] = "bf16",
    cohort: Annotated[int, typer.Option(min=1, metavar="N", help="Users in a round, e.g. 1584.")] = 16,
    both: Annotated[bool, typer.Option("--both", help="Both steps, padded and by position; else the faster.")] = False,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure users per second of stacked users, as on GPUs.

    Of whole rounds, of training and of packing alone, with the memory that they take. `make gpu` measures the same on a
    machine that has only torch, Triton, numpy and pytest.
    """
    from flsim.bench.engine import bench_engine, describe

    steps = (False, True) if both else (None,)
    sizes = at_once or [4 if device == "cpu" else 264]
    measured = bench_engine(device, sizes, [precision], cohort, by_position=steps)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench characters --threads 2 --json")
def characters(
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Lines in a step, e.g. 32.")] = 128,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="CPU threads for torch.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure characters per second of The Secret Sharer's networks.

    Compares central training with a plain PyTorch loop over the same steps. Takes about two minutes on one core.
    """
    from flsim.bench.characters import CharactersBenchHParams, bench_characters, describe

    measured = bench_characters(CharactersBenchHParams(batch_size=batch, threads=threads))
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench data --reader tff-sqlite --reader jsonl --sentences 500000")
def data(
    sentences: Annotated[int, typer.Option(min=400, metavar="N", help="Sentences in each generated file.")] = 2_000_000,
    reader: Annotated[
        list[str] | None,
        typer.Option(help="Format to measure, e.g. tff-sqlite or jsonl; repeatable.", show_default="all formats"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure sentences per second and memory of imports.

    Imports generated files of two sizes in each format. Takes about ten minutes and 2 GB of temporary disk.
    """
    from flsim.bench.data import bench_data, describe

    measured = bench_data(sentences, reader or ())
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench scale --curve cohort --curve shards --figure scale.png")
def scale(
    users: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Training users, each of 2,000 words.", show_default="392000"),
    ] = None,
    curve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Curve to measure instead: cohort, population, shards, nodes, canaries or references; repeatable.",
            show_default="no curve",
        ),
    ] = None,
    day: Annotated[
        bool, typer.Option("--day", help="Compute a day at internet scale from the curve shards, which is measured.")
    ] = False,
    users_per_second: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="RATE",
            help="Users that a client process trains in a second, for --day, e.g. 1000 on a GPU.",
            show_default="measured here",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Figure of the curves to write, e.g. scale.png (.png, .svg or .pdf); replaces an existing file.",
            show_default="no figure",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the work on a corpus of the paper's size, or how cost grows with work.

    Makes the corpus, plants canaries, opens it and its IID twin, and reads cohorts. Takes about two minutes and 5 GB of
    temporary disk.

    A curve measures seconds and memory at several sizes, and fits the exponent of their growth: 1 is linear, 0 is
    constant. It takes one to six minutes on two cores.
    """
    from flsim.bench.scale import PAPER_USERS, bench_scale, describe

    if curve or day:
        if users is not None:
            raise InputError("--users is for the corpus of the paper's size; leave it out with --curve and --day")
        _scale_curves([*(curve or ()), *(["shards"] if day else ())], day, users_per_second, figure, as_json)
        return
    if figure is not None:
        raise InputError(f"--figure {figure}: there is no curve to draw; add --curve, e.g. --curve cohort")
    if users_per_second is not None:
        raise InputError("--users-per-second is for a day at internet scale; add --day, or leave it out")
    measured = bench_scale(users or PAPER_USERS)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


def _scale_curves(
    names: list[str], has_day: bool, users_per_second: float | None, figure: Path | None, as_json: bool
) -> None:
    """Measure curves, print them and draw them; compute a day from them if asked."""
    from flsim.bench.curve_plot import plot_curves
    from flsim.bench.internet import Workload, describe, measure_added_seconds, rates_of, report
    from flsim.bench.scale_curves import measure_curves, measure_users_per_second, refuse_unknown_curves
    from flsim.results.figures import refuse_other_than_figure

    refuse_unknown_curves(names)
    if figure is not None:
        refuse_other_than_figure(figure)
    curves = measure_curves(names)
    computed = None
    if has_day:
        of_clients = users_per_second or measure_users_per_second(), measure_added_seconds(Workload().parameters)
        computed = report(Workload(), rates_of(curves["shards"], *of_clients), curves["shards"])
    if figure is not None:
        plot_curves([*curves.values()], figure)
    if as_json:
        values = {"curves": {name: curve.as_json() for name, curve in curves.items()}}
        typer.echo(json.dumps(values | ({} if computed is None else {"day": computed}), indent=2))
        return
    texts = [curve.table() for curve in curves.values()] + ([] if computed is None else [describe(computed)])
    typer.echo("\n\n".join(texts))


@bench.command(epilog="Example: flsim bench interference --json")
def interference(as_json: Json = False) -> None:
    """Measure how much evaluation slows down training.

    Compares the slowdown with the evaluator's share of the cores. Takes about three minutes.
    """
    from flsim.bench.interference import bench_interference, describe

    measured = bench_interference()
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench evaluation --canaries 90 --references 2000000 --json")
def evaluation(
    canaries: Annotated[int, typer.Option(min=1, metavar="N", help="Number of canaries.")] = 90,
    references: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of references to rank each canary against, |R|.")
    ] = 2_000_000,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure the time to rank canaries by random sampling.

    Compares ranks and decisions with scoring every reference in full. The model has the paper's size and is trained for
    a minute first. On a CPU every tenth canary is ranked.
    """
    from flsim.bench.evaluation import bench_evaluation, describe

    measured = bench_evaluation(canaries, references, device)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench durability --json")
def durability(as_json: Json = False) -> None:
    """Measure what syncing files to disk costs a round.

    Compares rounds with and without syncs, on the disk of the temporary folder. Takes about two minutes.
    """
    from flsim.bench.durability import bench_durability, describe

    measured = bench_durability()
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench alarms --simulations 10000")
def alarms(
    simulations: Annotated[int, typer.Option(min=1, metavar="N", help="Simulations of each bound and truth.")] = 2_000,
    as_json: Json = False,
) -> None:
    """Measure how often lower bounds on epsilon are above the truth.

    Simulates models that know nothing and mechanisms of a known epsilon, for the bounds of flsim audit and those of
    other projects. Takes about two minutes.
    """
    from flsim.bench.alarms import bench_alarms, describe

    measured = bench_alarms(simulations)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: flsim bench forgetting --figures docs")
def forgetting(
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Federated runs on each side, each of 200 repetitions.")
    ] = 5,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Existing folder to write three figures into, e.g. docs; replaces forgetting-*.png there.",
            show_default="no figures",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure when models forget, where theory says it.

    Simulates k-means, training in a known order and federated mean estimation, beside formulas. Takes about half a
    minute.
    """
    from flsim.bench.forgetting import bench_forgetting, describe
    from flsim.bench.forgetting_figures import refuse_other_than_folder, write_figures

    if figures is not None:
        refuse_other_than_folder(figures)
    measured = bench_forgetting(seeds)
    if figures is not None:
        write_figures(measured, figures)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))
