"""A run whose machine loses power after any step of its writing: it is resumed to the same bits."""

import json
import sys
from pathlib import Path

import pytest
from helpers import PRIVATE, Experiment
from power import resuming
from power.recording import record
from power.replaying import HEAD, IS_WHOLE, Replay, replay
from test_central_run import CENTRAL

from flsim.progress import say

SMALL = (
    "canaries.p_u=[0.5]",
    "canaries.p_e=[1.0]",
    "canaries.count=1",
    "evaluation.references=20",
    "evaluation.every=3",
    "system.checkpoint_every=2",
    "system.tracking=[]",
)
FEDERATED = (*SMALL, *PRIVATE, "training.rounds=6")
STEPS = (*SMALL, "training.steps=6")
HERE = str(Path(resuming.__file__))
SAMPLE = 20


def replayed(
    experiment: Experiment, name: str, settings: tuple[str, ...], with_ray: bool, sample: int | None, **env: str
) -> Replay:
    """Record a run, by the real command or in one process, and lose its power."""
    (folder := experiment.folder / "recorded").mkdir()
    arguments = ["run", str(experiment.config), *(part for text in settings for part in ("--set", text)), "--out"]
    command = [sys.executable, *(["-m", "flsim"] if with_ray else [HERE])]
    ops = record([*command, *arguments, str(folder / "run")], folder, env)
    whole = resuming.outcome(folder / "run")
    assert whole["status"] == "completed"

    def go_on(state: Path) -> str:
        run = state / "run"
        is_there, status = run.exists(), resuming.status(run)
        with resuming.without_ray():
            code, said = resuming.command(*arguments, run, *(["--resume"] if is_there else []))
        assert code == 0, said
        assert resuming.outcome(run) == whole
        return "completed before" if status == "completed" else "resumed" if is_there else "begun again"

    return replay(name, ops, experiment.folder, go_on, sample)


@pytest.mark.parametrize(
    ("name", "settings"), [("central run", STEPS), ("federated run", FEDERATED)], ids=["central", "federated"]
)
def test_a_run_that_lost_power_ends_as_if_it_had_not(
    experiment: Experiment, name: str, settings: tuple[str, ...]
) -> None:
    if settings is STEPS:
        experiment.config.write_text(CENTRAL)
    made = replayed(experiment, name, settings, with_ray=IS_WHOLE, sample=None if IS_WHOLE else SAMPLE)
    say(f"\n{HEAD}\n{made.row()}\n")
    assert not made.wrong, json.dumps(made.wrong, indent=2)
    assert made.ends["resumed"]
    assert +made.last == {"completed before": made.last.total()}


def test_without_syncs_runs_are_lost(experiment: Experiment) -> None:
    """What is replayed can fail: the same run, where nothing is ever synced."""
    experiment.config.write_text(CENTRAL)
    made = replayed(experiment, "unsynced", STEPS, with_ray=False, sample=SAMPLE, NO_SYNC="1")
    assert made.wrong
