"""`flsim table` and `flsim plot`: what runs memorized, side by side, at equal training and over seeds."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import InputError

TABLE_EPILOG = """Example: flsim table runs/iid runs/non-iid --format csv

Example: flsim table runs/sgd runs/fedavg --epoch 10

Example: flsim table runs/seed-* --over-seeds --epoch 10

Example: flsim table runs/table1-smoke --against paper --format latex"""
PLOT_EPILOG = """Example: flsim plot runs/iid runs/non-iid --out memorization.png

Example: flsim plot runs/seed-* --over-seeds --out memorization.svg"""

OverSeeds = Annotated[bool, typer.Option("--over-seeds", help="Average runs that differ in nothing but the seed.")]


class Format(StrEnum):
    """How a table is written."""

    md = "md"
    csv = "csv"
    latex = "latex"
    parquet = "parquet"


class Against(StrEnum):
    """What a table is held against."""

    paper = "paper"


def table(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, and folders of sweeps.")],
    format: Annotated[Format, typer.Option(help="Of the table.")] = Format.md,
    out: Annotated[Path | None, typer.Option(help="File to write; needed for parquet, else standard output.")] = None,
    round: Annotated[int | None, typer.Option(help="Evaluated round to show; default each run's last.")] = None,
    epoch: Annotated[
        float | None, typer.Option(help="Show each run after so many epochs; one reads as many records as there are.")
    ] = None,
    over_seeds: OverSeeds = False,
    against: Annotated[
        Against | None, typer.Option(help="Mark which rows of a sweep agree with the published ones, and how.")
    ] = None,
) -> None:
    """Tabulate what runs memorized, in the paper's columns, and of a sweep the published values beside ours.

    --epoch puts rounds of federated beside steps of central training.

    --over-seeds says how sure means are, and compares IID and non-IID.
    """
    from flsim.base.files import named_file
    from flsim.results import formats, seeds_table, tables
    from flsim.results.against_published import against as marked
    from flsim.results.paths import expanded
    from flsim.results.sweeps import published_of, read_shown
    from flsim.results.worlds import compare_worlds

    runs = expanded(runs)
    rows = published_of(runs)
    if against and not rows:
        raise InputError("--against paper: no run here stands for a published row; name the folder of a sweep")
    found = read_shown(runs)
    shown = list(found.values())
    published = {run: rows[folder] for folder, run in found.items() if folder in rows}
    kind = seeds_table if over_seeds else tables
    results = (seeds_table.seeds_table if over_seeds else tables.memorization_table)(shown, round, epoch, published)
    if against:
        results = marked(results)
    if format is Format.parquet:
        if out is None:
            raise InputError("--format parquet: not for a terminal; name a file with --out")
        formats.write_parquet(results, out)
        return
    text = {Format.md: kind.to_markdown, Format.csv: formats.to_csv, Format.latex: kind.to_latex}[format](results)
    if over_seeds and format is Format.md:
        compared = compare_worlds(shown, round, epoch)
        text += f"\n{compared}" if compared else ""
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        with named_file(out) as partial:
            partial.write_text(text, encoding="utf-8")


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, and folders of sweeps.")],
    out: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf; replaced if there.")],
    over_seeds: OverSeeds = False,
) -> None:
    """Plot RS, BS, mean exposure and perplexity over epochs; over rounds where some run does not know its epochs.

    Bands are 95% intervals: of mean exposure over canaries, or, over seeds, of all four over seeds.
    """
    from flsim.results.paths import expanded
    from flsim.results.plots import plot_rounds, refuse_other_than_figure
    from flsim.results.sweeps import read_shown

    refuse_other_than_figure(out)
    plot_rounds(list(read_shown(expanded(runs)).values()), out, over_seeds)
