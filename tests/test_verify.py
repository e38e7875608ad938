"""`flsim verify`: any round of a run, trained again without Ray and Flower, has the digest that was logged."""

import json
import re
import shutil
from pathlib import Path

import pytest
from faulty import SETTINGS
from helpers import CENTRAL, Experiment, Flsim, Trained

from flsim.algorithms.micro_cohorts import FILE
from flsim.runs.config import load
from flsim.runs.folder import Run


@pytest.mark.slow
def test_any_round_of_a_private_run_is_equal(trained: Trained, flsim: Flsim, tmp_path: Path) -> None:
    run = shutil.copytree(trained(*SETTINGS), tmp_path / "run")
    # Checkpoints: evaluated rounds, and the last before the end.
    for round_, start in ((1, 0), (10, 0), (27, 25), (30, 25)):
        said = flsim("verify", run, "--round", str(round_))[1]
        assert re.fullmatch(rf"round {round_}: trained again from round {start}, equal, digest \w+\n", said), said
    assert flsim("verify", run)[1].startswith("round 30: trained again from round 25, equal, digest ")
    (found,) = flsim("verify", run, "--round", "8", "--json")[1].splitlines()
    assert json.loads(found)["differs"] is None

    _change_digest(run, 22)
    code, _, said = flsim("verify", run, "--round", "24")
    assert code == 1
    assert "trained again from round 20, round 22 differs: logged 0000" in said
    code, _, said = flsim("verify", run, "--round", "31")
    assert code == 2
    assert "cannot verify round 31; it logged 1 to 30" in said


@pytest.mark.nightly
def test_rounds_of_users_who_train_stacked_too(experiment: Experiment, flsim: Flsim) -> None:
    """With a size that is recorded for one shard from round 2 on, as where memory ran out there."""
    run = Run.create(load(experiment.config, ["system.micro_cohort=4", "system.shards=2"]), experiment.folder / "run")
    (run.path / FILE).write_text('{"users": 1, "shard": 1, "round": 1}\n')
    experiment.run("run", "system.micro_cohort=4", "system.shards=2", options=["--resume"])
    assert (run.path / FILE).read_text().count("\n") == 1
    for round_ in (1, 2, 4):
        assert "equal" in flsim("verify", run.path, "--round", str(round_), "--device", "cpu")[1]


@pytest.mark.slow
def test_steps_of_central_training_too(experiment: Experiment, trained: Trained, flsim: Flsim) -> None:
    experiment.config.write_text(CENTRAL)
    run = shutil.copytree(trained("data.partition=iid"), experiment.folder / "run")
    said = flsim("verify", run, "--round", "35")[1]
    assert said.startswith("round 35: trained again from round 20, equal")
    _change_digest(run, 35)
    code, _, said = flsim("verify", run, "--round", "35")
    assert code == 1
    assert "trained again from round 20, round 35 differs: logged 0000" in said


def _change_digest(run: Path, round_: int) -> None:
    log = run / "rounds.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["round"] == round_:
            line["digest"] = "0" * 64
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
