"""Tests move, copy and link run folders, and remove or add files: flsim loses nothing, or reports the loss."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from faulty import OPTIONS, SETTINGS, assert_equal_runs, digests
from helpers import CENTRAL, Experiment, Trained

from flsim.base.files import held
from flsim.results.rows import read_run
from flsim.runs import recovery

Interrupted = Callable[[str], Path]
NOBODY = ("--address", "127.0.0.1:1")  # no cluster answers at this address


def resume(experiment: Experiment, out: str, *options: str) -> str:
    """Continue a run to its end without Ray; return what was reported."""
    command = ("--out", out, "--in-process", *OPTIONS, *options, "--resume")
    return experiment.call("run", experiment.config, *command).stderr


def test_a_new_run_that_cannot_begin_leaves_no_folder(experiment: Experiment) -> None:
    refused = experiment.call("run", experiment.config, "--out", "new", *OPTIONS, *NOBODY, check=False)
    assert refused.returncode == 2
    assert [path.name for path in experiment.folder.glob("*new*")] == []


@pytest.mark.parametrize("harm", ["trains it", "left a checkpoint", "left rows", "left a round"])
def test_a_refused_run_is_kept_if_another_process_uses_its_folder(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """The other process starts to use the folder after its creation and before the refusal."""
    run, discard = experiment.folder / "new", recovery.discard
    left = {
        "left a checkpoint": run / "checkpoints" / "round-000005.safetensors",
        "left rows": run / "rows" / "round-000005.parquet",
        "left a round": run / "rounds.jsonl",
    }

    def late(training: object) -> None:
        if harm in left:
            left[harm].touch()
            discard(training)  # type: ignore[arg-type]
        else:
            (run / recovery.TRAINED).touch()
            with held(run / recovery.TRAINED):
                discard(training)  # type: ignore[arg-type]

    monkeypatch.setattr("flsim.api.discard", late)
    refused = experiment.call("run", experiment.config, "--out", "new", *OPTIONS, *NOBODY, check=False)
    assert refused.returncode == 2
    assert (run / "config.toml").exists()
    assert all(path.exists() for name, path in left.items() if name == harm)


@pytest.mark.nightly
def test_commands_find_runs_in_any_folder(experiment: Experiment, interrupted: Interrupted, undisturbed: Path) -> None:
    """A moved run resumes through a link, and commands accept the link and a copy with another name."""
    run = interrupted("kept here")
    moved = run.rename(experiment.folder / "moved")
    (experiment.folder / "link").symlink_to(moved)
    resume(experiment, "link")
    assert_equal_runs(moved, undisturbed)
    shutil.copytree(moved, experiment.folder / "backup")
    for name, called in (("link", "moved"), ("backup", "backup")):
        experiment.call("table", name)
        assert read_run(experiment.folder / name).name == called
        assert experiment.call("verify", name, "--round", "27").stdout.startswith(
            "round 27: trained again from round 25"
        )
        newest = Path(name, "checkpoints", "round-000030.safetensors")
        experiment.call("evaluate", newest)
        pd.testing.assert_frame_equal(read_run(experiment.folder / name).rows, read_run(undisturbed).rows)
    assert json.loads((moved / "run.json").read_text())["name"] == "moved"


@pytest.mark.nightly
def test_equal_copies_of_a_run_are_one_row_of_a_table_and_others_are_refused(
    experiment: Experiment, undisturbed: Path, interrupted: Interrupted
) -> None:
    whole = shutil.copytree(undisturbed, experiment.folder / "whole")
    interrupted("behind")
    done = experiment.call("table", "behind", "whole")
    assert "run behind: has the settings, seed and rounds of whole, and is shown once, as whole" in done.stderr
    assert done.stdout == experiment.call("table", "whole").stdout
    _change_rows(whole, lambda rows: rows.assign(value=rows["value"].where(rows["metric"] != "accuracy", 0.5)))
    done = experiment.call("table", "behind", "whole", check=False)
    assert done.returncode == 2
    assert (
        "runs whole and behind: copies of one run, whose accuracy of round 10 differ; exclude one of them"
        in done.stderr
    )
    done = experiment.call("compare", "behind", "whole", check=False)
    assert done.returncode == 2
    assert "copies of the same run" in done.stderr


@pytest.mark.nightly
def test_rows_of_another_run_are_refused(
    experiment: Experiment, interrupted: Interrupted, copy_of_trained: Trained
) -> None:
    """Tables, and a resume at its start, refuse rows of a run with the same name, seed and canaries."""
    rows = interrupted("mine") / "rows" / "round-000010.parquet"
    shutil.copy(copy_of_trained(*SETTINGS, "local.learning_rate=0.07") / "rows" / rows.name, rows)
    commands: list[tuple[str | Path, ...]] = [
        ("table", "mine"),
        ("run", experiment.config, "--out", "mine", *OPTIONS, *NOBODY, "--resume"),
    ]
    for command in commands:
        done = experiment.call(*command, check=False)
        assert done.returncode == 2
        assert f"{rows.name}: the file has rows of a run with other settings" in " ".join(done.stderr.split())


@pytest.mark.nightly
def test_lost_rounds_in_the_log_are_marked_and_reported_and_retrained_with_the_option(
    experiment: Experiment, interrupted: Interrupted, undisturbed: Path
) -> None:
    """Lines are missing, duplicated or not text. The resumed run's log has each round once, and marks lost rounds."""
    run = interrupted("holes")
    lines = _log(run)
    _write_log(run, [*lines[:4], *lines[3:6], b"\xff\xfe\x80", *lines[12:16], lines[26]])
    said = " ".join(resume(experiment, "holes").split())
    assert "rounds.jsonl: rounds 7 to 12, 17 to 25 are missing; flsim marks them as lost" in said
    assert "completed, but rounds.jsonl has lost rounds 7 to 12, 17 to 25; --resume --retrain-lost trains them" in said
    log = [json.loads(line) for line in _log(run)]
    assert [line["round"] for line in log] == list(range(1, 31))
    assert [line["round"] for line in log if line.get("lost")] == [*range(7, 13), *range(17, 26)]
    about = json.loads((run / "run.json").read_text())
    assert (about["status"], about["reason"]) == ("completed", "rounds.jsonl has lost rounds 7 to 12, 17 to 25")
    assert "has lost rounds 7 to 12" in experiment.call("table", "holes").stdout

    whole_states = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    said = " ".join(resume(experiment, "holes", "--retrain-lost").split())
    assert "training restarts from round 0: the log has lost the next round" in said
    assert_equal_runs(run, undisturbed)
    assert digests(run) == digests(undisturbed)
    assert json.loads((run / "run.json").read_text())["reason"] is None
    kept = {path.name: path.read_bytes() for path in (run / "checkpoints").glob("*.superseded")}
    assert kept == {f"{name}.superseded": content for name, content in whole_states.items()}


@pytest.mark.nightly
def test_a_missing_log_is_marked_as_lost_with_one_line(experiment: Experiment) -> None:
    """Central training logs only saved steps, so one line marks all of them as lost."""
    experiment.config.write_text(CENTRAL)
    run = experiment.run("run", options=["--in-process"])
    (run / "rounds.jsonl").unlink()
    said = experiment.call("run", experiment.config, "--out", "run", "--in-process", "--resume").stderr
    last = json.loads((run / "run.json").read_text())["rounds"]
    assert f"completed, but rounds.jsonl has lost steps 1 to {last}" in " ".join(said.split())
    assert [json.loads(line) for line in _log(run)] == [{"round": last, "since": 0, "lost": True}]


@pytest.mark.nightly
def test_files_with_unknown_names_are_ignored_and_a_wrong_name_is_set_aside(
    experiment: Experiment, interrupted: Interrupted, undisturbed: Path
) -> None:
    """A file manager copied files, a checkpoint has another round's name, and a line of evaluations is not text."""
    run = interrupted("strange")
    checkpoints, rows = run / "checkpoints", run / "rows"
    shutil.copy(checkpoints / "round-000020.safetensors", checkpoints / "round-000020 (copy).safetensors")
    shutil.copy(rows / "round-000020.parquet", rows / "round-000020 (copy).parquet")
    (checkpoints / "round-000025.safetensors").rename(checkpoints / "round-000240.safetensors")
    with (run / "evaluations.jsonl").open("ab") as log:
        log.write(b"\xff\xfe\n")
    said = " ".join(resume(experiment, "strange").split())
    for name in ("round-000020 (copy).safetensors", "round-000020 (copy).parquet"):
        assert f"{name}: flsim does not write files with this name; the file is ignored" in said
    assert "round-000240.safetensors: the file has round 25, but its name has another round" in said
    assert (checkpoints / "round-000240.safetensors.damaged").exists()
    assert_equal_runs(run, undisturbed)
    assert [line["round"] for line in map(json.loads, _log(run))] == list(range(1, 31))


@pytest.mark.nightly
def test_a_missing_folder_of_checkpoints_is_reported(
    experiment: Experiment, interrupted: Interrupted, undisturbed: Path
) -> None:
    run = interrupted("robbed")
    shutil.rmtree(run / "checkpoints")
    before = _files(run)
    done = experiment.call("run", experiment.config, "--out", "robbed", *OPTIONS, "--resume", check=False)
    assert done.returncode == 2
    assert re.search(r"robbed/checkpoints: no such folder; restore it, or create an empty folder", done.stderr)
    assert before == _files(run)
    (run / "checkpoints").mkdir()
    said = " ".join(resume(experiment, "robbed").split())
    assert "no checkpoint of its 27 rounds remains; training restarts from the beginning" in said
    assert_equal_runs(run, undisturbed)


def _log(run: Path) -> list[bytes]:
    return (run / "rounds.jsonl").read_bytes().splitlines()


def _write_log(run: Path, lines: list[bytes]) -> None:
    (run / "rounds.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


def _files(run: Path) -> set[tuple[Path, bytes]]:
    """Return all files with their contents, except settings of machines, the log of events, and locks."""
    found = set()
    for path in run.rglob("*"):
        if path.is_file() and path.name not in ("config.toml", "log.jsonl", recovery.TRAINED, recovery.DRIVEN):
            with suppress(FileNotFoundError):
                found.add((path.relative_to(run), path.read_bytes()))
    return found


def _change_rows(run: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    for path in (run / "rows").glob("*.parquet"):
        change(pd.read_parquet(path)).to_parquet(path)
