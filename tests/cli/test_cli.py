"""Tests of the command line: results on standard output, bad input in one line, and no incomplete output."""

import csv
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

import click
import pandas as pd
import pytest
import tomli_w
import torch
import typer
from dumps import question, write_dump
from helpers import Experiment, Flsim
from rich.text import Text

from flsim.algorithms.checkpoint import save
from flsim.algorithms.fedavg import init
from flsim.cli import app
from flsim.cli.data import show
from flsim.cli.options import PANELS
from flsim.data.corpus import Corpus
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import LoraHParams
from flsim.results.rows import read_run_file
from flsim.runs.config import CentralConfig, DataHParams, FederatedConfig, load
from flsim.runs.config.files import sections
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.runs.sweeps.definition import MOST_RUNS
from flsim.training.update import State

Refuse = Callable[..., str]


def dump(path: Path) -> Path:
    """Write a small Posts.xml, in which each of six users writes twelve posts of five words."""
    posts = product(range(6), range(12))
    return write_dump(path, [question(str(user), f"<p>word{post} and word{user} so on.</p>") for user, post in posts])


@pytest.fixture
def trained(experiment: Experiment) -> Path:
    """Make a run of two rounds without Ray; its checkpoint is the initial model."""
    run = Run.create(load(experiment.config, ["training.rounds=2"]), experiment.folder / "run")
    state = run.latest_state()
    evaluate_checkpoint(run.path, run.save(State(2, state.params)))
    run.mark("completed")
    return run.path


@pytest.fixture
def refuse(flsim: Flsim) -> Refuse:
    """Return a function that runs a command with bad input, checks exit code 2 and the output, and returns its line."""

    def run(*arguments: str | Path) -> str:
        code, out, printed = flsim(*arguments)
        assert code == 2
        assert out == ""
        lines = [line for line in printed.splitlines() if line.startswith("flsim: ")]
        assert len(lines) == 1
        assert printed.endswith(lines[0] + "\n")
        return lines[0].removeprefix("flsim: ")

    return run


def test_import_inspect_and_their_json(tmp_path: Path, experiment: Experiment) -> None:
    dump(tmp_path / "site.Posts.xml")
    imported = experiment.call(
        "data", "import", "site.Posts.xml", "--out", "made", "--words-per-user", "10", "--vocabulary", "12", "--json"
    )
    inspected = experiment.call("data", "inspect", "made", "--json")
    assert json.loads(imported.stdout) == json.loads(inspected.stdout)
    about = json.loads(inspected.stdout)
    assert {"users", "records", "words", "vocabulary", "dropped", "test_users"} <= set(about)
    assert about["vocabulary"] == 12
    assert "train" in experiment.call("data", "inspect", "made").stdout


def test_evaluating_again_changes_nothing(experiment: Experiment, trained: Path) -> None:
    before = (trained / "rows" / "round-000002.parquet").read_bytes()
    done = experiment.call("evaluate", "run/checkpoints/round-000002.safetensors", "--json")
    assert (trained / "rows" / "round-000002.parquet").read_bytes() == before
    of_the_run = experiment.call("evaluate", "run", "--json")
    assert of_the_run.stdout == done.stdout
    assert "newest checkpoint: run/checkpoints/round-000002.safetensors\n" in of_the_run.stderr
    rows = pd.DataFrame(json.loads(done.stdout))
    assert {"rank", "exposure", "rs", "bs", "log_perplexity", "accuracy", "perplexity"} <= set(rows["metric"])


def test_canaries_in_words_in_every_format(experiment: Experiment, trained: Path, tmp_path: Path) -> None:
    roster = pd.read_parquet(trained / "planted" / "roster.parquet")
    rows = pd.read_parquet(trained / "rows" / "round-000002.parquet").set_index(["metric", "canary"])["value"]
    text = experiment.call("canaries", "run", "--written", "--format", "csv").stdout
    table = pd.read_csv(io.StringIO(text))
    assert table["phrase"].tolist() == [" ".join(words) for words in roster["words"]]
    for name in ("sharers", "insertions", "p_u", "p_e"):
        assert table[name].tolist() == roster[name].tolist()
    for metric in ("rank", "exposure", "rs", "bs"):
        assert table[metric].astype(float).tolist() == pytest.approx(rows[metric][table["canary"]].tolist())
    known = [phrase.split()[0] for phrase in table["phrase"]]  # the prefix is a word
    assert [text.split()[0] for text in table["written"]] == known
    assert (table["written"] == table["phrase"]).tolist() == table["bs"].tolist()
    text = experiment.call("canaries", "run").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert all(phrase in text for phrase in table["phrase"])
    experiment.call("canaries", "run", "--format", "parquet", "--out", "canaries.parquet")
    listed = pd.read_parquet(tmp_path / "canaries.parquet")
    assert (len(listed), "written" in listed) == (len(roster), False)
    (trained / "checkpoints" / "round-000002.safetensors").unlink()
    gone = experiment.call("canaries", "run", "--written", check=False)
    assert (gone.returncode, "no such checkpoint" in gone.stderr) == (2, True)


def test_an_unfinished_run_is_to_be_resumed(experiment: Experiment, trained: Path, refuse: Refuse) -> None:
    for status, words in (("interrupted", "is interrupted"), ("running", "or was killed")):
        Run.open(trained).mark(status, "stopped")  # type: ignore[arg-type]
        printed = refuse("run", experiment.config, "--out", trained)
        assert f"{trained}: this folder has a run that" in printed
        assert words in printed
        assert "after round 2 of 2; add --resume to continue it" in printed
        (row,) = csv.DictReader(experiment.call("table", "run", "--format", "csv").stdout.splitlines())
        assert row["status"] == status
    Run.open(trained).mark("completed")
    printed = refuse("run", experiment.config, "--out", trained)
    assert f"{trained}: already exists, with a run that is completed; name another folder" in printed


def test_a_run_that_was_killed_before_it_began_is_to_be_resumed(
    experiment: Experiment, trained: Path, refuse: Refuse
) -> None:
    """For a moment, the folder of a run has its settings and no run.json."""
    (trained / "run.json").unlink()
    shutil.rmtree(trained / "checkpoints")
    (trained / "checkpoints").mkdir()
    assert "killed before its first round; add --resume to start it" in refuse(
        "run", experiment.config, "--out", trained
    )
    experiment.call("run", experiment.config, "--out", trained, "--resume", "--in-process")
    assert read_run_file(trained)["status"] == "completed"


def test_an_existing_output_is_not_changed(experiment: Experiment, trained: Path, refuse: Refuse) -> None:
    before = sorted(path.name for path in experiment.folder.iterdir())
    source = dump(experiment.folder.parent / "site.Posts.xml")
    for arguments in (
        ["data", "import", source, "--out", experiment.folder / "corpus"],
        ["data", "synthetic", "--out", experiment.folder / "corpus"],
        ["demo", "--out", trained],
    ):
        assert "already exists" in refuse(*arguments)
    assert sorted(path.name for path in experiment.folder.iterdir()) == before


TEMPLATE = "canaries.source='template'"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["canaries.p_e=[1.5]"], "p_e must be at most 1, found 1.5"),
        (["training.cohort=25"], "cohort must be between 1 and the 24 users, found 25"),
        (["system.shards=25"], "system.shards must be between 1 and the 24 training users, found 25"),
        (["data.corpus='missing'"], "missing: not a corpus"),
        (["evaluation.prefix=5"], "evaluation.prefix must be below canaries.length (5), found 5"),
        ([TEMPLATE, "canaries.template='w0 {w1}'", "canaries.p_e=[0.01]", "canaries.count=20"], "36 fillings"),
        ([TEMPLATE, "canaries.template='{ssn}'", "evaluation.also=['space']"], "{ssn}"),
    ],
)
def test_bad_settings_leave_no_run(experiment: Experiment, refuse: Refuse, overrides: list[str], message: str) -> None:
    before = sorted(path.name for path in experiment.folder.iterdir())
    options = [part for override in overrides for part in ("--set", override)]
    assert message in refuse("run", experiment.config, "--out", experiment.folder / "new", *options)
    assert sorted(path.name for path in experiment.folder.iterdir()) == before


def test_a_checkpoint_of_another_model_is_refused(experiment: Experiment, trained: Path, refuse: Refuse) -> None:
    run = Run.open(trained)
    other = replace(run.provenance, model=ModelHParams(4, 12))
    (experiment.folder / "elsewhere").mkdir()
    path = save(experiment.folder / "elsewhere", init(40, ModelHParams(4, 12), 0), other)
    printed = refuse("evaluate", path, "--run", trained)
    assert "this checkpoint has another model (vocabulary_size 40, embedding 4, units 12)" in printed


def test_a_corpus_changed_since_the_checkpoint_is_refused(
    experiment: Experiment, trained: Path, refuse: Refuse
) -> None:
    """One byte of a word changes, then the size of a file; then, another corpus is in the folder."""
    checkpoint = trained / "checkpoints" / "round-000002.safetensors"
    tokens = experiment.folder / "corpus" / "test" / "tokens.u16"
    original = tokens.read_bytes()
    tokens.write_bytes(bytes([original[0] ^ 1]) + original[1:])
    assert "changed since the import" in refuse("evaluate", checkpoint)
    tokens.write_bytes(original[:-2])
    assert "missing, or its size differs" in refuse("evaluate", checkpoint)
    shutil.rmtree(experiment.folder / "corpus")
    sizes = ("--users", "24", "--vocabulary", "40", "--words-per-user", "50")
    experiment.call("data", "synthetic", "--out", "corpus", *sizes)
    assert "trained on another corpus" in refuse("evaluate", checkpoint)


def test_a_model_with_nan_is_refused_not_ranked(experiment: Experiment, trained: Path) -> None:
    run = Run.open(trained)
    state = run.latest_state()
    state.params["gate_bias"][0] = torch.nan
    done = experiment.call("evaluate", run.save(State(2, state.params)), check=False)
    assert done.returncode == 1
    assert "gate_bias are not finite" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabel"], "No such command 'tabel'"),
        (["run"], "Missing argument 'CONFIG'"),
        (["table", "nowhere"], "nowhere: not a run folder"),
        (["evaluate", "nowhere"], "nowhere: no such checkpoint"),
        (["run", "nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(refuse: Refuse, arguments: list[str], message: str) -> None:
    assert message in refuse(*arguments)


def test_a_corpus_is_described_without_standard_output(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    show(Corpus.open(experiment.folder / "corpus"), as_json=False)


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
def test_toml_with_extreme_values_is_refused(
    flsim: Flsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.toml").write_text(text)
    for command in ("run", "plan", "sweep", "tune", "data plant corpus --out p --config"):
        refused(flsim(*command.split(), "hostile.toml"), "hostile.toml", why)


def test_a_setting_with_extreme_values_is_refused(experiment: Experiment, flsim: Flsim) -> None:
    for setting, why in (
        ("seed=" + "[" * 5_000 + "]" * 5_000, "recursion depth"),
        ("a." * 5_000 + "a=1", "too deeply"),
        ("seed=" + "9" * 5_000, "digits"),
    ):
        refused(flsim("run", experiment.config, "--out", "x", "--set", setting), f"{setting:.5}", why)


def test_devices_that_are_neither_cpu_nor_cuda(
    experiment: Experiment, flsim: Flsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has results, because commands may read them before they check the device."""
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
    """The file has 10 values for each of 5 axes, and 10 seeds."""
    monkeypatch.chdir(tmp_path)
    names = ("rounds", "cohort", "server_learning_rate", "server_momentum", "server_tau")
    axes = {f"training.{name}": [index + 1 for index in range(10)] for name in names}
    path = write_sweep(tmp_path, axes=axes, seeds=list(range(10)))
    refused(flsim("sweep", path), "the sweep has 1,000,000 runs", f"more than {MOST_RUNS:,}")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its path, groups included."""
    yield path, command
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from commands(part, (*path, name))


COMMANDS = dict(commands(GROUP))


def name_of(path: tuple[str, ...]) -> str:
    return " ".join(("flsim", *path))


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_help_has_an_example_and_fits_80_columns(path: tuple[str, ...], flsim: Flsim) -> None:
    code, out, err = flsim(*path, "--help")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    example = name_of(path) if path else "flsim demo"
    assert re.search(rf"(Example|Start with): .*{example}", out)
    for parameter in COMMANDS[path].params:
        text = getattr(parameter, "help", None) or ""
        assert re.fullmatch(r"[A-Z].*\.", text), (parameter.name, text)
        assert Text.from_markup(text).plain == text  # brackets would be read as markup


def test_the_first_page_groups_all_commands_and_fits_a_terminal(flsim: Flsim) -> None:
    _, out, _ = flsim("--help")
    lines = out.splitlines()
    assert len(lines) <= 50
    assert [match[1] for line in lines if (match := re.match(r"╭─ ([\w ]+?) ─", line))] == ["Options", *PANELS]
    assert {path[0] for path in COMMANDS if path} == set(re.findall(r"^│ (\w+) ", out, re.MULTILINE))


def test_version_and_results_load_neither_torch_nor_ray(flsim: Flsim) -> None:
    code, out, _ = flsim("--version")
    assert (code, out.splitlines()[0]) == (0, f"flsim {version('flsim-memorization')}")
    assert f"torch {version('torch')}" in out
    loads = (
        "import sys, flsim.results.sweeps, flsim.show.table, flsim.cli as cli; cli._version('torch'); "
        "print({'flwr', 'ray', 'torch'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", loads], text=True, cwd=ROOT) == "set()\n"


def test_the_pages_that_are_made_from_the_code_are_current() -> None:
    """If this test fails, run: python .ci/reference.py."""
    for page, text in runpy.run_path(str(ROOT / ".ci" / "reference.py"))["documents"]().items():
        assert page.read_text(encoding="utf-8") == text, page


SECTIONS = sections()
DATA = DataHParams(Path("corpus"))


@pytest.mark.parametrize(("kind", "config"), [("federated", FederatedConfig(DATA)), ("central", CentralConfig(DATA))])
def test_all_keys_of_a_configuration_are_listed(kind: str, config: FederatedConfig | CentralConfig) -> None:
    values = asdict(config)
    values["model.lora"] = asdict(LoraHParams())
    del values["model"]["lora"]
    keys = {f"{name}.{key}" for name, section in values.items() if isinstance(section, dict) for key in section}
    listed = [section for section in SECTIONS if section.kind in ("", kind)]
    found = {f"{section.name}.{setting.name}" for section in listed for setting in section.settings}
    assert found == keys | {".seed"}


def test_every_setting_has_complete_sentences_and_every_number_a_unit() -> None:
    for section in SECTIONS:
        for setting in section.settings:
            assert re.fullmatch(r'["A-Z].*\.', setting.description), setting
            assert "Unit:" not in setting.description, setting
            assert not setting.unit.endswith("."), setting
    numbers = [key for section in SECTIONS for key in section.settings if re.search("integer|number", key.type)]
    without = {key.name for key in numbers if not key.unit and not key.name.endswith("_options")}
    names = """seed options config alpha max_epsilon clip_learning_rate learning_rate momentum proximal weight_decay
    server_learning_rate server_momentum server_beta2 server_tau milestone_factor server_milestone_factor"""
    assert without == {*names.split(), "windows", "injections"}  # fractions of training, or rounds


def test_the_list_fits_80_columns_and_can_be_of_one_section_or_setting(flsim: Flsim) -> None:
    _, whole, _ = flsim("settings")
    assert max(map(len, whole.splitlines())) <= 80
    _, section, _ = flsim("settings", "model")
    assert section in whole
    assert "[model]: architectures" in section
    _, setting, _ = flsim("settings", "training.cohort")
    assert "cohort" in setting
    assert "server_optimizer" not in setting
    assert flsim("settings", "cohort")[1] == setting


def test_an_unknown_name_is_refused_with_a_close_one(flsim: Flsim) -> None:
    code, out, err = flsim("settings", "training.round")
    assert (code, out) == (2, "")
    assert err == "flsim: training.round: no such section or setting; did you mean training.rounds?\n"
    assert flsim("settings", "foo")[2].endswith("no such section or setting; `flsim settings` lists all settings\n")


@pytest.mark.parametrize(("words", "completed"), [("flsim swe", "sweep"), ("flsim sweep --ti", "--tier")])
def test_tab_completes_commands_and_options(words: str, completed: str) -> None:
    """The test asks as the script for bash does, which `_FLSIM_COMPLETE=source_bash flsim` prints."""
    asked = {"_FLSIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = Path(sys.executable).parent / "flsim"
    done = subprocess.run([script], env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (completed, "")
