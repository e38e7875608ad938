"""Inputs that Python's parsers, torch or accountants fail on are refused in one line with exit code 2."""

from pathlib import Path

import pytest
import tomli_w
from helpers import Experiment, Flsim

from flsim.runs.sweeps.definition import MOST_RUNS

DEEP = "x = " + "[" * 5_000 + "]" * 5_000
DEEP_TABLE = "[" + ".".join(["a"] * 1_500) + "]\nx = 1\n"
DIGITS = "seed = " + "9" * 5_000
LARGE = "[training]\nrounds = " + "9" * 400
PLAN = ("privacy", "--users", "1000", "--cohort", "10", "--rounds", "10", "--delta", "1e-5")


def refused(answer: tuple[int, str, str], *words: str) -> None:
    code, out, error = answer
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert len(error) < 400
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (DEEP, "not TOML: maximum recursion depth exceeded"),
        (DEEP_TABLE, "hostile.toml: its values are nested too deeply; use at most 64 levels"),
        (DIGITS, "not TOML: Exceeds the limit (4300 digits)"),
        (LARGE, "training.rounds: found 99999999999999999999..., an integer of more than 64 bits"),
    ],
    ids=["deep", "deep-table", "digits", "large"],
)
def test_toml_that_python_cannot_take(
    flsim: Flsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.toml").write_text(text)
    for command in ("run", "plan", "sweep", "tune", "data plant corpus --out p --config"):
        refused(flsim(*command.split(), "hostile.toml"), "hostile.toml", why)


def test_a_setting_that_python_cannot_take(experiment: Experiment, flsim: Flsim) -> None:
    for setting, why in (
        ("seed=" + "[" * 5_000 + "]" * 5_000, "recursion depth"),
        ("a." * 5_000 + "a=1", "too deeply"),
        ("seed=" + "9" * 5_000, "digits"),
    ):
        refused(flsim("run", experiment.config, "--out", "x", "--set", setting), f"{setting:.5}", why)


def test_devices_that_are_neither_cpu_nor_cuda(
    experiment: Experiment, flsim: Flsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has results where the command reads them before it looks at the device."""
    monkeypatch.chdir(experiment.folder)
    experiment.call("run", "tiny.toml", "--out", "run", "--in-process", "--set", "training.rounds=1")
    commands = ("evaluate", "verify", "membership", "extract", "reveal", "canaries --written", "quantize --out rounded")
    for command in commands:
        name, *options = command.split()
        refused(flsim(name, "run", *options, "--device", "meta"), "--device meta")
    refused(flsim("evaluate", "run", "--device", "cpu:x"), "--device cpu:x")
    assert not (experiment.folder / "rounded").exists()


@pytest.mark.parametrize("noise", ["1e-300", "1e300", "nan"])
def test_extreme_noise(experiment: Experiment, flsim: Flsim, noise: str) -> None:
    refused(flsim(*PLAN, "--noise-multiplier", noise), "--noise-multiplier must")
    settings = ("privacy.mechanism=dp", "privacy.clip=1.0", f"privacy.noise_multiplier={noise}")
    options = [part for setting in settings for part in ("--set", setting)]
    refused(flsim("run", experiment.config, "--out", "x", *options), "noise_multiplier must")


def write_sweep(folder: Path, **values: object) -> Path:
    axes = values.pop("axes", {"training.rounds": [1, 2]})
    definition = {
        "title": "A sweep",
        "grids": [{"name": "grid", "axes": axes}],
        "tiers": {"smoke": {"corpus": {"synthetic": {"users": 40}}, **values}},
    }
    path = folder / "sweep.toml"
    path.write_text(tomli_w.dumps(definition))
    return path


@pytest.mark.parametrize("command", ["sweep", "plan"])
def test_a_sweep_without_runs(tmp_path: Path, flsim: Flsim, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(
        flsim(command, write_sweep(tmp_path, axes={"data.partition": []})),
        "grids.grid: axis data.partition has no values",
    )
    refused(flsim(command, write_sweep(tmp_path, seeds=[])), "seeds has no values")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_a_sweep_of_a_million_runs_is_counted_and_not_made(
    tmp_path: Path, flsim: Flsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 values of each of 5 axes, and 10 seeds."""
    monkeypatch.chdir(tmp_path)
    names = ("rounds", "cohort", "server_learning_rate", "server_momentum", "server_tau")
    axes = {f"training.{name}": [index + 1 for index in range(10)] for name in names}
    path = write_sweep(tmp_path, axes=axes, seeds=list(range(10)))
    refused(flsim("sweep", path), "the sweep has 1,000,000 runs", f"more than {MOST_RUNS:,}")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
