"""`flsim plan`: predict what a run or a sweep needs, before it is trained."""

import json
import math
import os
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import InputError
from flsim.cli.options import AtOnce, Json, Overrides
from flsim.cli.sweep import TIER, CorpusOption, Only, Seeds

EPILOG = """Example: flsim plan experiments/table1.toml --tier smoke

Example: flsim plan experiments/table2.toml --tier paper --no-calibration"""
MEASUREMENT = "Measurement of time and memory"


def plan(
    file: Annotated[Path, typer.Argument(help="TOML file of a sweep or of a run, e.g. experiments/table1.toml.")],
    tier: Annotated[str | None, typer.Option(help=TIER, show_default="smoke")] = None,
    seeds: Seeds = None,
    only: Only = None,
    corpus: CorpusOption = None,
    set_: Overrides = None,
    effect: Annotated[
        float,
        typer.Option(min=0.0, metavar="BITS", help="Difference in mean exposure, in bits, that runs should show."),
    ] = 1.0,
    sd_canaries: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="BITS", help="Standard deviation of differences over canaries.", show_default="the demo's"
        ),
    ] = None,
    sd_seeds: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="BITS", help="Standard deviation of differences between seeds.", show_default="the demo's"
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a finished sweep whose recorded time and memory are printed beside the prediction.",
            show_default="no comparison",
        ),
    ] = None,
    as_json: Json = False,
    at_once: AtOnce = None,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration/--no-calibration",
            help="Train a short run of each configuration.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = True,
) -> None:
    """Predict what a run or a sweep needs on this machine.

    Prints time, memory, disk, scale, amounts of training, epsilon, the largest epsilon that an audit of the runs can
    prove, and statistical power. If the sweep's results are in runs/FILE-TIER, or in the folder of --against, their
    perplexity is next to the published one.

    Time and memory are measured: a short run of each configuration trains three rounds with two evaluations, and the
    times are multiplied by the numbers of rounds and evaluations. No files remain.
    """
    import torch

    from flsim.planning.measure import Machine, measure, scratch
    from flsim.planning.plan import page, plan_of, read_request, sweep_of
    from flsim.results.power import Spread
    from flsim.results.sweeps import read_sweep

    if against is not None and not calibration:
        raise InputError("--against compares a measurement with what was recorded; remove --no-calibration")
    for option, bits in (("--effect", effect), ("--sd-canaries", sd_canaries), ("--sd-seeds", sd_seeds)):
        if bits is not None and not math.isfinite(bits):
            raise InputError(f"{option} {bits:g}: a number of bits is needed")
    stated = {"canaries": sd_canaries, "seeds": sd_seeds}
    spread = Spread(**{over: bits for over, bits in stated.items() if bits is not None})
    sessions = [] if against is None else list(read_sweep(against).sessions)
    machine = Machine(os.cpu_count() or 1, torch.cuda.device_count())
    with scratch() as folder:
        request = read_request(file, folder, tier, seeds, only or (), corpus, set_ or ())
        is_measured = calibration and request.is_there
        measured = measure(request.planned, machine, at_once, request.whole_cluster) if is_measured else None
        results = sweep_of(against, request.name, request.tier)
        made = plan_of(request, machine, effect, spread, measured, at_once, results, sessions)
    if sessions and measured and not made.against:
        raise InputError("--against: no session of that sweep trained only runs of this plan; give the same options")
    typer.echo(json.dumps(made.to_json(), indent=2, allow_nan=False) if as_json else page(made), nl=as_json)
