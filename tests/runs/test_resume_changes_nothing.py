"""A resume changes nothing in the run folder until it holds the lock and every check has passed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import CENTRAL, TINY, Experiment, Trained

from flsim.runs import recovery
from flsim.runs.folder import Run
from flsim.runs.recovery import DRIVEN, TRAINED, hold_lock
from server.cluster.nodes import environment_of

Damaged = Callable[[str, str], Path]
LOCKS = {TRAINED, DRIVEN, "log.jsonl"}  # what a process that waits for the lock, or is refused with it, may write
FEDERATED = (TINY, "training.rounds")


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in LOCKS}


@pytest.fixture
def damaged(experiment: Experiment, copy_of_trained: Trained) -> Damaged:
    """A run of four rounds whose newest checkpoint is damaged, so that a resume has something to put aside."""

    def make(config: str, length: str) -> Path:
        experiment.config.write_text(config)
        run = copy_of_trained(f"{length}=4", "system.checkpoint_every=1")
        newest = max((run / "checkpoints").iterdir())
        newest.write_bytes(newest.read_bytes()[:-1])
        return run

    return make


@pytest.mark.parametrize(("config", "length"), [FEDERATED, (CENTRAL, "training.steps")], ids=["federated", "central"])
def test_a_refused_resume_changes_nothing(experiment: Experiment, damaged: Damaged, config: str, length: str) -> None:
    run = damaged(config, length)
    before = tree(run)
    more = ("--set", "system.checkpoint_every=1", "--set", f"{length}=6")
    for options, message in (
        (("--address", "127.0.0.1:1"), "no Ray cluster answers there"),
        (("--in-process", "--cpus", "2"), "--in-process does not use Ray"),
        (("--in-process", "--set", "seed=5"), "seed was 0 and is now 5"),
        (("--in-process", "--begin-from", "run"), "has already started"),
        (("--in-process", "--set", f"{length}=3"), "4 rounds are trained already, and the settings have 3"),
    ):
        refused = experiment.call("run", "tiny.toml", "--out", "run", "--resume", *more, *options, check=False)
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert tree(run) == before


def test_a_resume_of_a_live_run(experiment: Experiment, damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that holds the lock is this one. Once the lock is free, the same command records its settings."""
    run = damaged(*FEDERATED)
    before = tree(run)
    again = ("run", "tiny.toml", "--out", "run", "--resume", "--in-process", "--set", "training.rounds=6")
    with hold_lock(Run.open(run)), monkeypatch.context() as patch:
        patch.setattr(recovery, "LOCK_DEADLINE", 0.3)
        refused = experiment.call(*again, check=False)
    assert refused.returncode == 1
    assert "trains this run" in refused.stderr
    assert tree(run) == before
    experiment.call(*again)
    assert Run.open(run).rounds == 6
    assert [path.name for path in (run / "checkpoints").glob("*.damaged")] == ["round-000004.safetensors.damaged"]


def test_a_custom_file_of_another_name_and_the_same_content_is_not_copied_again(experiment: Experiment) -> None:
    source = "def plain(done, total):\n    return 1.0\n"
    for name in ("one.py", "other.py"):
        (experiment.folder / name).write_text(source)
    options = ("run", "tiny.toml", "--out", "run", "--in-process", "--set")
    experiment.call(*options, "local.schedule=one.py:plain")
    (copy,) = (experiment.folder / "run" / "code").iterdir()
    experiment.call(*options, "local.schedule=other.py:plain", "--resume")
    assert [*(experiment.folder / "run" / "code").iterdir()] == [copy]
    assert copy.name.startswith("one.")


def test_nodes_that_join_later_know_the_run(experiment: Experiment, damaged: Damaged) -> None:
    """A node that joins later reads config.toml as the resume has written it."""
    run = damaged(*FEDERATED)
    corpus = experiment.folder / "corpus"
    before = environment_of(run, corpus)
    experiment.call("run", "tiny.toml", "--out", "run", "--resume", "--in-process", "--set", "training.rounds=6")
    assert before.run is not None
    assert environment_of(run, corpus).run == before.run
