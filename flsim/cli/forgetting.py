"""`flsim forgetting`: how long after its last use a canary can still be told from one that was never planted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import Json, refuse_json_and_csv
from flsim.cli.results import RUNS

EPILOG = """Example: flsim forgetting runs/in runs/out

Example: flsim forgetting runs/forgetting-smoke --alpha 0.65 --out forgetting.png

Example: flsim forgetting runs/forgetting-smoke --by-hardness --csv > forgetting.csv"""


def forgetting(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    alpha: Annotated[
        float,
        typer.Option(help="Accuracy up to which canaries count as forgotten, e.g. 0.6; chance is 0.5."),
    ] = 0.6,
    by_hardness: Annotated[
        bool, typer.Option("--by-hardness", help="Split canaries into thirds by their log-perplexity in arm OUT.")
    ] = False,
    pool: Annotated[bool, typer.Option("--pool", help="Make one group of all numbers of copies.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Figure to write as well, .png, .svg or .pdf, e.g. forgetting.png; replaces an existing file.",
            show_default="no figure",
        ),
    ] = None,
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a row for each group and number of rounds as CSV instead of text.")
    ] = False,
) -> None:
    """Measure how fast canaries are forgotten.

    Runs that plant canaries (arm IN) are compared with their twins that never do (arm OUT, canaries.arm = "out"). For
    each group of canaries it prints exposure, accuracy and precision against the rounds since last use, and T(alpha),
    the time after which an attack succeeds at most at rate alpha. Without arm OUT there is exposure alone.
    """
    refuse_json_and_csv(as_json, as_csv)
    from flsim.attacks.forgetting.measure import measure_forgetting
    from flsim.attacks.forgetting.tables import to_text
    from flsim.show import formats
    from flsim.show.figures import refuse_other_than_figure

    if out is not None:
        refuse_other_than_figure(out)
    measured = measure_forgetting(*runs, alpha=alpha, by_hardness=by_hardness, pool=pool)
    if out is not None:
        from flsim.attacks.forgetting.plot import plot

        plot(measured, out)
    if as_json:
        typer.echo(json.dumps(measured.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(formats.to_csv(measured.success) if as_csv else to_text(measured), nl=False)
