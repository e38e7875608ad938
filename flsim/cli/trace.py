"""`flsim trace`: when each canary was memorized, and when somebody who shares it took part."""

from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import InputError

EPILOG = """Example: flsim trace runs/demo/iid --canary c07 --canary c31 --out trace.png

Example: flsim trace runs/demo/iid --csv > trace.csv"""


def trace(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    canary: Annotated[list[str] | None, typer.Option(help="Id of a canary; repeatable. Default: all.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for a figure as well: .png, .svg or .pdf; replaced if there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of text.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text.")] = False,
) -> None:
    """Exposure of each canary against rounds, and the rounds in which a sharer took part.

    Who took part is recomputed from the seed, so this works for every run, also while it trains. Of central training it
    is the steps that read a copy.
    """
    if as_json and as_csv:
        raise InputError("--json and --csv: choose one of them")
    from flsim.results import trace as traces
    from flsim.results.plots import refuse_other_than_figure
    from flsim.results.store import read_run
    from flsim.results.trace_plot import plot_trace
    from flsim.runs.folder import Run
    from flsim.runs.participation import participation

    if out is not None:
        refuse_other_than_figure(out)
    results = read_run(run)
    took_part = participation(Run.open(run), results.evaluation())
    table = traces.trace(results, took_part, canary or ())
    if out is not None:
        plot_trace(results, table, out)
    if as_json:
        typer.echo(traces.to_json(table))
    else:
        typer.echo(traces.to_csv(table) if as_csv else traces.to_text(table, results), nl=False)
