"""`flsim verify`: any round of a run, trained again without Ray and Flower, has the digest that was logged."""

import json
import re
from pathlib import Path

from helpers import PRIVATE, Experiment

CENTRAL = ("training.kind='central'", "training.steps=40", "training.batch_size=9", "evaluation.every=20")


def test_any_round_of_a_private_run_is_trained_again_to_the_same_state(experiment: Experiment) -> None:
    run = experiment.run("run", *PRIVATE, "training.rounds=8", "evaluation.every=4", "system.shards=3")
    for round_, start in ((1, 0), (4, 0), (7, 4), (8, 7)):  # checkpoints: evaluated rounds, and the last before the end
        said = experiment.flsim("verify", run, "--round", str(round_)).stdout
        assert re.fullmatch(rf"round {round_}: trained again from round {start}, equal, digest \w+\n", said), said
    (found,) = experiment.flsim("verify", run, "--round", "8", "--json").stdout.splitlines()
    assert json.loads(found)["differs"] is None

    _change_digest(run, 6)
    failed = experiment.flsim("verify", run, "--round", "7", check=False)
    assert failed.returncode == 1
    assert "trained again from round 4, round 6 differs: logged 0000" in failed.stderr
    refused = experiment.flsim("verify", run, "--round", "9", check=False)
    assert refused.returncode == 2
    assert "cannot verify round 9; it logged 1 to 8" in refused.stderr


def test_steps_of_central_training_too(experiment: Experiment) -> None:
    text = experiment.config.read_text()  # the sections of federated training go
    text = re.sub(r"\[(training|local)\][^\[]*", "", text)
    experiment.config.write_text(text)
    run = experiment.run("run", *CENTRAL, "system.checkpoint_every=7")
    said = experiment.flsim("verify", run, "--round", "35").stdout
    assert said.startswith("round 35: trained again from round 20, equal")
    _change_digest(run, 35)
    failed = experiment.flsim("verify", run, "--round", "35", check=False)
    assert failed.returncode == 1
    assert "trained again from round 20, round 35 differs: logged 0000" in failed.stderr


def _change_digest(run: Path, round_: int) -> None:
    log = run / "rounds.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["round"] == round_:
            line["digest"] = "0" * 64
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
