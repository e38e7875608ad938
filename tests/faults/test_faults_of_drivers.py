"""A run whose driver is stopped or killed, or whose clock jumps, resumes to the bits of an undisturbed run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faulty import FURTHER, OPTIONS, assert_equal_runs, begin, digests, ended, go_on, kill, of_run, resume, sick_client
from helpers import Experiment, Trained, assert_same, finish, start, wait_for_round
from raynodes import named
from waiting import hear_ctrl_c

from flsim.algorithms.checkpoint import all_in, round_of
from server.cluster.start import is_alive


@pytest.mark.slow
def test_a_killed_driver_resumes_to_the_same_bits(experiment: Experiment, undisturbed: Path) -> None:
    process, _ = begin(experiment, "broken", until_round=13)  # after one checkpoint, before the next
    kill(process.pid)
    process.wait()
    broken = experiment.folder / "broken"
    assert json.loads((broken / "run.json").read_text())["status"] == "running"
    with (broken / "rounds.jsonl").open("a") as log:
        log.write('{"round": 99, "lo')  # a truncated line
    (broken / "checkpoints" / ".round-000015.safetensors.partial-1").write_bytes(b"half")
    resume(experiment, "broken")
    assert_equal_runs(broken, undisturbed)
    assert not list((broken / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("canaries", "until_round"),
    [
        ("windows = [[0.2, 0.8], [0.5, 0.9]]\np_u = [0.2]\np_e = [0.5]\n", 17),
        pytest.param(
            "injections = [0.2, 16, 0.9]\ninjection_users = 2\ninjection_copies = 3\n", 16, marks=pytest.mark.nightly
        ),
    ],
    ids=["windows", "injections"],
)
def test_a_run_killed_within_a_window_resumes_to_the_same_bits(
    experiment: Experiment, trained_here: Trained, canaries: str, until_round: int
) -> None:
    """The bits are those of a run in one process without messages, and the log has each round once."""
    experiment.config.write_text(experiment.config.read_text().replace("p_u = [0.2]\np_e = [0.5, 1.0]\n", canaries))
    settings = ["training.rounds=30", "evaluation.every=10", "system.checkpoint_every=5", "system.shards=2"]
    options = ["--out", "broken", "--in-process", *(part for text in settings for part in ("--set", text))]
    sick_client(experiment, most=until_round + FURTHER)
    process = start(experiment, *options)
    wait_for_round(experiment.folder / "broken", until_round)
    kill(process.pid)
    process.wait()
    go_on(experiment)
    experiment.call("run", experiment.config, *options, "--resume")
    assert_same(experiment.folder / "broken", trained_here(*settings))
    assert [round_ for round_, _ in digests(experiment.folder / "broken")] == list(range(1, 31))
    verified = experiment.call("verify", experiment.folder / "broken", "--round", str(until_round + 1)).stdout
    assert f"round {until_round + 1}: trained again" in verified


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_of_the_last_round(experiment: Experiment, undisturbed: Path) -> None:
    process, _ = begin(experiment, "stopped", until_round=7)
    process.send_signal(signal.SIGTERM)
    code, said = ended(experiment, process)
    assert code == 143
    assert said == "flsim: interrupted; `flsim run --resume` continues from the newest checkpoint"
    stopped = experiment.folder / "stopped"
    about = json.loads((stopped / "run.json").read_text())
    assert (about["status"], about["reason"]) == ("interrupted", "`flsim run --resume` continues it")
    assert round_of(all_in(stopped / "checkpoints")[-1]) == about["round"] == digests(stopped)[-1][0]
    experiment.call("run", experiment.config, "--in-process", *OPTIONS, "--resume", "--out", "stopped")
    assert_equal_runs(stopped, undisturbed)


@pytest.mark.nightly
def test_ctrl_c_in_a_terminal_leaves_a_checkpoint_of_the_last_round(experiment: Experiment) -> None:
    """The checkpoint is saved although a terminal sends SIGINT to all processes of the run's group."""
    command = [sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "stopped", *OPTIONS]
    process = subprocess.Popen(
        [*command, "--set", "training.rounds=4000"],
        cwd=experiment.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    stopped = experiment.folder / "stopped"
    wait_for_round(stopped, 7)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert round_of(all_in(stopped / "checkpoints")[-1]) == digests(stopped)[-1][0]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc, to build the clock that jumps (clock.c)")
def test_clocks_that_jump_change_nothing(experiment: Experiment, undisturbed: Path) -> None:
    """While the run trains, its processes see the time of day jump by years, forward and backward."""
    clock, offset = experiment.folder / "clock.so", experiment.folder / "offset"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(clock), str(source)], check=True)
    offset.write_text("0")
    command = [sys.executable, "-m", "flsim", "run", str(experiment.config), "--out", "jumpy", *OPTIONS]
    jumpy = experiment.folder / "jumpy"
    with (experiment.folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=experiment.folder,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "LD_PRELOAD": str(clock), "JUMP_FILE": str(offset)},
        )
        for round_, years in ((3, 2), (9, -3), (15, 1), (21, 0)):
            wait_for_round(jumpy, round_)
            offset.write_text(str(years * 365 * 24 * 3600))
        code, words = finish(experiment, process)
    assert code == 0, words
    assert_equal_runs(jumpy, undisturbed)
    seen = {json.loads(line)["time"][:4] for line in (jumpy / "log.jsonl").read_text().splitlines()}
    assert len(seen) > 1  # the clocks did jump


# If Ray's own processes are killed, the run reports it and ends, while Ray would wait. It resumes to the same bits.


@pytest.mark.slow
def test_a_run_whose_ray_is_killed_ends_at_once_and_resumes(experiment: Experiment, undisturbed: Path) -> None:
    """The raylet is killed before the first evaluation starts a process. `make chaos` also kills gcs_server.

    At the kill, clients wait, and the driver waits for them. Ray itself ends a process that asks its raylet for
    something within milliseconds of the kill, with the same exit code and without a message.
    """
    process, _ = begin(experiment, "broken", until_round=2)
    wait_for_round(experiment.folder / "broken", 2 + FURTHER - 1)
    time.sleep(1)  # the next round's requests have been sent
    kill(named(of_run(process, "raylet"), "raylet").pid)
    code, said = finish(experiment, process)
    assert code == 1
    assert "flsim: Ray's raylet on this machine has ended; repeat the command" in said
    resume(experiment, "broken")
    assert_equal_runs(experiment.folder / "broken", undisturbed)
    assert "INFO:" not in said  # log lines go only to the file


def test_a_process_counts_as_alive_if_memory_is_too_short_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would end the thread that checks Ray's processes, and a run whose Ray ended would wait forever."""

    def without_memory(process: psutil.Process) -> str:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "status", without_memory)
        assert is_alive(psutil.Process())
    assert is_alive(psutil.Process())
