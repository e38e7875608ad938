"""`flsim extract`: which canaries and training records a model gives away, beside text that it never read."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import Json, TorchDevice, check_device
from flsim.cli.results import RUNS, WHEN, Epoch

EPILOG = """Example: flsim extract runs/demo/iid runs/demo/non-iid

Example: flsim extract runs/demo/non-iid --prefix 1 --prefix 3 --suffix 4 --out extraction.png

Example: flsim extract runs/four-settings --over-seeds

Example: flsim extract runs/demo/non-iid --top-k 0 --top-p 0.9 --json"""
SAMPLING = "Sampling"


def extract(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    prefix: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="WORDS",
            help="Number of first words that the attacker knows; repeatable, e.g. --prefix 1 --prefix 3.",
            show_default="those of 1, 3, 5, 10 that strings are longer than",
        ),
    ] = None,
    suffix: Annotated[
        int, typer.Option(min=1, metavar="WORDS", help="Largest number of words of a record that follow, e.g. 10.")
    ] = 5,
    records: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Largest number of training records, and of held-out ones, e.g. 5000."),
    ] = 1_000,
    temperature: Annotated[
        float,
        typer.Option(help="Divisor of log-probabilities; 1 is the model's own.", rich_help_panel=SAMPLING),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of the likeliest tokens to sample from; 0 for all.", rich_help_panel=SAMPLING
        ),
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option(
            help="Share of probability whose likeliest tokens are sampled from, e.g. 0.9.", rich_help_panel=SAMPLING
        ),
    ] = 1.0,
    by_setting: Annotated[
        bool, typer.Option("--over-seeds", help="Means and intervals over the seeds of each setting.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Figure to write as well, .png, .svg or .pdf, e.g. extraction.png; replaces an existing file.",
            show_default="no figure",
        ),
    ] = None,
    round: Annotated[
        int | None,
        typer.Option(
            help="Round of the checkpoint, e.g. 100.", show_default="the newest of each run", rich_help_panel=WHEN
        ),
    ] = None,
    epoch: Epoch = None,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure which training text a model gives away.

    Shows the model the first words of canaries and of training records, and says how many it goes on with: greedily, or
    in one of n samples with probability p. Held-out records of equal length stand beside them, as frequent phrases are
    "extracted" from any model. Also counts strings that one word elicits, that are nearly right, and that few users
    hold.
    """
    from flsim.attacks.extraction.extract import extract as extract_from
    from flsim.attacks.extraction.tables import over_seeds_to_text, to_text
    from flsim.show.figures import refuse_other_than_figure

    check_device(device)
    if out is not None:
        refuse_other_than_figure(out)
    measured = extract_from(
        *runs,
        prefixes=prefix or (),
        suffix=suffix,
        records=records,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        round=round,
        epoch=epoch,
        device=device,
    )
    if out is not None:
        from flsim.attacks.extraction.plot import plot

        plot(measured, out, by_setting)
    if as_json:
        typer.echo(json.dumps(measured.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(over_seeds_to_text(measured) if by_setting else to_text(measured), nl=False)
