"""`flsim trace`: print each canary's exposure over rounds, and the rounds in which its sharers took part."""

from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import refuse_json_and_csv

EPILOG = """Example: flsim trace runs/demo/iid --canary c07 --canary c31 --out trace.png

Example: flsim trace runs/demo/iid --csv > trace.csv"""


def trace(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/demo/iid.")],
    canary: Annotated[
        list[str] | None, typer.Option(help="Id of a canary, e.g. c07; repeatable.", show_default="all canaries")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Figure to write as well, .png, .svg or .pdf, e.g. trace.png; replaces an existing file.",
            show_default="no figure",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of text.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text.")] = False,
) -> None:
    """Print each canary's exposure over rounds.

    Beside it stand the rounds in which a sharer of the canary was in the cohort; of central training, the steps that
    read a copy. They are recomputed from the seed, so that this works for every run, also during training.
    """
    refuse_json_and_csv(as_json, as_csv)
    from flsim.results.store import read_run
    from flsim.results.trace import trace as traced
    from flsim.runs import roundlog
    from flsim.runs.folder import Run, participation
    from flsim.show import trace as traces
    from flsim.show.figures import refuse_other_than_figure

    if out is not None:
        refuse_other_than_figure(out)
    results = read_run(run)
    took_part = participation(Run.open(run), results.evaluation())
    table = traced(results, took_part, canary or ())
    if out is not None:
        traces.plot_trace(results, table, out)
    if as_json:
        typer.echo(traces.to_json(table))
    else:
        steps = [line["effective_step"] for line in roundlog.read(run) if line.get("effective_step") is not None]
        text = traces.to_text(table, results) + traces.steps_to_text(steps)
        typer.echo(traces.to_csv(table) if as_csv else text, nl=False)
