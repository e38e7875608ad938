"""Runs with a network of a user's own: killed, resumed, private, and refused with another version of the file."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment, assert_same, final_params, killed_and_whole, rows
from own_model import CENTRAL, SECTION, TINY_OWN, TWISTED, write_model
from stepping import same
from torch import Tensor

from flsim.algorithms.checkpoint import latest, load, save
from flsim.base.errors import InputError
from flsim.base.files import file_digest
from flsim.models.architectures import build
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from server.verify import verify


@pytest.fixture
def own(experiment: Experiment) -> Experiment:
    """`experiment`, with the network of `own_model` in the place of the CIFG."""
    write_model(experiment.folder)
    experiment.config.write_text(TINY_OWN + SECTION)
    return experiment


@pytest.mark.nightly  # tests/test_extending.py kills a run of everything of one's own at once
def test_a_federated_run_is_killed_and_resumes_to_the_same_bits(own: Experiment) -> None:
    """On two client processes, through Flower and Ray; then it is moved, verified and measured where it lies."""
    killed, whole = killed_and_whole(own, "training.rounds=12", "system.shards=2", workers=2)
    assert_same(killed, whole)
    assert "words.weight" in final_params(whole)
    assert not any(torch.equal(value, first) for value, first in _movement(whole))
    (copy,) = (whole / "code").iterdir()
    assert copy.name == f"mine.{file_digest(own.folder / 'mine.py')[:16]}.py"
    assert f'architecture = "code/{copy.name}:TwistedGRU"' in (whole / "config.toml").read_text()
    (own.folder / "mine.py").unlink()
    moved = Path(shutil.move(whole, own.folder / "elsewhere"))
    assert "TwistedGRU" in own.call("table", moved).stdout
    own.call("verify", moved, "--round", "12")
    newest = latest(moved / "checkpoints")
    assert newest is not None
    before = rows(moved)
    evaluate_checkpoint(moved, newest)
    assert rows(moved).equals(before)


def _movement(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Each parameter after training, and before."""
    first = Run.open(path).training().first_state().params
    return [(value, first[name]) for name, value in final_params(path).items() if name != "cells.bias_hh_l0"]


@pytest.mark.nightly
def test_a_private_central_run(own: Experiment) -> None:
    """DP-SGD by `flsim run`, and a step trained again."""
    own.config.write_text(CENTRAL + SECTION)
    settings = ("privacy.mechanism='dp'", "privacy.clip=0.5", "privacy.noise_multiplier=0.5")
    path = own.run("run", *settings)
    assert json.loads((path / "run.json").read_text())["status"] == "completed"
    assert verify(Run.open(path), 20).differs is None


def copy_of(run: Run) -> Path:
    """The one file of a user's own in a run folder."""
    (copy,) = (run.path / "code").iterdir()
    return copy


def test_another_version_of_the_file_is_another_run(own: Experiment) -> None:
    """A changed file is refused, on resume as by whoever verifies; the digest knows the content, and no path."""
    settings = config.load(own.config)
    run = Run.create(settings, own.folder / "run")
    assert run.config.digest == settings.digest == Run.open(run.path).config.digest
    other = shutil.copytree(own.folder, own.folder.parent / "other", ignore=shutil.ignore_patterns("run"))
    assert config.load(other / "tiny.toml").digest == settings.digest
    assert Run.reopen(settings, run.path).parameters["model.architecture"] == f"{copy_of(run).name}:TwistedGRU"
    before = settings.digest
    write_model(own.folder, ("self.scale * ", "(1 + self.scale) * "))
    copy = copy_of(run)
    refused = own.call("run", own.config, "--out", "run", "--resume", check=False)
    message = f"run: this run was started with another version of {own.folder}/mine.py, which is {copy};"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
    assert config.load(own.config).digest != before
    copy.write_text(TWISTED + "\n")
    with pytest.raises(
        InputError, match=re.escape(f"{copy}: the file changed after the run was started; restore the file")
    ):
        Run.open(run.path).verify()


def test_a_checkpoint_knows_the_content_of_the_file_and_what_stays(own: Experiment) -> None:
    run = Run.create(config.load(own.config), own.folder / "run")
    state = run.training().first_state()
    path = run.save(replace(state, round=4))
    _, provenance = load(path)
    digest = file_digest(own.folder / "mine.py")
    assert provenance.model.architecture == f"{digest}.py:TwistedGRU"
    assert provenance.model.options == {"scale": 2.5}
    assert provenance.frozen == build(40, run.config.model).frozen_digest
    assert same(run.load(path), replace(state, round=4))
    other = save(run.path / "checkpoints", replace(state, round=6), replace(run.provenance, frozen="0" * 64))
    with pytest.raises(InputError, match=r"this checkpoint has another model .* frozen 000000000000"):
        run.load(other)
