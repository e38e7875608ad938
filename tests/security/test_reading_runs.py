"""Tests that reading a run executes no custom code of the run, for each command and each kind of custom code."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import typer
from click import Group
from custom_code import CODE, SETTINGS, import_held_out_users
from helpers import TINY, Experiment, Flsim, Trained

from flsim import cli
from flsim.algorithms import checkpoint
from flsim.attacks.audit.audit import subject_of
from flsim.base import extensions
from flsim.privacy.ledger import Ledger
from flsim.runs.folder import Run

# Each file creates a mark when it is executed.
MARK = "from pathlib import Path\n\nPath({mark!r}).touch()\n\n"
# The custom code of each run. A command that needs the model or the sampler may refuse the run before it could
# execute other code. Therefore these two are in separate runs.
RUNS = {
    "model": ("model",),
    "sampler": ("sampler",),
    "others": ("noise", "measure", "algorithm", "optimizer", "server_optimizer", "schedule", "attack", "format"),
}
PRIVATE = (
    'training.sampler="poisson"',
    'privacy.mechanism="dp"',
    "privacy.clip=0.5",
    "privacy.noise_multiplier=0.8",
    "privacy.delta=0.001",
)
CANARY_USERS = ("audit.update_canaries=8", "audit.canary_coins=true")  # settings of the run with a custom sampler
READING: dict[str, tuple[str, ...]] = {
    "audit": ("run",),
    "canaries": ("run",),
    "compare": ("run", "other"),
    "export": ("run", "--out", "exported"),
    "extract": ("run",),
    "forgetting": ("run",),
    "membership": ("run",),
    "plot": ("run", "--out", "figure.png"),
    "privacy": ("run",),
    "report": ("run", "--out", "report.html"),
    "table": ("run",),
    "trace": ("run",),
    "data inspect": ("corpus",),
}
# The list in docs/security.md: commands that execute code of a run, and name the file first.
EXECUTING = {"evaluate", "quantize", "reveal", "run", "verify"}
# These read no run folder: they make corpora and runs from files that their user wrote.
WRITING = {"demo", "plan", "settings", "sweep", "tune"}
NEEDS_MODEL = {("membership", "model"), ("extract", "model")}
# Only the sampler knows who took part in which round, and these commands do not execute samplers.
NEEDS_SAMPLER = {("trace", "sampler"), ("membership", "sampler"), ("extract", "sampler"), ("forgetting", "sampler")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Experiment]:
    """Train each of `RUNS` once for all commands."""
    return cache(lambda name: trained(tmp_path_factory.mktemp(name), RUNS[name]))


def trained(folder: Path, kinds: tuple[str, ...]) -> Experiment:
    experiment = Experiment(folder)
    for kind in kinds:
        (folder / f"{kind}.py").write_text(MARK.format(mark=str(folder / f"{kind}.mark")) + CODE[kind])
    import_held_out_users(experiment)
    experiment.config.write_text(TINY)
    for name, rate in (("run", "0.1"), ("other", "0.2")):
        settings = [*PRIVATE, *(SETTINGS[kind] for kind in kinds if kind in SETTINGS), f"local.learning_rate={rate}"]
        settings += CANARY_USERS if "sampler" in kinds else ()
        options = [part for setting in settings for part in ("--set", setting)]
        experiment.call("run", "tiny.toml", "--out", name, "--in-process", *options)
    if "attack" in kinds:
        experiment.call("membership", "run", "--attack", "attack.py:worst_word")
    assert {mark.stem for mark in folder.glob("*.mark")} == {*kinds}
    return experiment


def called(experiment: Experiment, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, set[str]]:
    """Call a command as if no custom code was executed yet; return exit code, errors, and kinds of executed code."""
    monkeypatch.setattr(extensions, "_modules", {})
    for mark in experiment.folder.glob("*.mark"):
        mark.unlink()
    done = experiment.call(*arguments, check=False)
    return done.returncode, done.stderr, {mark.stem for mark in experiment.folder.glob("*.mark")}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("command", READING)
def test_reading_executes_nothing(
    made: Callable[[str], Experiment], monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    code, error, executed = called(made(name), monkeypatch, *command.split(), *READING[command])
    if (command, name) in NEEDS_MODEL:
        assert (code, executed) == (0, {"model"}), error
    elif command == "export":  # no run has architecture "hf"
        assert (code, executed) == (2, set())
        assert 'only "hf" is exported' in error
    elif (command, name) in NEEDS_SAMPLER:
        assert (code, executed) == (2, set())
        assert f"flsim: {extensions.not_executed('sampler.py:Turns', 'sampler')}" == error.splitlines()[-1]
    else:
        assert (code, executed) == (0, set()), error


def test_every_kind_of_custom_code_is_in_a_run() -> None:
    assert {kind for kinds in RUNS.values() for kind in kinds} == {*CODE} - {"factory"}
    assert {kind for kinds in RUNS.values() for kind in kinds} >= {*SETTINGS}


@pytest.mark.parametrize(
    "arguments",
    [
        ("membership", "run"),
        ("extract", "run"),
        ("canaries", "run", "--written"),
        ("evaluate", "run"),
        ("quantize", "run", "--out", "rounded"),
        ("verify", "run"),
        ("reveal", "run"),
        ("run", "tiny.toml", "--out", "run", "--resume", "--in-process"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_file_is_named_before_it_is_executed(
    made: Callable[[str], Experiment], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """The command names the file before the call that executes the file."""
    experiment = made("model")
    (copy,) = (experiment.folder / "run" / "code").iterdir()
    settings = [*PRIVATE, SETTINGS["model"], "local.learning_rate=0.1"] if arguments[0] == "run" else []
    more = [part for setting in settings for part in ("--set", setting)]
    said: list[str] = []
    execute = extensions._execute

    def watched(path: Path, source: bytes) -> object:
        said.append("executed")
        return execute(path, source)

    monkeypatch.setattr(extensions, "_execute", watched)
    monkeypatch.setattr("flsim.runs.config.custom_code.say", said.append)
    code, error, executed = called(experiment, monkeypatch, *arguments, *more)
    assert (code, executed) == (0, {"model"}), error
    assert said.index(f"Executing {copy}: architecture Bow") < said.index("executed")


@pytest.mark.parametrize("command", [("evaluate", "run"), ("quantize", "run", "--out", "rounded")])
def test_a_ledger_cannot_name_code_that_the_settings_do_not(
    experiment: Experiment, copy_of_trained: Trained, command: tuple[str, ...]
) -> None:
    """Computing epsilon would execute the file without a message, because the settings name no custom code."""
    run = copy_of_trained(*PRIVATE)
    mark, file = experiment.folder / "mark", experiment.folder / "elsewhere.py"
    file.write_text(MARK.format(mark=str(mark)) + CODE["sampler"])
    for path in checkpoint.all_in(run / "checkpoints"):
        state, provenance = checkpoint.load(path)
        (entry,) = state.ledger.entries
        checkpoint.save(
            path.parent, replace(state, ledger=Ledger((replace(entry, sampler=f"{file}:Turns"),))), provenance
        )
    done = experiment.call(*command, check=False)
    assert done.returncode == 2
    assert not mark.exists()
    assert f"ledger names {file}:Turns, which" in " ".join(done.stderr.split())


def test_without_noise_a_custom_sampler_spends_an_infinite_epsilon(
    made: Callable[[str], Experiment], flsim: Flsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon is infinite for all cohorts, so that the sampler need not be executed."""
    experiment = made("sampler")
    options = [part for setting in (SETTINGS["sampler"], "training.rounds=1") for part in ("--set", setting)]
    experiment.call("run", "tiny.toml", "--out", "plain", "--in-process", *options)
    monkeypatch.chdir(experiment.folder)
    code, out, _ = flsim("privacy", "plain")
    assert (code, out) == (0, "without noise epsilon is infinite, under every convention\n")


def test_every_command_is_classified() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, Group)
    commands: Mapping[str, object] = group.commands
    assert commands.keys() - {"data"} == {*READING, *EXECUTING, *WRITING} - {"data inspect"}


def test_an_audit_compares_a_run_with_the_stored_epsilon(
    made: Callable[[str], Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored epsilon of an evaluation equals the epsilon from the code of the sampler; another delta is refused."""
    experiment = made("sampler")
    monkeypatch.chdir(experiment.folder)
    run = Run.open(experiment.folder / "run")
    claim = subject_of(run.path).claim
    assert claim is not None
    assert {claim.convention.name: claim.epsilon} == run.epsilons(run.latest_state())
    assert claim.convention.name == "own-replace-one-rdp"
    code, error, executed = called(experiment, monkeypatch, "audit", "run", "--delta", "1e-9")
    assert (code, executed) == (2, set())
    assert "--delta 1e-09" in error
