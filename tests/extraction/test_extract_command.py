"""Tests of `flsim extract` cover its output, strings, tables by partition, model and training, and refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import PARTITION, Experiment, Flsim, Trained, refusal, train_here
from membership.test_targets import run_of, write_corpus

import flsim as api
from flsim.attacks.extraction.extract import Scheme, discover, record_strings, records_of
from flsim.base.errors import InputError
from flsim.data.records import Records
from flsim.results.rows import read_run
from flsim.runs.config import load
from flsim.runs.folder import Run, newest_checkpoint, restored_model

CENTRAL = """[training]
kind = "central"
steps = 6
batch_size = 16
[evaluation]
references = 200
"""
WITH_CONTROLS = "canaries.controls=3"


@pytest.fixture
def run(trained_here: Trained) -> Path:
    return trained_here(WITH_CONTROLS)


def words_of(run: Run, name: str, words: int) -> list[int]:
    """Return the words of a string with this name, read from the corpus or the canaries."""
    if ":" not in name:
        return list(next(canary.tokens for canary in run.canaries if canary.id == name))
    split, position = name.split(":")
    return list(map(int, run.corpus.split(split).records_at(np.array([int(position)]))[0][:words]))


def test_strings_belong_to_their_side_and_are_measured_one_by_one(run: Path) -> None:
    """Names give the text of strings; both sides have equal lengths. Expected p_z and users are of single strings."""
    opened, measured = Run.open(run), api.extract(run, records=12, top_k=0)
    model = restored_model(opened, newest_checkpoint(run), "cpu")[1]
    texts = [[record.tolist() for record in opened.users[user]] for user in range(len(opened.users))]
    assert set(measured.strings["prefix"]) == {1, 3, 5}  # records of at most 8 words, canaries of 5
    for _, group in measured.strings.groupby(["kind", "prefix"]):
        kind, prefix = group["kind"].iloc[0], int(group["prefix"].iloc[0])
        sides = group["is_trained"]
        if kind == "record":
            assert sorted(group["words"][sides]) == sorted(group["words"][~sides])
            assert set(group["name"][sides].str.split(":").str[0]) == {"train"}
            assert set(group["name"][~sides].str.split(":").str[0]) <= {"heldout", "test"}
            assert (group["words"] <= prefix + 5).all()
        else:
            planted = {canary.id for canary in opened.canaries if canary.is_planted}
            assert set(group["name"][~sides]) == {canary.id for canary in opened.canaries} - planted
        strings = [words_of(opened, row["name"], row["words"]) for row in group.to_dict("records")]
        for side in (sides, ~sides):
            assert len({tuple(string) for string, kept in zip(strings, side, strict=True) if kept}) == side.sum()
        for string, row in zip(strings, group.to_dict("records"), strict=True):
            assert len(string) == row["words"]
            _, log_prob = discover(model, Records.from_lists([string]), prefix, Scheme(top_k=0), opened.corpus.layout)
            assert row["log_probability"] == pytest.approx(log_prob[0], rel=1e-5)
            holding = [sum(contains(record, string) for record in user) for user in texts]
            assert (row["k_records"], row["k_users"]) == (sum(holding), sum(map(bool, holding)))
            assert row["k_users"] > 0 or not row["is_trained"]


def contains(record: list[int], string: list[int]) -> bool:
    return any(record[at : at + len(string)] == string for at in range(len(record)))


def test_json_output_equals_the_result_in_python(run: Path, flsim: Flsim) -> None:
    code, out, _ = flsim("extract", run, "--prefix", 1, "--prefix", 2, "--records", 12, "--top-p", 0.9, "--json")
    assert code == 0
    printed, measured = json.loads(out), api.extract(run, prefixes=[1, 2], records=12, top_p=0.9)
    assert printed["scheme"] == {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    for name in ("strings", "rates", "eidetic", "over_seeds"):
        table = getattr(measured, name)
        assert len(printed[name]) == len(table)
        assert list(printed[name][0]) == list(table.columns)
    assert [row["excess"] for row in printed["rates"]] == pytest.approx(measured.rates["excess"].tolist())
    assert set(measured.rates["prefix"]) == {1, 2}
    other = api.extract(run, prefixes=[2, 1], records=12, top_p=0.9).strings
    pd.testing.assert_frame_equal(other.sort_values("prefix", kind="stable", ignore_index=True), measured.strings)


def test_seeds_of_a_setting_become_one_row(trained_here: Trained, flsim: Flsim, tmp_path: Path) -> None:
    runs = [trained_here(WITH_CONTROLS), trained_here(WITH_CONTROLS, "seed=1")]
    other = trained_here(WITH_CONTROLS, "data.partition='iid'")
    figure = tmp_path / "extraction.svg"
    code, out, _ = flsim("extract", *runs, other, "--prefix", 3, "--records", 12, "--over-seeds", "--out", figure)
    assert code == 0
    assert out.count("|greedy") + out.count("| greedy") == 4  # two kinds of strings, two settings
    assert figure.stat().st_size > 10_000
    summary = api.extract(*runs, other, prefixes=[3], records=12).over_seeds
    assert summary.groupby("setting")["seeds"].unique().map(list).tolist() == [[1], [2]]


def test_an_epoch_selects_its_evaluated_checkpoint(run: Path) -> None:
    results = read_run(run)
    by_epoch = api.extract(run, prefixes=[2], records=5, epoch=2 / (results.rounds_per_epoch or 0))
    pd.testing.assert_frame_equal(by_epoch.strings, api.extract(run, prefixes=[2], records=5, round=2).strings)


@pytest.mark.parametrize("is_central", [False, True])
def test_extraction_from_other_models_and_central_runs(experiment: Experiment, is_central: bool) -> None:
    """Strings are extracted from a transformer in a federated run, and from a recurrent model in a central run."""
    if is_central:
        experiment.config.write_text(f"{PARTITION}{CENTRAL}")
    path = train_here(experiment, () if is_central else ("model.architecture='transformer'", "model.heads=2"))
    measured = api.extract(path, prefixes=[2], records=10)
    assert set(measured.rates["kind"]) == {"canary", "record"}
    assert measured.rates["rate"].between(0, 1).all()
    (controls,) = set(measured.rates["control_strings"][measured.rates["kind"] == "canary"])
    assert controls == 0


def test_canaries_of_arm_out_are_controls(trained_here: Trained) -> None:
    measured = api.extract(trained_here("canaries.arm='out'"), prefixes=[2], records=10)
    canaries = measured.strings[measured.strings["kind"] == "canary"]
    assert not canaries["is_trained"].any()
    assert (canaries["k_users"] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0), "top_p must be above 0, found 0"),
        (("--prefix", 20), "prefix 20: no canary, and no record of both training and held-out users, has more than 20"),
        (("--round", 77), "round-000077.safetensors: no such checkpoint; name another --round"),
        (("--out", "figure.txt"), "plots have the formats .png, .svg and .pdf"),
    ],
)
def test_refusals_are_one_line(run: Path, flsim: Flsim, options: tuple[object, ...], message: str) -> None:
    assert message in refusal(flsim, "extract", run, *options)


def test_runs_that_cannot_be_measured_are_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    Run.open(copy).mark("diverged", "round 5: the loss is not finite")
    with pytest.raises(InputError, match=r"diverged \(round 5: the loss is not finite\); name a checkpoint before"):
        api.extract(copy)
    assert len(api.extract(copy, round=2, prefixes=[2], records=5).rates)


def test_a_corpus_without_held_out_authors_is_refused(tmp_path: Path) -> None:
    users = {"ann": [[1, 2], [3, 4]], "bob": [[5, 6]]}
    run = run_of(write_corpus(tmp_path / "corpus", {"train": users, "test": {"bob": [[13, 14]]}}), tmp_path)
    run.save(run.latest_state())
    with pytest.raises(InputError, match="no author is held out of training"):
        api.extract(run.path)


def test_planted_text_of_held_out_users_is_not_a_control(tmp_path: Path) -> None:
    """One of three held-out records begins with the canary, so only the other two are controls."""
    users = {"ann": [[1, 2, 3, 4], [3, 4, 1, 2]], "bob": [[5, 6, 1, 2]]}
    held_out = {"eve": [[7, 8, 9, 1], [9, 8, 7, 1], [2, 8, 2, 1]]}
    run_of(write_corpus(tmp_path / "corpus", {"train": users, "heldout": held_out, "test": {"bob": [[1]]}}), tmp_path)
    changes = ("canaries.source='heldout'", "canaries.length=2")
    run = Run.create(load(tmp_path / "run.toml", changes), tmp_path / "natural")
    (canary,) = run.canaries
    assert canary.is_natural
    strings = record_strings(run.config.seed, run.canaries, records_of(run, 1), 1, 3, 10)
    controls = [text.tolist() for text, kept in zip(strings.texts, ~strings.is_trained, strict=True) if kept]
    assert len(controls) == 2
    assert all(text in held_out["eve"] and tuple(text[:2]) != canary.tokens for text in controls)
