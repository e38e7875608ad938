"""How far runs are, as a person sees it: one screen of 80 columns on a terminal, lines elsewhere."""

import json
import re
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flsim.runs.sweeps import folder as module
from flsim.runs.sweeps.folder import Screen, State, SweepFolder, state_of


def run_folder(folder: Path, status: str, round_: int, log: str = "") -> Path:
    folder.mkdir(parents=True)
    about = {"name": folder.name, "setting": "IID, SGD", "status": status, "round": round_, "rounds": 100}
    (folder / "run.json").write_text(json.dumps(about | {"reason": None}))
    (folder / "rounds.jsonl").write_text(log)
    return folder


def test_what_a_run_is_at(tmp_path: Path) -> None:
    log = '{"round": 30, "loss": 2.5}\n{"round": 41, "loss": 2.25}\n'
    running = run_folder(tmp_path / "a", "running", 40, log)
    assert state_of(running, began=0) == State("runs", 0.41, "41/100, loss 2.25")
    assert state_of(running, began=time.time() + 60) == State("waits", note="stopped at 40")  # not taken up again yet
    assert state_of(tmp_path / "none", began=0) == State("waits")
    assert state_of(run_folder(tmp_path / "b", "failed", 7), began=0).status == "failed"
    cut_short = run_folder(tmp_path / "c", "running", 40, log + '{"round": 4')
    assert state_of(cut_short, began=0) == State("runs", 0.40, "40/100")
    assert state_of(run_folder(tmp_path / "d", "diverged", 12), began=0) == State("diverged", 1.0, "")


def test_a_run_that_trains_on_is_not_over(tmp_path: Path) -> None:
    """A search lets the better half of its trials train on; a sweep leaves what is finished."""
    run, later = run_folder(tmp_path / "a", "completed", 40), time.time() + 60
    assert state_of(run, later) == State("waits", note="stopped at 40")
    assert state_of(run, later, is_finished=True) == State("completed", 1.0, "")


@pytest.fixture
def screen_output(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    said = StringIO()
    console = Console(file=said, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(module, "console", console)
    return said


def test_a_screen_of_80_columns_shows_those_that_run_first(tmp_path: Path, screen_output: StringIO) -> None:
    folder = SweepFolder(tmp_path)
    names = [f"fedavg-non-iid-cohort{index}-a-rather-long-name-of-a-run-seed0" for index in range(30)]
    run_folder(folder.run(names[25]), "running", 50, '{"round": 50, "loss": 4.0}\n')
    with Screen(folder, names, began=time.time() - 100).live() as screen:
        screen.look()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen_output.getvalue())
    assert max(map(len, re.split(r"[\r\n]+", text))) <= 80
    assert "0 of 30 runs" in text
    assert "50/100, loss 4.00" in text
    assert "and 14 more" in text
    assert text.index("cohort25") < text.index("cohort0-")


def test_elsewhere_a_run_that_begins_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = SweepFolder(tmp_path)
    run_folder(folder.run("one"), "running", 5)
    with Screen(folder, ["one", "two"], began=0).live() as screen:
        screen.look()
        screen.look()
        screen.ended("two", "disk full", remaining=1)
    assert capsys.readouterr().err.splitlines() == ["one: started", "two: failed: disk full (1 run remaining)"]
