"""`flsim sweep`: train all runs of a table, several at the same time, and print the table beside the published one."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.cli.options import Address, AtOnce, Overrides

EPILOG = """Example: flsim sweep experiments/table1.toml --tier smoke

Example: flsim sweep experiments/table1.toml --tier smoke --seeds 5 --only fedavg --address auto

Example: flsim sweep experiments/table1.toml --tier smoke --seeds 5-9 --out runs/table1-fresh"""

TIER = "Tier of the sweep, as its file defines it: its scale, e.g. paper."
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GRID", help="Grid of the file to train, e.g. fedavg; repeatable.", show_default="all grids"),
]


def seeds_of(text: str) -> range:
    """Return the seeds of "5", which are 0 to 4, or of "5-9", which are those five.

    Raises:
        typer.BadParameter: the text is neither, or names no seed.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if match is None:
        raise typer.BadParameter(f'"{text}" is neither a number of seeds such as 5 nor a range such as 5-9')
    seeds = range(int(match[1]), int(match[2]) + 1) if match[1] else range(int(match[2]))
    if not seeds:
        raise typer.BadParameter(f'"{text}" names no seed; give a number such as 5 or a range such as 5-9')
    return seeds


Seeds = Annotated[
    range | None,
    typer.Option(
        parser=seeds_of,
        metavar="SEEDS",
        help="Number or range of seeds: 5 trains seeds 0 to 4, and 5-9 those five.",
        show_default="the tier's seeds",
    ),
]
CorpusOption = Annotated[
    str | None,
    typer.Option(
        metavar="CORPUS",
        help="Folder or URI of the corpus to train on, e.g. corpora/mine.",
        show_default="the corpus that the file names",
    ),
]


def sweep(
    file: Annotated[Path, typer.Argument(help="TOML file of a sweep, e.g. experiments/table1.toml.")],
    tier: Annotated[str, typer.Option(help=TIER)] = "smoke",
    out: Annotated[
        Path | None, typer.Option(help="Sweep folder, e.g. runs/table1-smoke.", show_default="runs/FILE-TIER")
    ] = None,
    seeds: Seeds = None,
    only: Only = None,
    corpus: CorpusOption = None,
    set_: Overrides = None,
    address: Address = None,
    at_once: AtOnce = None,
) -> None:
    """Train all runs of a sweep file, and print their table.

    The published table is printed beside it where there is one.

    Repeat the command to continue an interrupted sweep: finished runs are skipped, and failed runs are tried again. A
    run that fails stops no other run. SIGTERM and Ctrl-C let runs write a checkpoint first.

    Writes a report as well: report.html in the sweep folder.
    """
    from flsim.data.corpus import Corpus
    from flsim.data.stores import located
    from flsim.runs.sweeps import definition, folder
    from server.sweep import sweep as train_sweep

    sweep_definition = definition.load(file)
    at = definition.tier_of(sweep_definition, tier, str(file))
    # Absolute, because the processes of a running cluster have another working directory.
    sweep_folder = folder.SweepFolder((out or Path("runs") / f"{file.stem}-{tier}").absolute())
    path = located(corpus) if corpus else folder.corpus_of(at, file, sweep_folder.path)
    planned = definition.planned_runs(sweep_definition, at, path, str(file), seeds, only or (), set_ or ())
    tuned = definition.tuned_of(sweep_definition, at, str(file))
    if tuned and path != sweep_folder.path / folder.CORPUS:
        tuned.refuse_corpus(Corpus.open(path).digest, path)  # before anything is written
    # Runs that have begun were checked then, maybe on a machine with more memory.
    new = [planned_run for planned_run in planned if not sweep_folder.run(planned_run.name).exists()]
    known = folder.corpus_or_its_settings(at, path, sweep_folder.path)
    folder.refuse_impossible_runs(new, known, is_trained_here=address is None)
    with sweep_folder.hold_lock():
        opened = folder.open_corpus(at, path, sweep_folder.path)
        if tuned:
            tuned.refuse_corpus(opened.digest, path)
        command = shlex.join(["flsim", *sys.argv[1:]])
        shared = folder.shared_settings(sweep_definition, at, set_ or (), opened.digest, tuned)
        sweep_folder.write(file, sweep_definition, tier, planned, command, tuned, shared)
        train = opened.split("train")
        failed = train_sweep(sweep_folder, planned, train, address, at_once, at.whole_cluster)
    if any((sweep_folder.run(planned_run.name) / "run.json").exists() for planned_run in planned):
        _show(sweep_folder.path)
    if failed:
        name, why = next(iter(failed.items()))
        raise RunFailed(
            f"{len(failed)} of {len(planned)} runs failed, the first {name}: {why}; read {sweep_folder.log(name)}, "
            f"and repeat the command to try again"
        )


def _show(path: Path) -> None:
    """Print the table beside the published one, and write the report."""
    from flsim.cli.report import report
    from flsim.cli.results import Against, table
    from flsim.results.sweeps import published_of

    table([path], against=Against.paper if published_of([path]) else None)
    report([path], path / "report.html")
    say(f"Report: {path / 'report.html'}")
