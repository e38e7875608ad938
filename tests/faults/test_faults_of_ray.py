"""Ray's own processes are killed: the run says so and ends, where Ray would wait, and goes on to the same bits."""

import time
from pathlib import Path

import psutil
import pytest
from faulty import FURTHER, assert_equal_runs, begin, kill, of_run, resume
from helpers import Experiment, finish, wait_for_round
from raynodes import named

from server.cluster.start import is_alive


@pytest.mark.slow
def test_a_run_whose_ray_is_killed_ends_at_once_and_resumes(experiment: Experiment, undisturbed: Path) -> None:
    """Before the first evaluation has a process: without Ray it will have none. `make chaos` kills gcs_server too.

    Clients wait by then, and the driver for them. One that asks its raylet for something within milliseconds of the
    kill is ended by Ray itself, with the same exit code and without a word.
    """
    process, _ = begin(experiment, "broken", until_round=2)
    wait_for_round(experiment.folder / "broken", 2 + FURTHER - 1)
    time.sleep(1)  # the next round's requests are out
    kill(named(of_run(process, "raylet"), "raylet").pid)
    code, said = finish(experiment, process)
    assert code == 1
    assert "flsim: Ray's raylet on this machine has ended; `flsim run --resume` continues" in said
    resume(experiment, "broken")
    assert_equal_runs(experiment.folder / "broken", undisturbed)
    assert "INFO:" not in said  # the log is a file


def test_who_has_no_memory_to_look_goes_on_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looks and fails would look no more, and a run without Ray would wait for ever."""

    def without_memory(process: psutil.Process) -> str:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "status", without_memory)
        assert is_alive(psutil.Process())
    assert is_alive(psutil.Process())
