"""`flsim canaries`: the phrases of a run, and what the model made of each."""

from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import Format, TorchDevice, check_device, print_or_write, refuse_two_prints

EPILOG = """Example: flsim canaries runs/demo/iid --written

Example: flsim canaries runs/iid --epoch 10 --format csv --out canaries.csv"""


def canaries(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/iid.")],
    round: Annotated[
        int | None,
        typer.Option(help="Evaluated round to show, e.g. 100; of central training, a step.", show_default="the last"),
    ] = None,
    epoch: Annotated[
        float | None,
        typer.Option(help="In place of --round: evaluation after this many epochs, e.g. 10.", show_default="the last"),
    ] = None,
    written: Annotated[
        bool, typer.Option("--written", help="Also show what Beam Search writes, computed from the checkpoint.")
    ] = False,
    device: TorchDevice = "cpu",
    format: Annotated[Format, typer.Option(help="Format of the output; parquet needs --out.")] = Format.md,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write, e.g. canaries.csv; replaces an existing file.", show_default="standard output"
        ),
    ] = None,
) -> None:
    """List the canaries of a run, and which were memorized.

    A row has the phrase, its sharers and copies, rank and exposure, and whether it was extracted.
    """
    from flsim.results.canary_table import canary_table
    from flsim.results.store import read_run, refuse_two_points
    from flsim.show import formats
    from flsim.show.memorization import table_of_canaries

    refuse_two_prints(format, out)
    refuse_two_points(round, epoch)
    results = read_run(run)
    at = results.at(round, epoch)
    texts = _written(run, at, device) if written else None
    table = canary_table(results, at, written=texts)
    if format is Format.parquet and out is not None:
        formats.write_parquet(table, out)
        return
    print_or_write(table_of_canaries(table).text(format.value), out)


def _written(folder: Path, round: int, device: str) -> dict[str, str]:
    """Return what beam search writes with the checkpoint of a round, in words, by the canary's id."""
    from flsim.runs.config.custom_code import announce
    from flsim.runs.folder import Run
    from flsim.runs.measuring import written_after

    check_device(device)
    run = Run.open(folder)
    announce(run.config, "architecture")
    tokens = written_after(run, round, device)
    return {canary: run.corpus.vocabulary.text(ids) for canary, ids in tokens.items()}
