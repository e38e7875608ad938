"""`flsim sweep`: a table's runs, as many at once as fit, gone on with by the same command."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.cli.options import Overrides

EPILOG = """Example: flsim sweep experiments/table1.toml --tier smoke

Example: flsim sweep experiments/table1.toml --tier smoke --seeds 5 --only fedavg --address auto"""

Only = Annotated[list[str] | None, typer.Option(help="Take this grid alone; repeatable.")]
Tier = Annotated[str, typer.Option(help="Scale, as the file defines it.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Train seeds 0 to this less one, in place of the tier's.")]
CorpusOption = Annotated[
    str | None, typer.Option(metavar="CORPUS", help="Folder or URI of a corpus to train on, in place of the tier's.")
]


def sweep(
    file: Annotated[Path, typer.Argument(help="TOML file of a sweep; see experiments/.")],
    tier: Tier = "smoke",
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME-TIER, by the file's name.")] = None,
    seeds: Seeds = None,
    only: Only = None,
    corpus: CorpusOption = None,
    set_: Overrides = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join, e.g. auto; else a local one.")] = None,
    at_once: Annotated[int | None, typer.Option(min=1, help="Runs at once, at most; default as many as fit.")] = None,
) -> None:
    """Train all runs of a table, and print it beside the published one.

    Finished runs are skipped: a sweep that was killed goes on by the same command.

    A run that fails leaves the others alone, and is tried again by the same command.
    """
    from flsim.data.stores import located
    from flsim.sweeps import definition, folder
    from server.sweep import sweep as train_sweep

    found = definition.load(file)
    at = definition.tier_of(found, tier, str(file))
    # Absolute, as a cluster that runs already is at work in a folder of its own.
    there = folder.SweepFolder((out or Path("runs") / f"{file.stem}-{tier}").absolute())
    path = located(corpus) if corpus else folder.corpus_of(at, file, there.path)
    given = range(seeds) if seeds else None
    planned = definition.planned_runs(found, at, path, str(file), given, only or (), set_ or ())
    with there.hold_lock():
        train = folder.open_corpus(at, path, there.path).split("train")
        there.write(file, found, tier, planned, shlex.join(["flsim", *sys.argv[1:]]))
        failed = train_sweep(there, planned, train, address, at_once, at.whole_cluster)
    if any((there.run(each.name) / "run.json").exists() for each in planned):
        _show(there.path)
    if failed:
        name, why = next(iter(failed.items()))
        raise RunFailed(
            f"{len(failed)} of {len(planned)} runs failed, the first {name}: {why}; {there.log(name)} says more, and "
            f"the same command tries again"
        )


def _show(path: Path) -> None:
    """The table beside the published one, on standard output, and a report."""
    from flsim.cli.report import report
    from flsim.cli.results import Against, table
    from flsim.results.sweeps import published_of

    table([path], against=Against.paper if published_of([path]) else None)
    report([path], path / "report.html")
    say(f"Report: {path / 'report.html'}")
