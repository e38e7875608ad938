"""A sweep, or a search, whose runs could never be trained is refused before anything is made."""

from pathlib import Path

import pytest
from helpers import assert_refused

from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.runs.sweeps.definition import load, planned_runs
from flsim.runs.sweeps.folder import refuse_impossible_runs

SWEEP = """
title = "t"
[base]
canaries = { p_u = [0.1], p_e = [0.5], count = 4 }
[[grids]]
name = "fedavg"
axes = { "data.partition" = ["iid", "non-iid"] }
set = { training = { rounds = 1, cohort = 4 } }
[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 600 }
[tiers.smoke.set]
"""
TUNE = """
sweep = "sweep.toml"
seeds = [7]
[tiers.smoke.grids.fedavg]
"local.learning_rate" = { low = 0.1, high = 10.0 }
"""
REFERENCES = "evaluation.references=99999999999999"
COHORT = "training.cohort=13"
IMPOSSIBLE = {
    REFERENCES: "fedavg-iid-seed0: evaluation.references = 99,999,999,999,999 needs",
    "model.embedding=1000000000": "set a smaller model.embedding or model.units",
    "canaries.count=1000": "1,000 canaries would replace about 7,200 records, and the training users have 144",
    COHORT: "fedavg-iid-seed0: cohort must be between 1 and the 12 users, found 13",
}


@pytest.mark.parametrize(("setting", "message"), IMPOSSIBLE.items())
def test_a_sweep_is_refused_before_its_corpus_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    """12 users of 60 words have at most 12 records of 5 words each, and half of a tenth of those a canary."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    assert_refused(tmp_path, monkeypatch, capsys, ["sweep", "sweep.toml", "--set", setting], message)


def test_a_sweep_over_a_corpus_is_refused_before_it_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    sizes = SyntheticHParams(users=12, test_users=2, heldout_users=0, words_per_user=60, vocabulary_size=600)
    make_synthetic(tmp_path / "mine", sizes, 0)
    capsys.readouterr()  # the making of the corpus
    for setting in (REFERENCES, COHORT):
        arguments = ("sweep.toml", "--corpus", "mine", "--set", setting)
        assert_refused(tmp_path, monkeypatch, capsys, ["sweep", *arguments], IMPOSSIBLE[setting])
        assert_refused(tmp_path, monkeypatch, capsys, ["plan", "--no-calibration", *arguments], IMPOSSIBLE[setting])


def test_a_search_is_refused_before_its_corpus_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP + REFERENCES)
    (tmp_path / "tune.toml").write_text(TUNE)
    assert_refused(tmp_path, monkeypatch, capsys, ["tune", "tune.toml"], "evaluation.references = 99,999")


def test_the_memory_of_this_machine_does_not_bound_runs_on_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    definition = load(tmp_path / "sweep.toml")
    tier = definition.tiers["smoke"]
    planned = planned_runs(definition, tier, tmp_path / "corpus", str(tmp_path / "sweep.toml"), overrides=[REFERENCES])
    assert tier.corpus.synthetic
    refuse_impossible_runs(planned, tier.corpus.synthetic, is_trained_here=False)
