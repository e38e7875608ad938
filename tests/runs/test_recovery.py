"""A checkpoint that cannot be used never blocks a resume while an older good checkpoint exists."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty import assert_equal_runs
from helpers import PRIVATE, Experiment, Trained
from safetensors import safe_open
from safetensors.torch import save_file

from flsim.algorithms.checkpoint import all_in, digest_of
from flsim.base.errors import InputError
from flsim.runs.folder import Run
from flsim.runs.recovery import recover

OPTIONS = ("--out", "run", "--in-process", *(part for text in PRIVATE for part in ("--set", text)))
BODY_STEP = 101  # a prime, so that the sample of tensor bytes meets every position within a float


@pytest.fixture
def run(copy_of_trained: Trained) -> Run:
    """A private run of four rounds with a checkpoint of each, trained by the command."""
    return Run.open(copy_of_trained(*PRIVATE))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def positions(content: bytes) -> Iterator[int]:
    """Yield every byte of the header and of its length, and a sample of the bytes of tensors."""
    header = 8 + int.from_bytes(content[:8], "little")
    yield from range(header)
    yield from range(header, len(content), BODY_STEP)


def without_seal(path: Path, change: Callable[[dict[str, str]], None] = lambda metadata: None) -> None:
    """Write a checkpoint again as versions without a seal wrote it, with changed metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "seal"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    change(metadata)
    save_file(tensors, path, metadata)


def of_another_corpus(metadata: dict[str, str]) -> None:
    metadata["corpus"] = flipped(metadata["corpus"].encode(), 3).decode()


@pytest.mark.slow
def test_no_flipped_bit_blocks_recovery_or_changes_the_model(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest checkpoint of a run stays only if it holds the state that was saved; else the one before is used."""
    *_, before, newest = all_in(run.path / "checkpoints")
    aside = newest.with_name(f"{newest.name}.damaged")
    log, content = (run.path / "rounds.jsonl").read_bytes(), newest.read_bytes()
    digests = {path.name: digest_of(run.load(path)) for path in (before, newest)}
    survived = 0
    for at in positions(content):
        (run.path / "rounds.jsonl").write_bytes(log)
        newest.write_bytes(flipped(content, at))
        aside.unlink(missing_ok=True)
        capsys.readouterr()
        recover(run)
        latest = all_in(run.path / "checkpoints")[-1]
        assert digest_of(run.latest_state()) == digests[latest.name], at
        if latest == newest:
            survived += 1
            continue
        assert latest == before, at
        assert aside.read_bytes() == flipped(content, at)
        said = capsys.readouterr().err
        assert " ".join(said.split()).count(newest.name) == 2, said  # its path, and the name that it has now
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    assert survived <= len("seal") + header.count(b" ")  # without a seal all else is as it was written


def test_a_run_resumes_past_a_flipped_bit_to_the_same_bits(experiment: Experiment, run: Run) -> None:
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    newest = all_in(run.path / "checkpoints")[-1]
    content = newest.read_bytes()
    newest.write_bytes(flipped(content, content.index(b'"ledger') + 8))
    said = experiment.call("run", experiment.config, *OPTIONS, "--resume").stderr
    assert f"{newest.name}.damaged" in " ".join(said.split())
    assert_equal_runs(run.path, whole)


@pytest.mark.parametrize("target", ["/nowhere/x", "round-000004.safetensors"])
def test_a_link_to_nothing_is_put_aside(experiment: Experiment, run: Run, target: str) -> None:
    """The second case is a link to itself."""
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    newest = all_in(run.path / "checkpoints")[-1]
    assert newest.name == "round-000004.safetensors"
    newest.unlink()
    newest.symlink_to(target)
    experiment.call("run", experiment.config, *OPTIONS, "--resume")
    assert newest.with_name(f"{newest.name}.damaged").is_symlink()
    assert_equal_runs(run.path, whole)


def test_an_odd_checkpoint_without_a_seal_is_put_aside(experiment: Experiment, run: Run) -> None:
    """Such a file may be damaged, or of another run; the others are of this run either way."""
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    for path in all_in(run.path / "checkpoints"):
        without_seal(path)
    newest = all_in(run.path / "checkpoints")[-1]
    without_seal(newest, of_another_corpus)
    said = experiment.call("run", experiment.config, *OPTIONS, "--resume").stderr
    assert "trained on another corpus" in " ".join(said.split())
    assert newest.with_name(f"{newest.name}.foreign").exists()
    assert_equal_runs(run.path, whole)


def test_a_run_whose_checkpoints_are_all_of_another_run_is_refused_and_keeps_them(run: Run) -> None:
    """Training again from the beginning would take the wrong folder for this run's."""
    for path in all_in(run.path / "checkpoints"):
        without_seal(path, of_another_corpus)
    before = {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}
    with pytest.raises(InputError, match="trained on another corpus"):
        recover(run)
    assert before == {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}


def test_an_odd_checkpoint_that_was_still_to_be_evaluated_is_trained_again(experiment: Experiment, run: Run) -> None:
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    due = run.path / "checkpoints" / "round-000002.safetensors"
    without_seal(due, of_another_corpus)
    (run.path / "rows" / "round-000002.parquet").unlink()
    said = experiment.call("run", experiment.config, *OPTIONS, "--resume").stderr
    assert "an unusable checkpoint had not been evaluated" in " ".join(said.split())
    assert_equal_runs(run.path, whole)
    assert json.loads((run.path / "run.json").read_text())["round"] == run.rounds
