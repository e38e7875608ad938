"""The benchmarks, as commands: `python -m benchmarks training`; see `python -m benchmarks --help`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flsim.base.errors import InputError, RunFailed
from flsim.cli.options import Json, TorchDevice

bench = typer.Typer(
    name="python -m benchmarks",
    help="Measure the speed of flsim on this machine, from a checkout of the project.",
    epilog="Example: python -m benchmarks training",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@bench.command(epilog="Example: python -m benchmarks training --precision bf16 --json")
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

    Compares the engines, the complete system, pfl-research and Flower on the same users; the last two also with a plain
    LSTM over padded records, as in their examples. Takes about five minutes on two cores.
    """
    from benchmarks.training import PEERS, bench_training, describe

    measured = bench_training(peers or PEERS, precision=precision)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks central --json")
def central(
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Records in a step; repeatable.", show_default="32 and 256"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="CPU threads for torch.")] = 2,
    precision: Annotated[
        Literal["float32", "tf32", "bf16"],
        typer.Option(help="Precision of training, in addition to float32; the plain loop trains in float32."),
    ] = "float32",
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure records per second of central training.

    Compares it with a plain PyTorch loop over the same steps. Takes about two minutes on two cores.
    """
    from benchmarks.central import CentralBenchHParams, bench_central, describe

    hparams = CentralBenchHParams(
        batch_sizes=tuple(batch or (32, 256)), threads=threads, precisions=("float32", precision)
    )
    measured = bench_central(hparams, device)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks engine --at-once 4 --cohort 8")
def engine(
    at_once: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Users that train at once; repeatable.", show_default="264 on a GPU, 4 on a CPU"
        ),
    ] = None,
    precision: Annotated[
        Literal["float32", "tf32", "bf16"], typer.Option(help='Precision of training; "tf32" needs a GPU.')
    ] = "bf16",
    cohort: Annotated[int, typer.Option(min=1, metavar="N", help="Users in a round, e.g. 1584.")] = 16,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure users per second of stacked training, as on GPUs.

    Measures complete rounds, training without packing, packing without training, and the peak memory. `make gpu`
    measures the same on a machine that has only torch, Triton, numpy and pytest.
    """
    from benchmarks.engine import bench_engine, describe

    sizes = at_once or [4 if device == "cpu" else 264]
    measured = bench_engine(device, sizes, [precision], cohort)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks lora --at-once 8 --at-once 16")
def lora(
    at_once: Annotated[
        list[int] | None, typer.Option(min=2, metavar="N", help="Users in a block; repeatable.", show_default="8")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Records of 12 tokens in a step.")] = 4,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure users per second of LoRA adapters.

    Compares users one at a time with users in blocks, on one CPU thread or a GPU. Takes about half a minute.
    """
    import torch

    from benchmarks.lora import LoraBenchHParams, bench_lora, describe

    torch.set_num_threads(1)
    hparams = LoraBenchHParams(rows=rows, at_once=tuple(at_once or (8,)))
    measured = list(bench_lora(hparams, device))
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured, hparams))


@bench.command(epilog="Example: python -m benchmarks data --reader tff-sqlite --reader jsonl --sentences 500000")
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
    from benchmarks.data import bench_data, describe

    measured = bench_data(sentences, reader or ())
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks scale --users 4000 --json")
def scale(
    users: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Training users, each of 2,000 words.", show_default="392000"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the work on a corpus of the paper's size.

    Makes the corpus, plants canaries, opens it and its IID twin, and reads cohorts. Takes about two minutes and 5 GB of
    temporary disk.
    """
    from benchmarks.scale import PAPER_USERS, bench_scale, describe

    measured = bench_scale(users or PAPER_USERS)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks evaluation --canaries 90 --references 2000000 --json")
def evaluation(
    canaries: Annotated[int, typer.Option(min=1, metavar="N", help="Number of canaries.")] = 90,
    references: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of references to rank each canary against, |R|.")
    ] = 2_000_000,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure the time to rank canaries by random sampling.

    Compares ranks and decisions with scoring every reference completely. The model has the paper's size and is trained
    for a minute first. On a CPU every tenth canary is ranked.
    """
    from benchmarks.evaluation import bench_evaluation, describe

    measured = bench_evaluation(canaries, references, device)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks alarms --simulations 10000")
def alarms(
    simulations: Annotated[int, typer.Option(min=1, metavar="N", help="Simulations of each bound and truth.")] = 2_000,
    as_json: Json = False,
) -> None:
    """Measure how often lower bounds on epsilon exceed the true value.

    Simulates models without information, and mechanisms with a known epsilon, for the bounds of flsim audit and those
    of other projects. Takes about two minutes.
    """
    from benchmarks.alarms import bench_alarms, describe

    measured = bench_alarms(simulations)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks detection --repetitions 10 --canary-users 1000")
def detection(
    repetitions: Annotated[int, typer.Option(min=1, metavar="N", help="Audited runs of each mechanism.")] = 10,
    canary_users: Annotated[int, typer.Option(min=1, metavar="N", help="Canary users of each run.")] = 1_000,
    as_json: Json = False,
) -> None:
    """Measure which broken mechanisms an audit detects.

    Trains small models with eight mechanisms, audits them, and counts the ledgers that each method refutes. Takes about
    ten minutes on two cores.
    """
    from benchmarks.detection import bench_detection, describe

    measured = bench_detection(repetitions, canary_users)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


@bench.command(epilog="Example: python -m benchmarks forgetting --figures docs")
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
    """Measure when models forget, for problems with a known theory.

    Simulates k-means, training in a known order and federated mean estimation, and compares them with formulas. Takes
    about half a minute.
    """
    from benchmarks.forgetting import bench_forgetting, describe
    from benchmarks.forgetting_figures import refuse_other_than_folder, write_figures

    if figures is not None:
        refuse_other_than_folder(figures)
    measured = bench_forgetting(seeds)
    if figures is not None:
        write_figures(measured, figures)
    typer.echo(json.dumps(measured, indent=2) if as_json else describe(measured))


def main() -> None:
    """Run the benchmark that `sys.argv` names; exit with code 2 for bad input, and 1 if a run failed."""
    try:
        bench(prog_name="python -m benchmarks")
    except (InputError, RunFailed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, InputError) else 1)


if __name__ == "__main__":
    main()
