"""`flsim membership`: which records of a run's users an attacker tells from records of others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flsim.cli.options import Json, TorchDevice, check_device
from flsim.cli.results import RUNS, WHEN

EPILOG = """Example: flsim membership runs/demo/iid runs/demo/non-iid

Example: flsim membership runs/demo/non-iid --attack loss --attack min-k++ --records 5000 --json

Example: flsim membership runs/demo/non-iid --attack my_attack.py:rarest"""
ATTACKS = "loss, reference, zlib, min-k, min-k++, neighbourhood, gradient, quantile, blind"


def membership(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTACK",
            help=f"Attack; repeatable: {ATTACKS}, or your own as path/to/file.py:NAME, a file that is executed.",
            show_default="all built-in attacks",
        ),
    ] = None,
    records: Annotated[
        int, typer.Option(min=1, metavar="N", help="Largest number of members, and of non-members, e.g. 5000.")
    ] = 1_000,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="For the attack reference: checkpoint of a run on another corpus with the same vocabulary.",
            show_default="frequency of single words",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the claim, e.g. 1e-6.", show_default="that of each run")
    ] = None,
    round: Annotated[
        int | None,
        typer.Option(
            help="Round of the attacked checkpoint, e.g. 100.",
            show_default="the newest of each run",
            rich_help_panel=WHEN,
        ),
    ] = None,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Attack membership: tell records of training from others.

    Members are records of training users that took part. Non-members are records of authors who are held out, in pairs
    of equal length. Prints how well each attack tells them apart, beside controls, and stores that in the run folder.
    """
    from flsim.membership.inference import attack_run
    from flsim.membership.text import to_objects, to_text
    from flsim.results.paths import expanded
    from flsim.results.sweeps import run_folders

    check_device(device)
    tables = {
        path: attack_run(path, attack or (), records, round, reference, delta, device)
        for path in run_folders(expanded(runs))
    }
    if as_json:
        objects = [{"folder": str(path), "rows": to_objects(table)} for path, table in tables.items()]
        typer.echo(json.dumps({"runs": objects}, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(to_text(path.resolve().name, table) for path, table in tables.items()), nl=False)
