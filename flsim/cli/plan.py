"""`flsim plan`: predict what a run or a sweep needs, before it is trained."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flsim.base.errors import InputError
from flsim.cli.options import AtOnce, Json, Overrides
from flsim.cli.sweep import TIER, CorpusOption, Only, Seeds

if TYPE_CHECKING:
    from flsim.planning.amounts import Amount
    from flsim.planning.plan import Plan
    from flsim.planning.predicting import Machine, Predictor
    from flsim.planning.requested import Request

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
        typer.Option("--calibration/--no-calibration", help="Train a few short runs.", rich_help_panel=MEASUREMENT),
    ] = True,
) -> None:
    """Predict what a run or a sweep needs on this machine.

    Prints scale, amounts of training, time, memory, disk, epsilon, the largest epsilon that an audit of the runs can
    prove, and statistical power. Where the sweep's results are
    in runs/FILE-TIER, or in the folder of --against, their perplexity is beside the published one.

    Time and memory are measured: a few shortened runs are trained for some seconds each. This takes a minute or two,
    and leaves no files.
    """
    from flsim.planning.calibration import scratch
    from flsim.planning.requested import read_request
    from flsim.planning.text import page

    if not math.isfinite(effect):
        raise InputError(f"--effect {effect:g}: a number of bits is needed")
    if against is not None and not calibration:
        raise InputError("--against holds a calibration against what was recorded; remove --no-calibration")
    sessions = _sessions(against)
    with scratch() as folder:
        request = read_request(file, folder, tier, seeds, only or (), corpus, set_ or ())
        made = _plan(request, at_once, calibration and request.is_there, effect, sessions)
        made = replace(made, amounts=_amounts(request, against), published_amounts=request.published_amounts)
    typer.echo(json.dumps(made.to_json(), indent=2, allow_nan=False) if as_json else page(made), nl=as_json)


def _sessions(sweep: Path | None) -> list[Any]:
    from flsim.results.sweeps import read_sweep

    return [] if sweep is None else list(read_sweep(sweep).sessions)


def _amounts(request: "Request", sweep: Path | None) -> "tuple[Amount, ...]":
    from flsim.planning.amounts import amounts_of, measured_utility, sweep_of
    from flsim.planning.scale import rows_of

    results = sweep_of(sweep, request.name, request.tier)
    return amounts_of(rows_of(request.planned), request.train, measured_utility(results) if results else None)


def _plan(request: "Request", at_once: int | None, calibrated: bool, effect: float, sessions: list[Any]) -> "Plan":
    from flsim.planning import plan as parts
    from flsim.planning.proof import provable_of
    from flsim.planning.scale import row_name, scale_of

    planned, train = request.planned, request.train
    machine = _machine()
    predictor = _measured(request, machine, at_once) if calibrated else None
    if predictor:
        machine = replace(machine, busy=predictor.calibration.watch.others)
    time = predictor.time(planned, at_once) if predictor else None
    memory = parts.memory_of(predictor.calibration.watch) if predictor else None
    held = parts.against(sessions, planned, predictor, memory) if predictor and memory else []
    if sessions and not held:
        raise InputError("--against: no session of that sweep trained only runs of this plan; give the same options")
    config, seeds = planned[0].config, len({planned_run.seed for planned_run in planned})
    scale = scale_of(planned, request.users, train)
    runs_at_once = time.at_once if time else 1 if request.whole_cluster else at_once or machine.cores
    return parts.Plan(
        request.name,
        request.tier,
        machine,
        scale,
        request.published,
        request.source,
        parts.disk_of(planned, train, runs_at_once, request.makes),
        tuple(parts.privacy_of(planned, row_name, train)),
        parts.power_of(scale.number, seeds, config.evaluation, effect, parts.comparisons_of(planned, row_name)),
        time,
        memory,
        tuple(held),
        provable=provable_of(planned, row_name, train),
    )


def _machine() -> "Machine":
    import torch

    from flsim.planning.predicting import Machine

    return Machine(os.cpu_count() or 1, torch.cuda.device_count())


def _measured(request: "Request", machine: "Machine", at_once: int | None) -> "Predictor":
    from flsim.planning.calibration import calibrate, copies_of
    from flsim.planning.cost import Need
    from flsim.planning.kinds import kind_of
    from flsim.planning.predicting import Predictor, fitting
    from flsim.runs.config import Config
    from server.launch import share

    def need(config: Config) -> Need:
        return Need(*share(config, [{"CPU": machine.cores, "GPU": machine.gpus}]))

    def runs_at_once(kind: str) -> int:
        """Return how many runs of a kind are trained at the same time."""
        of_kind = [planned_run.config for planned_run in request.planned if kind_of(planned_run.config) == kind]
        return 1 if request.whole_cluster else min(len(request.planned), fitting(need(of_kind[0]), machine, at_once))

    users = request.users
    device = "cuda" if machine.gpus else "cpu"
    copies = copies_of(
        request.planned, runs_at_once, users.words / users.users, users.records / users.users, users.vocabulary, device
    )
    measured = calibrate(copies, need, at_once, request.whole_cluster)
    return Predictor(measured, request.train, machine, need, request.whole_cluster)
