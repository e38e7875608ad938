"""Custom code that calls `sys.exit(0)` does not end a command as if it had succeeded, whatever calls the code."""

import re

import pytest
from custom_code import SETTINGS, exiting, import_held_out_users
from helpers import TINY, Experiment

DP = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=1")
EVALUATE = ("--canaries", "c.csv", "--vocabulary", "40")
READ = ("data", "import", "text.txt", "--format", "format.py:lines", "--out", "made")
OTHERS = {
    "format": READ,
    "factory": ("evaluate", "--model", "factory.py:model", *EVALUATE),
    "imported factory": ("evaluate", "--model", "factory:model", *EVALUATE),  # as a module that Python imports
}


ONCE = ("--in-process", "--set", "system.retries=0")  # without the pauses before a shard is asked again
EXITS_HERE = ("--out", "run", *ONCE, "--set", "local.schedule=schedule.py:constant")


def assert_failed(experiment: Experiment, arguments: tuple[str, ...], why: str = "SystemExit: 0") -> None:
    done = experiment.call(*arguments, check=False)
    assert done.returncode in (1, 2), done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"\w+(\.\w+)?\.py:\d+: {why}|failed with {why} \(.*\w+\.py:\d+\)", last), done.stderr
    assert "Traceback" not in done.stderr


def write(experiment: Experiment, kind: str, source: str) -> None:
    """Write code of a kind; a file is executed once for each content, so that each test has another one."""
    (experiment.folder / f"{kind}.py").write_text(f"{source}# {experiment.folder}\n")


@pytest.mark.parametrize("kind", SETTINGS)
def test_code_of_a_run_that_exits_fails_the_run(experiment: Experiment, kind: str) -> None:
    write(experiment, kind, exiting(kind))
    experiment.config.write_text(TINY)
    settings = (SETTINGS[kind], *(DP if kind == "noise" else ()))
    options = [part for setting in settings for part in ("--set", setting)]
    assert_failed(experiment, ("run", "tiny.toml", "--out", "run", *ONCE, *options))


@pytest.mark.parametrize("kind", OTHERS)
def test_code_of_other_commands_that_exits_fails_the_command(experiment: Experiment, kind: str) -> None:
    kind_of_code = kind.removeprefix("imported ")
    write(experiment, kind_of_code, exiting(kind_of_code))
    (experiment.folder / "text.txt").write_text("one\n")
    (experiment.folder / "c.csv").write_text("id,tokens\nc1,5 6 7 8 9\n")
    assert_failed(experiment, OTHERS[kind])
    assert not (experiment.folder / "made").exists()


MADE_BY_EXEC = "exec('def {name}(*_): raise SystemExit(0)')"


@pytest.mark.parametrize(
    ("kind", "source", "arguments"),
    [
        ("format", "from sys import exit as lines", READ),
        ("format", MADE_BY_EXEC.format(name="lines"), READ),
        ("schedule", MADE_BY_EXEC.format(name="constant"), ("run", "tiny.toml", *EXITS_HERE)),
    ],
)
def test_code_without_a_line_of_its_own_that_exits_fails_the_command(
    experiment: Experiment, kind: str, source: str, arguments: tuple[str, ...]
) -> None:
    """A function that the file imports, or that `exec` makes, has no frame in the file."""
    write(experiment, kind, f"{source}\n")
    (experiment.folder / "text.txt").write_text("one\n")
    experiment.config.write_text(TINY)
    done = experiment.call(*arguments, check=False)
    assert done.returncode in (1, 2), done.stderr
    assert "SystemExit" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_attack_that_exits_fails_the_command(experiment: Experiment) -> None:
    import_held_out_users(experiment)
    experiment.config.write_text(TINY)
    write(experiment, "attack", exiting("attack"))
    experiment.call("run", "tiny.toml", "--out", "run", "--in-process")
    assert_failed(experiment, ("membership", "run", "--attack", "attack.py:worst_word"))


def test_any_other_exception_that_is_no_error_of_python_s_is_one_line(experiment: Experiment) -> None:
    stop = "class Stop(BaseException): ...\n\n\n"
    write(experiment, "schedule", stop + exiting("schedule", "raise Stop('enough')"))
    assert_failed(experiment, ("run", "tiny.toml", *EXITS_HERE), "Stop: enough")
