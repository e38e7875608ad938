"""`flsim table` and `flsim plot`: compare what runs memorized, at equal training and over seeds."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flsim.base.errors import InputError
from flsim.cli.options import Format, FormatOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flsim.results.store import RunResults

TABLE_EPILOG = """Example: flsim table runs/iid runs/non-iid --format csv

Example: flsim table runs/sgd runs/fedavg --epoch 10

Example: flsim table runs/seed-* --epoch 10

Example: flsim table runs/seed-* --each-seed

Example: flsim table runs/table1-smoke --against paper --format latex"""
PLOT_EPILOG = """Example: flsim plot runs/iid runs/non-iid --out memorization.png

Example: flsim plot runs/seed-* --each-seed --out memorization.svg

Example: flsim plot runs/four-settings-demo --kind utility --out partitions.png

Example: flsim plot runs/secret-sharer-figures-smoke --kind loss --out loss.png"""

RUNS = "Run folders and sweep folders, e.g. runs/iid runs/non-iid."
WHEN = "Point in training"
TableOut = Annotated[
    Path | None,
    typer.Option(
        help="File to write, e.g. table.csv; parquet needs one. Replaces an existing file.",
        show_default="standard output",
    ),
]
Round = Annotated[
    int | None,
    typer.Option(
        help="Evaluated round of each run, e.g. 100.", show_default="the last of each run", rich_help_panel=WHEN
    ),
]
Epoch = Annotated[
    float | None,
    typer.Option(
        help="Evaluation after this many epochs, e.g. 10. In one epoch training reads as many records as the corpus "
        "has, so that federated and central runs compare.",
        rich_help_panel=WHEN,
    ),
]


OverSeeds = Annotated[
    bool | None,
    typer.Option(
        "--over-seeds/--each-seed",
        help="Average runs that differ only in the seed, with 95% intervals over seeds; or show each run.",
        show_default="over seeds if a setting has two; csv and parquet: each run",
    ),
]


class Kind(StrEnum):
    """Kind of a plot."""

    rounds = "rounds"
    utility = "utility"
    loss = "loss"


class Against(StrEnum):
    """Source of published values."""

    paper = "paper"


def table(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    format: FormatOption = Format.md,
    out: TableOut = None,
    round: Round = None,
    epoch: Epoch = None,
    over_seeds: OverSeeds = None,
    against: Annotated[
        Against | None,
        typer.Option(
            help="For the runs of a sweep: add whether each value agrees with the published one.",
            show_default="no comparison",
        ),
    ] = None,
) -> None:
    """Print what runs memorized, as a table.

    The columns are those of Thakkar et al. (2020): RS counts the canaries that Random Sampling extracts, and BS
    those that Beam Search extracts. Runs of a sweep have the published values beside theirs.

    Where a setting has two or more seeds, the table holds means with intervals over seeds, and a paired test compares
    IID with non-IID, at the end of training and at equal perplexity. P-values of several settings are also shown
    corrected for their number (Holm). --each-seed shows a row for each run instead, as CSV and Parquet do.
    """
    from flsim.base.files import named_file
    from flsim.base.progress import say
    from flsim.results.against_published import against as marked
    from flsim.results.sweeps import expanded, published_of, read_shown, tuned_notes
    from flsim.results.tables import memorization_table
    from flsim.show import formats
    from flsim.show.differences import compare_partitions
    from flsim.show.memorization import TUNED, table_of_runs

    runs = expanded(runs)
    rows = published_of(runs)
    if against and not rows:
        raise InputError("--against paper: no run belongs to a published row; name the folder of a sweep")
    by_folder = read_shown(runs)
    read = list(by_folder.values())
    published = {run: rows[folder] for folder, run in by_folder.items() if folder in rows}
    why = ""
    if over_seeds is None and format in {Format.md, Format.latex}:
        over_seeds, why = _has_means(read, round, epoch)
    results = memorization_table(read, round, epoch, published, by="series" if over_seeds else "run")
    if against:
        results = marked(results)
    if notes := tuned_notes(runs):
        results.attrs[TUNED] = notes
        for note in notes if format is Format.csv else ():
            say(note)  # below a table that has no room for it
    if format is Format.parquet:
        if out is None:
            raise InputError("--format parquet: not for a terminal; name a file with --out")
        formats.write_parquet(results, out)
        return
    text = table_of_runs(results).text(format.value)
    if format is Format.md and why:
        text += f"\n{formats.note(why)}"
    if over_seeds and format is Format.md:
        compared = compare_partitions(read, round, epoch)
        text += f"\n{compared}" if compared else ""
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        with named_file(out) as partial:
            partial.write_text(text, encoding="utf-8")


def _has_means(runs: "Sequence[RunResults]", round: int | None, epoch: float | None) -> tuple[bool, str]:
    """Return whether some setting has two seeds to average; where a mean is impossible, also say why."""
    from flsim.results.seeds import has_means

    try:
        return has_means(runs, round, epoch), ""
    except InputError as error:
        return False, f"No means over seeds: {error}."


def plot(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    out: Annotated[
        Path, typer.Option(help="File to write, .png, .svg or .pdf, e.g. plot.png; replaces an existing file.")
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            metavar="KIND",
            help="Kind of the figure: rounds, utility or loss, e.g. utility.",
        ),
    ] = Kind.rounds,
    over_seeds: OverSeeds = None,
) -> None:
    """Plot what runs memorized: over epochs, or against perplexity.

    The figure of --kind rounds, the default, shows mean exposure, perplexity, and how many canaries Random Sampling
    (RS) and Beam Search (BS) extract. It is over rounds where the epochs of a run are unknown. utility shows mean
    exposure against perplexity: which runs memorize less at like utility.

    loss shows training loss, test loss and exposure over epochs, as Figure 4 of The Secret Sharer (Carlini et al.,
    2018).

    Where a setting has two or more seeds, a line is their mean, and bands are 95% intervals over seeds. Otherwise a
    line is a run, and the band of mean exposure is a 95% interval over canaries.
    """
    from flsim.results.sweeps import expanded, read_shown
    from flsim.show.figures import refuse_other_than_figure

    refuse_other_than_figure(out)
    read = read_shown(expanded(runs))
    results = list(read.values())
    if kind is Kind.loss:
        from flsim.runs import roundlog
        from flsim.show.plots import plot_losses

        losses = {run: roundlog.mean_losses(roundlog.read(folder), run.evaluated) for folder, run in read.items()}
        plot_losses(results, losses, out, over_seeds)
    elif kind is Kind.utility:
        from flsim.show.plots import plot_against_utility

        plot_against_utility(results, out, over_seeds)
    else:
        from flsim.show.plots import plot_rounds

        plot_rounds(results, out, over_seeds)
