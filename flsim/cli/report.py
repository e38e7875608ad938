"""`flsim report`: one HTML file about runs or a sweep."""

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Example: flsim report runs/table1-smoke --out table1.html

Example: flsim report runs/iid runs/non-iid --out worlds.html"""


def report(
    paths: Annotated[list[Path], typer.Argument(help="Run folders, or folders of sweeps.")],
    out: Annotated[Path, typer.Option(help="File to write, .html; replaced if there.")],
) -> None:
    """Write one HTML file about runs or a sweep: tables, figures, settings, data, privacy, provenance.

    The file is whole: it fetches nothing, needs no scripts, and prints.

    Runs may be unfinished, diverged or failed; the report says which.
    """
    from flsim.report.page import write_report
    from flsim.results.paths import expanded

    write_report(expanded(paths), out)
