"""`flsim tune`: choose the settings of a sweep by utility alone, before the sweep is trained."""

from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import Address, AtOnce

EPILOG = "Example: flsim tune experiments/tune-table1.toml --tier smoke --out runs/tune-table1-smoke"


def tune(
    file: Annotated[Path, typer.Argument(help="TOML file of a search, e.g. experiments/tune-table1.toml.")],
    tier: Annotated[str, typer.Option(help="Tier of the sweep to choose settings for, e.g. paper.")] = "smoke",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the search, e.g. runs/tune-table1-smoke.", show_default="runs/FILE-TIER"),
    ] = None,
    address: Address = None,
    at_once: AtOnce = None,
) -> None:
    """Choose settings of a sweep by perplexity on test users.

    Searches settings such as learning rates, and looks at utility only. Each group of runs, such as a partition of an
    optimizer, has the same trials on the same seeds. Canaries are planted as in the sweep, and nothing is measured of
    them. The better half of the trials trains on, until the last ones are complete. A best value at the edge of its
    range widens the range.

    Writes tuned.toml into the folder. A tier of the sweep names the file as tuned, and the seeds of the search are
    refused there.

    Repeat the command to continue an interrupted search.
    """
    from flsim.runs.sweeps import tuning
    from flsim.runs.sweeps.folder import corpus_or_its_settings, refuse_impossible_runs
    from server.tune import Tuner

    folder = tuning.TuningFolder((out or Path("runs") / f"{file.stem}-{tier}").absolute())
    search = tuning.load(file, tier, folder.path)
    search.groups()  # refuses a file that does not fit the sweep
    known = corpus_or_its_settings(search.tier, search.corpus, folder.path)
    refuse_impossible_runs(search.typical(), known, is_trained_here=address is None)
    with folder.hold_lock():
        corpus = search.open_corpus(folder.path)
        tuned = Tuner(folder, search, corpus.split("train"), address, at_once).tune(corpus.digest)
    typer.echo(tuning.to_text(tuned), nl=False)
