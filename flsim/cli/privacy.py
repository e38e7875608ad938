"""`flsim privacy`: epsilon of a planned or a finished run, or the noise for an epsilon, under every convention."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flsim.base.errors import InputError
from flsim.base.progress import say

if TYPE_CHECKING:
    from flsim.privacy.report import Unit
    from flsim.privacy.table import Line

OF_RECORDS = "Record-level: epsilon of one record, not of its author. Below, a user is a record."
BOTH = "both"  # samplers that are built in


def privacy(
    run: Annotated[Path | None, typer.Argument(help="Run folder, for what it spent; else describe a plan.")] = None,
    users: Annotated[int | None, typer.Option(help="N, training users.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Users per round; with Poisson sampling, expected.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="z: standard deviation of the noise on the sum, over the clip norm.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Instead of z: show the z that keeps within it.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of (epsilon, delta); of a run, default its own.")] = None,
    sampler: Annotated[
        str, typer.Option(help="How cohorts are drawn: fixed-size, poisson, both, or path/to/file.py:NAME.")
    ] = BOTH,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Account user-level differential privacy, under every convention side by side.

    Of a run of central training it is record-level, and says so.
    """
    from flsim.privacy.table import to_text

    unit: Unit
    plan = {"--users": users, "--cohort": cohort, "--rounds": rounds}
    aim = {"--noise-multiplier": noise_multiplier, "--epsilon": epsilon}
    if run is not None:
        twice = [name for name, value in {**plan, **aim}.items() if value is not None]
        twice += [] if sampler == BOTH else ["--sampler"]
        if twice:
            raise InputError(f"{', '.join(twice)}: {run} has its own; name a run or describe a plan, not both")
        lines, unit = _spent(run, delta)
    else:
        missing = [name for name, value in {**plan, "--delta": delta}.items() if value is None]
        if users is None or cohort is None or rounds is None or delta is None:
            raise InputError(f"{', '.join(missing)} missing; describe the plan in full, or name a run folder")
        if (noise_multiplier is None) == (epsilon is None):
            raise InputError(f"{' and '.join(aim)}: each follows from the other; give one of them")
        lines, unit = _planned(users, cohort, rounds, noise_multiplier, epsilon, delta, sampler), "user"
    if as_json:
        typer.echo(json.dumps([line.to_json() | {"unit": unit} for line in lines], indent=2, allow_nan=False))
    else:
        if unit == "record":
            typer.echo(OF_RECORDS)
        typer.echo(to_text(lines, calibration=epsilon is not None), nl=False)


def _planned(
    users: int,
    cohort: int,
    rounds: int,
    noise_multiplier: float | None,
    epsilon: float | None,
    delta: float,
    sampler: str,
) -> "list[Line]":
    from flsim.privacy.ledger import Entry, Ledger
    from flsim.privacy.sampling import SAMPLERS
    from flsim.privacy.table import calibrated, report

    lines = []
    for name in SAMPLERS if sampler == BOTH else [sampler]:
        entry = Entry(name, users, cohort, noise_multiplier or 0.0, rounds)
        lines += report(Ledger((entry,)), delta) if epsilon is None else calibrated(entry, epsilon, delta)
    _warn(delta, users, "user")
    return lines


def _spent(folder: Path, delta: float | None) -> "tuple[list[Line], Unit]":
    from flsim.privacy.table import report
    from flsim.runs.folder import Run

    run = Run.open(folder)
    ledger, delta = run.latest_state().ledger, run.delta if delta is None else delta
    lines, unit = report(ledger, delta), run.config.unit
    say(f"{folder}: {ledger.rounds:,} {'rounds' if unit == 'user' else 'steps'}, delta {delta:.3g}")
    _warn(delta, ledger.entries[0].population, unit)
    return lines, unit


def _warn(delta: float, population: int, unit: "Unit") -> None:
    if delta >= 1 / population:
        say(
            f"warning: delta {delta:g} is not below 1 / {population:,} {unit}s; publishing one {unit}'s data would "
            "satisfy it"
        )
