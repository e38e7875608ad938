"""The benchmark of training measures equal work, at a size that a test can afford, and refuses unequal work."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import engine, libraries
from benchmarks.data import FILES, examples
from benchmarks.peers.model import NextWord, PlainLSTM, train
from benchmarks.peers.work import Result, Work
from benchmarks.rounds import BenchHParams, new_run
from benchmarks.sides import plain_work_of, train_with_engines, work_of
from benchmarks.training import FAR, PROCESSORS, bench_training, describe, distances, refuse_no_training
from flsim.base.errors import RunFailed
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams
from flsim.runs.folder import Run

SMALL = BenchHParams(users=3 + PROCESSORS, words=60, rounds=3, vocabulary_size=60, model=ModelHParams(4, 6))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return new_run(tmp_path_factory.mktemp("bench"), SMALL, shards=2)


@pytest.mark.nightly
def test_all_figures_of_one_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All sides are real processes except pfl, whose environment is missing: this is reported, and pfl has no figures.

    On a processor without instructions for bfloat16, "bf16" is float32, and still within its own distance.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    missing = tmp_path / "python"
    measured = bench_training(missing, SMALL, SMALL, many_shards=PROCESSORS, precision="bf16")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("flsim-bench")]
    assert "no figures for pfl: there is no" in " ".join(capsys.readouterr().err.split())
    rates = dict(measured["users_per_second"])
    assert rates.pop("pfl") is rates.pop("pfl as it comes") is None
    assert min(rates.values()) > 0
    assert measured["ratios"]["cohort / local"] == rates["cohort"] / rates["local"]
    assert {measured["distance"].pop(name) < FAR["bf16"] for name in ("cohort", "system")} == {True}
    assert max(measured["distance"].values()) < FAR["float32"]
    assert [line[:18].strip() for line in describe(measured).splitlines()[1:9]] == list(measured["users_per_second"])


def test_a_plain_model_learns_from_padded_records(run: Run) -> None:
    """The loss of the plain model ignores padding and equals that of single records; untrained results are refused."""
    plain = plain_work_of(work_of(run), run)
    inputs, targets = plain.rounds[0][0]
    assert inputs.shape == targets.shape == (len(run.users[0]), run.users.layout.record_words)
    model = PlainLSTM.from_params(plain.start)
    total = torch.zeros(())
    for record, target in zip(inputs, targets, strict=True):
        length = int((target != 0).sum())
        total += model.total_loss(record[None, :length], target[None, :length])[0].detach()
    assert float(model.loss(inputs, targets).detach()) == pytest.approx(
        float(total) / int((targets != 0).sum()), rel=1e-5
    )
    with pytest.raises(RunFailed, match="flower did not train: the loss was"):
        refuse_no_training({"flower": Result(plain.start, [])}, plain)
    with pytest.raises(RunFailed, match=r"flower did not train: .* is nan afterwards"):
        refuse_no_training({"flower": Result({}, [])}, plain)
    train(model, plain.rounds[0][0], plain)
    refuse_no_training({"flower": Result(model.state_dict(), [])}, plain)


def test_a_user_s_plain_loop_equals_the_local_engine_on_the_same_batches(run: Run, tmp_path: Path) -> None:
    """Federated averaging by hand, weighted by records, repeats the training: `Work` has all that a platform needs."""
    work_of(run).save(tmp_path / "work")
    work = Work.load(tmp_path / "work")
    assert [len(users) for users in work.rounds] == [SMALL.users] * 3
    params = work.start
    for users in work.rounds:
        models = [NextWord.from_params(params) for _ in users]
        for model, data in zip(models, users, strict=True):
            train(model, data, work)
        records = torch.tensor([float(len(inputs)) for inputs, _ in users], dtype=torch.float64)
        assert records.tolist() == [len(run.users[user]) for user in range(SMALL.users)]
        share = records / records.sum()
        params = {
            name: sum(
                (weight * model.state_dict()[name].double() for weight, model in zip(share, models, strict=True)),
                torch.zeros(()),
            ).float()
            for name in params
        }
    results = train_with_engines({"local": (run, "local")})
    assert len(results["local"].seconds) == 3
    for name, value in results["local"].params.items():
        torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, work.start[name])


def test_other_training_is_refused(run: Run) -> None:
    """The other model trains users in sequence, or not at all, or is empty, as Flower's is if all its clients fail."""
    work, local = work_of(run), train_with_engines({"local": (run, "local")})["local"]
    far = dict.fromkeys(("local", "flower"), FAR["float32"])
    assert distances({"local": local}, work.start, far) == {"local": 0}
    model = NextWord.from_params(work.start)
    for data in work.rounds[0]:
        train(model, data, work)
    other = Result({name: value.detach() for name, value in model.named_parameters()}, local.seconds)
    for result in (other, Result(work.start, []), Result({}, [])):
        with pytest.raises(RunFailed, match=r"^flower and local trained different models"):
            distances({"local": local, "flower": result}, work.start, far)


@pytest.mark.parametrize("reader", FILES)
def test_files_hold_all_sentences(reader: str, tmp_path: Path) -> None:
    name, write = FILES[reader]
    write(tmp_path / name, examples(1_000))
    hparams = ImportHParams(vocabulary_size=500, words_per_user=100, heldout=0.0, test=0.0)
    corpus = import_corpus([tmp_path / name], tmp_path / "corpus", hparams)
    assert corpus.manifest["sources"][0]["format"] == reader.split(",")[0]
    assert corpus.manifest["parameters"]["read"]["records"] == 1_000


def test_drawn_users_have_the_stated_sizes() -> None:
    """Users have 2,000 words each, in records of 8 on average and at most 20; with a spread of 1, 2,000 is a median."""
    users = engine.DrawnUsers(20)
    sizes = [users[user].words for user in range(len(users))]
    assert all(2_000 <= size < 2_000 + engine.LAYOUT.record_words for size in sizes)
    lengths = np.concatenate([np.diff(users[user].offsets) for user in range(len(users))])
    assert (lengths.min(), lengths.max()) == (1, engine.LAYOUT.record_words)
    assert lengths.mean() == pytest.approx(8, abs=0.5)
    assert engine.LAYOUT.first_word <= min(users[0].tokens)
    assert max(users[0].tokens) <= engine.LAYOUT.last_word
    wide = engine.DrawnUsers(101, spread=1.0)
    # The median's logarithm has a standard error of 1.25 / sqrt(101).
    assert abs(np.log(np.median([wide[user].words for user in range(101)]) / 2_000)) < 4 * 1.25 / 101**0.5


def test_libraries_are_compared_on_the_same_users() -> None:
    assert libraries.ratio(4, ModelHParams(4, 6), users=1, words=50, turns=1) > 0


def test_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The test runs the benchmark's own command line."""
    layout = Layout(60)
    options = ["--device=cpu", "--precision=float32", "--cohort=3", "--profile", "--json", "--at-once", "1", "2"]
    for thing, name, value in (
        (engine, "USER_WORDS", 20),
        (engine, "LAYOUT", layout),
        (engine.DrawnUsers, "layout", layout),
        (engine.Held, "layout", layout),
        (sys, "argv", ["engine", *options]),
    ):
        monkeypatch.setattr(thing, name, value)
    engine.main()
    measured = json.loads(capsys.readouterr().out)
    assert {row["precision"] for row in measured["rows"]} == {"float32"}
    assert [row["micro_cohort"] for row in measured["rows"]] == [1, 2]
    for row in measured["rows"]:
        assert all(row[name] > 0 for name in ("users_per_second", "training_alone", "packing_alone", "said_gigabytes"))
        assert "aten::bmm" in row["profile"]
    assert len(engine.describe(measured).splitlines()) > 4
