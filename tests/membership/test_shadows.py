"""Tests of shadow models cover the targets, membership in each run, the areas of attacks, and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Experiment, Flsim, MakeCorpus

from flsim.attacks.membership.candidates import log_probabilities
from flsim.attacks.membership.inference import newest_rows
from flsim.attacks.membership.shadows import (
    Shadows,
    collect,
    counterfactual,
    infer_by_shadows,
    leave_one_out,
    success_of_shadows,
)
from flsim.base.errors import InputError
from flsim.base.statistics import auroc, share_interval
from flsim.data.corpus import held_out, included
from flsim.runs.config import load
from flsim.runs.folder import Run, newest_checkpoint, restored_model

Sentences = list[list[int]]
RandomUsers = Callable[..., list[Sentences]]
ATTACKS = ["loss", "LiRA online", "LiRA offline", "RMIA online", "RMIA offline"]


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flsim.attacks.membership.shadows.RESAMPLES", 100)


def drawn(gain: float, runs: int = 16, targets: int = 40, seed: int = 0) -> Shadows:
    """Return targets of different difficulty, whose scores are higher by `gain` in runs that trained on them."""
    rng = np.random.Generator(np.random.PCG64(seed))
    is_in = rng.random((runs, targets)) < 0.5
    phi = rng.normal(-4, 1, targets) + gain * is_in + rng.normal(0, 0.1, (runs, targets))
    population = rng.normal(-4, 1, 60) + rng.normal(0, 0.1, (runs, 60))
    return Shadows("user", tuple(f"train:{place}" for place in range(targets)), phi, is_in, population)


@pytest.mark.parametrize("gain", [0.0, 0.4])
def test_shadow_models_correct_for_the_difficulty_of_targets(gain: float) -> None:
    """With a gain of four standard deviations, LiRA's area is Phi(4 / sqrt 2) = .998. Without a gain, every area is .5,
    within three standard deviations over seeds of .036 each."""
    table = success_of_shadows(drawn(gain)).set_index("attack")
    assert list(table.index) == ATTACKS
    assert (table["n_in"] + table["n_out"] == 640).all()
    if not gain:
        assert ((table["auroc"] - 0.5).abs() < 0.11).all()
        without_hits = success_of_shadows(drawn(-20)).iloc[0]
        assert without_hits["tpr_at_0.1"] == without_hits["tpr_low_at_0.1"] == 0
        assert without_hits["tpr_high_at_0.1"] >= share_interval(0, without_hits["n_in"])[1]
        return
    areas = table["auroc"].to_dict()
    assert areas["loss"] < 0.7
    assert min(areas["LiRA online"], areas["LiRA offline"]) > 0.97
    assert min(areas["RMIA online"], areas["RMIA offline"]) > areas["loss"]
    assert (table["tpr_low_at_0.1"] <= table["tpr_at_0.1"]).all()
    assert (table["tpr_at_0.1"] <= table["tpr_high_at_0.1"]).all()
    assert "tpr_at_0.001" not in table  # 320 non-members cannot show this rate


@pytest.fixture
def shadow_runs(
    experiment: Experiment, make_corpus: MakeCorpus, random_users: RandomUsers
) -> Callable[..., list[Path]]:
    """Return a function that trains runs of seeds 0 to 3 with `data.shadow` in this process."""
    corpus = make_corpus(
        random_users(24, 8, 36),
        test=random_users(4, 8, 36, seed=1),
        heldout=random_users(8, 8, 36, seed=2),
        vocabulary_size=40,
        name="shadowed",
    )

    def make(unit: str, *overrides: str) -> list[Path]:
        paths = []
        for seed in range(4):
            settings = ["canaries.count=0", "training.cohort=3", f"data.shadow='{unit}'", f"seed={seed}", *overrides]
            config = load(experiment.config, settings)
            config = replace(config, data=replace(config.data, corpus=corpus.path))
            run = Run.create(config, experiment.folder / f"{unit}-{seed}")
            training = run.training()
            for state in training.states(training.first_state(), run.rounds, lambda round_: round_ == 4):
                run.save(state)
            paths.append(run.path)
        return paths

    return make


def names_in_cohorts(run: Run) -> set[str]:
    training = run.federated.training_of(run.users, run.rounds)
    return {run.users.name(int(user)) for round_ in range(run.rounds) for user in training.cohort(round_)}


def test_runs_score_the_same_targets(shadow_runs: Callable[..., list[Path]]) -> None:
    """Targets are users of the corpus, scored on their fresh records. A user is IN if a cohort of the run has them."""
    paths = shadow_runs("user", "data.user_holdout=0.25")
    shadows = collect(paths, count=10)
    assert shadows.phi.shape == shadows.is_in.shape == (4, 10)
    assert shadows.population.shape == (4, 8)
    for row, path in enumerate(paths):
        run = Run.open(path)
        names = names_in_cohorts(run)
        assert shadows.is_in[row].tolist() == [name.replace(":", "") in names for name in shadows.targets]
        _, model = restored_model(run, newest_checkpoint(path), "cpu")
        for place, name in enumerate(shadows.targets):
            user = int(name.removeprefix("train:"))
            records = run.corpus.split("train").records_at(8 * user + held_out(8, user, 0.25))
            sums = log_probabilities(model, records, run.corpus.layout).sum()
            assert shadows.phi[row, place] == pytest.approx(sums / (records.words + len(records)), abs=1e-6)


def test_records_are_in_if_their_coin_includes_them_and_a_round_read_them(
    shadow_runs: Callable[..., list[Path]], flsim: Flsim
) -> None:
    paths = shadow_runs("record", "training.cohort=10")
    shadows = collect(paths, count=25)
    for row, path in enumerate(paths):
        run = Run.open(path)
        names, seed = names_in_cohorts(run), run.config.seed
        positions = [int(name.removeprefix("train:")) for name in shadows.targets]
        expected = [
            bool(included(8, position // 8, "record", seed)[position % 8]) and f"train{position // 8}" in names
            for position in positions
        ]
        assert shadows.is_in[row].tolist() == expected
        assert 0 < sum(expected) < 25
    code, out, _ = flsim("membership", *paths, "--shadows", "--records", "25", "--json")
    assert code == 0
    (printed,) = json.loads(out)["shadows"]
    assert [row["attack"] for row in printed["attacks"]] == ATTACKS
    pd.testing.assert_frame_equal(pd.DataFrame(printed["targets"]), counterfactual(shadows), check_dtype=False)
    (loss, *_) = printed["attacks"]
    known = np.isfinite(leave_one_out(shadows)["loss"])
    area = auroc(shadows.phi[known & shadows.is_in], shadows.phi[known & ~shadows.is_in])
    assert loss["auroc"] == pytest.approx(area)
    attacks, of_targets = infer_by_shadows(*paths, records=25)
    assert attacks["auroc"].tolist() == pytest.approx([row["auroc"] for row in printed["attacks"]])
    assert len(of_targets) == len(printed["targets"])
    scores = leave_one_out(shadows)["LiRA online"]
    for row, path in enumerate(paths):
        stored = newest_rows(path, Run.open(path).identity).set_index("attack")
        assert list(stored.index) == ATTACKS[1:]
        known = np.isfinite(scores[row])
        area = auroc(scores[row, known & shadows.is_in[row]], scores[row, known & ~shadows.is_in[row]])
        assert stored["auroc"]["LiRA online"] == pytest.approx(area)


def test_runs_that_are_not_shadows_of_each_other_are_refused(
    shadow_runs: Callable[..., list[Path]], experiment: Experiment
) -> None:
    paths = shadow_runs("user")
    with pytest.raises(InputError, match="shadow models need at least 4 runs, found"):
        collect(paths[:3])
    with pytest.raises(InputError, match="name each seed once"):
        collect([*paths, paths[0]])
    plain = Run.create(load(experiment.config), experiment.folder / "plain")
    with pytest.raises(InputError, match="differ in more than their seeds"):
        collect([*paths, plain.path])
    with pytest.raises(InputError, match=r"set data.shadow"):
        collect([plain.path, *paths])
