"""The command line as a user meets it: results on standard output, bad input in one line, nothing half-written."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch
from dumps import question, write_dump
from helpers import Experiment, Flsim

from flsim.algorithms.checkpoint import save
from flsim.algorithms.fedavg import init
from flsim.cli.data import show
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
from flsim.models.architectures import ModelHParams
from flsim.results.store import read_run_file
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.training.update import State

Refuse = Callable[..., str]


def dump(path: Path) -> Path:
    """A small Posts.xml: each of six users writes twelve posts of five words."""
    posts = product(range(6), range(12))
    return write_dump(path, [question(str(user), f"<p>word{post} and word{user} so on.</p>") for user, post in posts])


@pytest.fixture
def trained(experiment: Experiment) -> Path:
    """A run of two rounds, made without Ray: its checkpoint is the initial model."""
    run = Run.create(load(experiment.config, ["training.rounds=2"]), experiment.folder / "run")
    state = run.latest_state()
    evaluate_checkpoint(run.path, run.save(State(2, state.params)))
    run.mark("completed")
    return run.path


@pytest.fixture
def refuse(flsim: Flsim) -> Refuse:
    """Runs a command that must fail as bad input does: exit code 2, nothing on standard output, one line, returned."""

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
    assert "--resume" not in refuse("run", experiment.config, "--out", trained)


def test_a_run_that_was_killed_before_it_began_is_to_be_resumed(
    experiment: Experiment, trained: Path, refuse: Refuse
) -> None:
    """The folder of a run has its settings for a moment before run.json is there."""
    (trained / "run.json").unlink()
    shutil.rmtree(trained / "checkpoints")
    (trained / "checkpoints").mkdir()
    assert "killed before its first round; add --resume to start it" in refuse(
        "run", experiment.config, "--out", trained
    )
    experiment.call("run", experiment.config, "--out", trained, "--resume", "--in-process")
    assert read_run_file(trained)["status"] == "completed"


def test_an_existing_output_is_left_alone(experiment: Experiment, trained: Path, refuse: Refuse) -> None:
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
    """One byte of one word; then a whole other corpus in its place."""
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
    show(inspect(Corpus.open(experiment.folder / "corpus")), as_json=False)
