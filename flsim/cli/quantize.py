"""`flsim quantize`: what a run would have memorized with weights of few bits."""

from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Example: flsim quantize runs/iid --out runs/iid-8bit"


def quantize(
    run: Annotated[Path, typer.Argument(help="Run folder, with evaluated checkpoints.")],
    out: Annotated[Path, typer.Option(help="Folder of the new run.")],
    bits: Annotated[int, typer.Option(help="Of a weight: 8 is 256 different values a tensor.")] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Round the weights of a run's evaluated checkpoints, measure them again as a new run, and print both.

    A defence that The Secret Sharer (appendix D.3) found to take nothing from what is memorized.
    """
    from flsim.results import tables
    from flsim.results.store import read_run
    from flsim.runs.quantizing import quantize_run

    quantize_run(run, out, bits, device)
    typer.echo(tables.to_markdown(tables.memorization_table([read_run(run), read_run(out)])), nl=False)
