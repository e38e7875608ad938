"""`flsim quantize`: measure a run again with weights of few bits."""

from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import TorchDevice, check_device

EPILOG = "Example: flsim quantize runs/iid --out runs/iid-8bit"


def quantize(
    run: Annotated[Path, typer.Argument(help="Folder of a run with evaluated checkpoints, e.g. runs/iid.")],
    out: Annotated[Path, typer.Option(help="New run folder for the rounded checkpoints, e.g. runs/iid-8bit.")],
    bits: Annotated[int, typer.Option(help="Bits of each weight; 8 bits allow 256 values in a tensor.")] = 8,
    device: TorchDevice = "cpu",
) -> None:
    """Measure a run again with weights of few bits.

    Rounds the weights of the evaluated checkpoints, measures the rounded models as a new run, and prints both runs.

    The Secret Sharer (appendix D.3) tried this defence, and memorization stayed the same.
    """
    from flsim.results.store import read_run
    from flsim.results.tables import memorization_table
    from flsim.runs.quantizing import quantize_run
    from flsim.show.memorization import table_of_runs

    check_device(device)
    quantize_run(run, out, bits, device)
    typer.echo(table_of_runs(memorization_table([read_run(run), read_run(out)])).markdown(), nl=False)
