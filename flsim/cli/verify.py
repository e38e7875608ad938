"""`flsim verify`: train a round of a run again, and compare the state with the log."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import RunFailed
from flsim.cli.options import Json, check_device

EPILOG = "Example: flsim verify runs/iid\n\nExample: flsim verify runs/iid --round 120"


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/iid.")],
    round: Annotated[
        int | None,
        typer.Option(
            help="Logged round to train again, e.g. 120; of central training, a logged step.", show_default="the last"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Device for torch, cpu or cuda; the one that the clients had.",
            show_default="cuda where torch has it",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Train a round again, and compare it with the log.

    Training starts at the checkpoint before the round. The states after each round must be equal, bit for bit.

    The exit code is 1 where they differ: the run was trained on another kind of machine, by other code, or wrongly.
    """
    import torch

    from flsim.runs.config import custom_code
    from flsim.runs.folder import Run
    from server.verify import verify as train_again

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    opened = Run.open(run)
    custom_code.announce(opened.config, *custom_code.TRAINED)
    verified = train_again(opened, round, device)
    if json_:
        typer.echo(json.dumps(asdict(verified)))
    if verified.differs:
        raise RunFailed(
            f"{run}: trained again from round {verified.start}, round {verified.differs} differs: "
            f"logged {verified.logged[:16]}, found {verified.found[:16]}"
        )
    if not json_:
        typer.echo(
            f"round {verified.round}: trained again from round {verified.start}, equal, digest {verified.found[:16]}"
        )
