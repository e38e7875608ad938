"""`flsim report`: write one HTML file about runs or a sweep."""

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Example: flsim report runs/table1-smoke --out table1.html

Example: flsim report runs/iid runs/non-iid --out partitions.html"""


def report(
    paths: Annotated[list[Path], typer.Argument(help="Run folders and sweep folders, e.g. runs/iid runs/non-iid.")],
    out: Annotated[
        Path,
        typer.Option(help="File to write, .html, e.g. table1.html; replaces an existing file. /dev/stdout prints."),
    ],
) -> None:
    """Write one HTML file about runs or a sweep.

    The file holds tables, figures, settings, data, privacy and provenance. It loads nothing else, needs no scripts, and
    can be printed.

    Runs may be unfinished, diverged or failed; the report marks them.
    """
    from flsim.report.page import write_report
    from flsim.results.sweeps import expanded

    write_report(expanded(paths), out)
