"""`flsim demo`: train IID and non-IID on a built-in corpus, and compare them in a table, a test and a plot."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pandas as pd
import typer

from flsim.base.files import new_file, refuse_existing
from flsim.base.progress import say
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.results.differences import compare_runs
from flsim.results.store import read_run
from flsim.results.tables import memorization_table
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.show.differences import runs_to_markdown
from flsim.show.memorization import table_of_runs
from flsim.show.plots import plot
from server.launch import train as train_on_ray

CORPUS = SyntheticHParams()


def run_demo(out: Path, seed: int, overrides: Sequence[str] = ()) -> None:
    """Build the corpus, train IID and non-IID, and print the table and the comparison; InputError if `out` exists."""
    refuse_existing(out)
    corpus = (out / "corpus").resolve()
    with resources.as_file(resources.files("experiments") / "demo.toml") as file:
        settings = config.load(file, [f"seed={seed}", f"data.corpus='{corpus}'", *overrides])
    make_synthetic(corpus, CORPUS, seed)
    for partition in ("iid", "non-iid"):
        run = Run.create(replace(settings, data=replace(settings.data, partition=partition)), out / partition)
        train_on_ray(run)
    iid, non_iid = read_run(out / "iid"), read_run(out / "non-iid")
    table = memorization_table([iid, non_iid])
    write_tables(table, out)
    plot([iid, non_iid], out / "memorization.png")
    typer.echo(table_of_runs(table).markdown())
    typer.echo(runs_to_markdown(compare_runs(iid, non_iid)))
    say(f"Plot: {out / 'memorization.png'}. Everything else: {out}.")


def write_tables(table: pd.DataFrame, out: Path) -> None:
    """Write table.md and table.csv into a folder, each atomically."""
    for name, text in (("table.md", table_of_runs(table).markdown()), ("table.csv", table_of_runs(table).csv())):
        with new_file(out / name) as partial:
            partial.write_text(text, encoding="utf-8")
