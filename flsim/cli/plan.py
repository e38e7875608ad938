"""`flsim plan`: what a run or a sweep will take, before it is trained."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flsim.base.errors import InputError
from flsim.cli.options import Json, Overrides
from flsim.cli.sweep import CorpusOption, Only, Seeds

if TYPE_CHECKING:
    from flsim.planning.plan import Plan
    from flsim.planning.predicting import Machine, Predictor
    from flsim.planning.requested import Request

EPILOG = """Example: flsim plan experiments/table1.toml --tier smoke

Example: flsim plan experiments/table2.toml --tier paper --no-calibration"""


def plan(
    file: Annotated[Path, typer.Argument(help="TOML file of a sweep or of a run; see experiments/.")],
    tier: Annotated[str | None, typer.Option(help="Scale, as a sweep's file defines it; default smoke.")] = None,
    seeds: Seeds = None,
    only: Only = None,
    corpus: CorpusOption = None,
    set_: Overrides = None,
    at_once: Annotated[int | None, typer.Option(min=1, help="Runs at once, at most; default as many as fit.")] = None,
    calibration: Annotated[
        bool, typer.Option("--calibration/--no-calibration", help="Train shortened runs, for time and memory.")
    ] = True,
    effect: Annotated[float, typer.Option(min=0.0, help="Difference in exposure to be found, bits.")] = 1.0,
    against: Annotated[
        Path | None, typer.Option(help="Folder of a finished sweep, to hold the prediction against.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a run, or all runs of a sweep, will take here: scale, time, memory, disk, epsilon, statistical power.

    Time and memory come from a calibration: a few runs are trained for some seconds each, as the sweep would.

    It takes a minute or two, and leaves nothing behind.
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
        found = read_request(file, folder, tier, range(seeds) if seeds else None, only or (), corpus, set_ or ())
        made = _plan(found, at_once, calibration and found.is_there, effect, sessions)
    typer.echo(json.dumps(made.to_json(), indent=2, allow_nan=False) if as_json else page(made), nl=as_json)


def _sessions(of: Path | None) -> list[Any]:
    from flsim.results.sweeps import read_sweep

    return [] if of is None else list(read_sweep(of).sessions)


def _plan(given: "Request", at_once: int | None, calibrated: bool, effect: float, sessions: list[Any]) -> "Plan":
    from flsim.planning import plan as parts
    from flsim.planning.scale import row_name, scale_of

    planned, train = given.planned, given.train
    machine = _machine()
    predictor = _measured(given, machine, at_once) if calibrated else None
    if predictor:
        machine = replace(machine, busy=predictor.calibration.watch.others)
    time = predictor.time(planned, at_once) if predictor else None
    memory = parts.memory_of(predictor.calibration.watch) if predictor else None
    held = parts.against(sessions, planned, predictor, memory) if predictor and memory else []
    if sessions and not held:
        raise InputError("--against: no session of that sweep trained only runs of this plan; give the same options")
    config, seeds = planned[0].config, len({each.seed for each in planned})
    scale = scale_of(planned, given.users, train)
    together = time.at_once if time else 1 if given.whole_cluster else at_once or machine.cores
    return parts.Plan(
        given.name,
        given.tier,
        machine,
        scale,
        given.published,
        given.source,
        parts.disk_of(planned, given.users, train, together, given.makes),
        tuple(parts.privacy_of(planned, row_name, given.users, train)),
        parts.power_of(scale.number, seeds, config.evaluation, effect),
        time,
        memory,
        tuple(held),
    )


def _machine() -> "Machine":
    import torch

    from flsim.planning.predicting import Machine

    return Machine(os.cpu_count() or 1, torch.cuda.device_count())


def _measured(given: "Request", machine: "Machine", at_once: int | None) -> "Predictor":
    from flsim.planning.calibration import calibrate, copies_of
    from flsim.planning.cost import Need
    from flsim.planning.kinds import kind_of
    from flsim.planning.predicting import Predictor, fitting
    from flsim.runs.config import Config
    from server.launch import share

    def need(config: Config) -> Need:
        return Need(*share(config, [{"CPU": machine.cores, "GPU": machine.gpus}]))

    def together(kind: str) -> int:
        """Runs of a kind at the same time."""
        of_kind = [each.config for each in given.planned if kind_of(each.config) == kind]
        return 1 if given.whole_cluster else min(len(given.planned), fitting(need(of_kind[0]), machine, at_once))

    users = given.users
    device = "cuda" if machine.gpus else "cpu"
    copies = copies_of(
        given.planned, together, users.words / users.users, users.records / users.users, users.vocabulary, device
    )
    measured = calibrate(copies, at_once, given.whole_cluster)
    return Predictor(measured, given.train, machine, need, given.whole_cluster)
