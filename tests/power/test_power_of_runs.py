"""If a run's machine loses power after any step of its writing, the run resumes to the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import CENTRAL, PRIVATE, Experiment
from power import resuming
from power.disk import read_in
from power.recording import record
from power.replaying import HEAD, IS_WHOLE, GoOn, Replay, replay

from flsim.base.progress import say

CANARY = ("canaries.p_u=[0.5]", "canaries.p_e=[1.0]", "canaries.count=1")
SMALL = (*CANARY, "evaluation.references=20", "evaluation.every=3", "system.checkpoint_every=2", "system.tracking=[]")
FEDERATED = (*SMALL, *PRIVATE, "training.rounds=6")
STEPS = (*SMALL, "training.steps=6")
HERE = str(Path(resuming.__file__))
SAMPLE = 12


def replayed(
    experiment: Experiment, name: str, settings: tuple[str, ...], with_ray: bool, sample: int | None, **env: str
) -> Replay:
    """Record a run, with the command or in one process, and replay it with losses of power."""
    (folder := experiment.folder / "recorded").mkdir()
    command = [sys.executable, *(["-m", "flsim"] if with_ray else [HERE]), *arguments(experiment, settings)]
    ops = record([*command, str(folder / "run")], folder, env)
    whole = resuming.outcome(folder / "run")
    assert whole["status"] == "completed"
    return replay(name, ops, experiment.folder, going_on(experiment, settings, whole), sample)


def arguments(experiment: Experiment, settings: tuple[str, ...]) -> list[str]:
    """Return the arguments of the command without the folder."""
    return ["run", str(experiment.config), *(part for text in settings for part in ("--set", text)), "--out"]


def going_on(experiment: Experiment, settings: tuple[str, ...], whole: dict[str, Any]) -> GoOn:
    """Return a function that resumes a run, or starts it if its folder is missing, and requires the outcome `whole`."""

    def go_on(state: Path) -> str:
        run = state / "run"
        is_there, status = run.exists(), resuming.status(run)
        with resuming.without_ray():
            code, said = resuming.command(*arguments(experiment, settings), run, *(["--resume"] if is_there else []))
        assert code == 0, said
        assert resuming.outcome(run) == whole
        return "completed before" if status == "completed" else "resumed" if is_there else "begun again"

    return go_on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("central run", STEPS), ("federated run", FEDERATED)], ids=["central", "federated"]
)
def test_a_run_that_lost_power_has_equal_results(experiment: Experiment, name: str, settings: tuple[str, ...]) -> None:
    if settings is STEPS:
        experiment.config.write_text(CENTRAL)
    made = replayed(experiment, name, settings, with_ray=IS_WHOLE, sample=None if IS_WHOLE else SAMPLE)
    say(f"\n{HEAD}\n{made.row()}\n")
    assert not made.wrong, json.dumps(made.wrong, indent=2)
    assert made.ends["resumed"]
    assert made.last == {"completed before": made.last.total()}


@pytest.mark.slow
def test_without_syncs_runs_are_lost(experiment: Experiment) -> None:
    """The replay can fail: it finds errors in the same run if nothing is ever synced."""
    experiment.config.write_text(CENTRAL)
    made = replayed(experiment, "unsynced", STEPS, with_ray=False, sample=SAMPLE, NO_SYNC="1")
    assert made.wrong


@pytest.mark.nightly
def test_a_repair_that_lost_power_is_completed_by_the_next_resume(experiment: Experiment) -> None:
    """Two checkpoints are damaged, of which the first must be evaluated and has no rows; the log ends within a line."""
    experiment.config.write_text(CENTRAL)
    (folder := experiment.folder / "recorded").mkdir()
    command = [sys.executable, HERE, *arguments(experiment, STEPS), str(run := folder / "run")]
    subprocess.run(command, check=True, capture_output=True)
    whole = resuming.outcome(run)
    for step in (3, 4):
        damage(run / "checkpoints" / f"round-{step:06d}.safetensors")
    (run / "rows" / "round-000003.parquet").unlink()
    log = run / "rounds.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    start = read_in(folder)
    ops = record([*command, "--resume"], folder)
    aside = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"round-000003.safetensors.damaged", "round-000006.safetensors.superseded"} <= aside
    assert resuming.outcome(run) == whole
    sample = None if IS_WHOLE else SAMPLE
    made = replay("repair", ops, experiment.folder, going_on(experiment, STEPS, whole), sample, start)
    say(f"\n{HEAD}\n{made.row()}\n")
    assert not made.wrong, json.dumps(made.wrong, indent=2)


def damage(path: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
