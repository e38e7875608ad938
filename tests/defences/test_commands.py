"""Tests run the commands of defences: a pipeline up to training, a custom optimizer, refusals in one line, kills."""

import json
import subprocess
import sys

import pytest
from dumps import folder_bytes
from helpers import Experiment, MakeCorpus, assert_refused
from waiting import wait_until

from flsim.base.files import file_digest
from flsim.canaries.population import PlantedCorpus
from flsim.data.corpus import Corpus
from flsim.runs.config import load
from flsim.runs.folder import Run

SMALL = ["--embedding", "6", "--units", "8", "--epochs", "2"]


@pytest.mark.slow
def test_a_planted_deduplicated_and_sanitized_corpus_can_be_trained_on(experiment: Experiment) -> None:
    """A real run trains on the remaining records. Some users have lost all records."""
    experiment.call("data", "plant", "corpus", "--config", "tiny.toml", "--out", "planted")
    distinct = experiment.call("data", "deduplicate", "planted", "--near", "0.8", "--out", "distinct").stdout
    sane = experiment.call("data", "sanitize", "distinct", "--out", "sane", "--share", "0.2", *SMALL, "--json").stdout

    before, after = (Corpus.open(experiment.folder / name, verify=True) for name in ("planted", "sane"))
    had, has = PlantedCorpus.read(before), PlantedCorpus.read(after)
    assert had is not None
    assert has is not None
    about = json.loads(sane)
    assert about["digest"] == after.digest
    assert [step["step"] for step in about["parameters"]["steps"]] == ["plant", "deduplicate", "sanitize"]
    assert about["parameters"]["steps"][-1]["planted"]["copies"] == has.copies <= had.present
    assert f"deduplicate: kept {had.present} of {had.copies} canary copies" in distinct
    dropped = after.manifest["dropped"]
    assert before.split("train").records - about["records"] == sum(dropped.values())
    assert dropped["records_sanitized"] > 0

    run = Run.open(
        experiment.run("run", "data.corpus=sane", "training.cohort=24", "training.rounds=2", options=["--in-process"])
    )
    assert not all(len(run.users[user]) for user in range(len(run.users)))
    assert [canary.id for canary in run.canaries] == [canary.id for canary in had.planting.canaries]
    assert run.config.digest == load(experiment.config, ["training.cohort=24"]).digest
    assert json.loads((run.path / "run.json").read_text())["status"] == "completed"


def test_sanitizing_with_a_custom_optimizer_records_the_digest_of_its_code(experiment: Experiment) -> None:
    """The manifest does not have the folder of the code, because a corpus may be moved."""
    own = experiment.folder / "my_optimizers.py"
    own.write_text("import torch\n\ndef mine(parameters, lr):\n    return torch.optim.Adam(parameters, lr)\n")
    experiment.call("data", "sanitize", "corpus", "--out", "built-in", *SMALL)
    experiment.call("data", "sanitize", "corpus", "--out", "sane", *SMALL, "--optimizer", f"{own.name}:mine")
    built_in, sane = (folder_bytes(experiment.folder / name) for name in ("built-in", "sane"))
    assert sane["train/tokens.u16"] == built_in["train/tokens.u16"]
    (step,) = json.loads(sane["manifest.json"])["parameters"]["steps"]
    assert step["training"]["optimizer"] == f"{file_digest(own)}.py:mine"
    assert str(experiment.folder).encode() not in sane["manifest.json"]
    done = experiment.call("data", "sanitize", "corpus", "--out", "other", "--optimizer", "adams", check=False)
    assert done.returncode == 2
    assert "optimizer must be one of sgd, momentum, adam, rmsprop, found 'adams'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deduplicate", "corpus", "--near", "1.2"], "near must be at most 1, found 1.2"),
        (["deduplicate", "empty"], "empty: has 0 train records, but needs 1"),
        (["sanitize", "corpus", "--share", "1"], "share must be below 1, found 1"),
        (["sanitize", "empty"], "empty: has 0 train records, but needs 2"),
        (["plant", "corpus", "--config", "tiny.toml", "--set", "canaries.length=30"], "of 30 words would be cut"),
        (["plant", "empty", "--config", "tiny.toml"], "empty: this corpus has no train records"),
        (["sanitize", "corpus", "--epochs", "1e9", "--out", "corpus"], "corpus: already exists"),  # before it trains
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_no_output(
    experiment: Experiment, make_corpus: MakeCorpus, arguments: list[str], message: str
) -> None:
    make_corpus([[]], name="empty")
    command = ["data", arguments[0], "--out", "made", *arguments[1:]]
    assert_refused(experiment.folder, command, message)


@pytest.mark.slow
def test_sigkill_leaves_no_partial_output(experiment: Experiment) -> None:
    """One command is killed while its second model trains, after the first, and one while it writes records."""
    made = experiment.folder / "made"
    command = [sys.executable, "-m", "flsim", "data", "sanitize", "corpus", "--out", "made", *SMALL[:-1], "200"]
    training = subprocess.Popen(command, cwd=experiment.folder, stderr=subprocess.PIPE, text=True)
    assert training.stderr is not None
    assert training.stderr.readline().startswith("training on half 1 of 2: ")
    assert training.poll() is None
    training.kill()
    training.communicate()
    assert sorted(path.name for path in experiment.folder.iterdir()) == ["corpus", "tiny.toml"]

    command = [sys.executable, "-m", "flsim", "data", "deduplicate", "corpus", "--out", "made"]
    writing = subprocess.Popen(command, cwd=experiment.folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_until(lambda: any(experiment.folder.glob(".made.partial-*/train")) or writing.poll() is not None)
    writing.kill()
    if writing.wait() == 0:  # the command ended before the kill, so its output is complete
        Corpus.open(made, verify=True)
    else:
        assert not made.exists()
