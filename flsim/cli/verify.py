"""`flsim verify`: a round of a run is trained again, and compared with what the run logged."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import RunFailed

EPILOG = "Example: flsim verify runs/iid\n\nExample: flsim verify runs/iid --round 120"


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    round: Annotated[
        int | None,
        typer.Option(help="Round, or step of central training, that the run has logged, e.g. 120 (default the last)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Of torch, as the clients had; default a GPU where there is one.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Train a round again from the checkpoint before it, and compare the state with what the run logged.

    Exits with 1 where it differs: the run was trained on another kind of machine, by other code, or wrongly.
    """
    import torch

    from flsim.runs.folder import Run
    from server.verify import verify as train_again

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    verified = train_again(Run.open(run), round, device)
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
