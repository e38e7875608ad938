"""Tests of user inference cover the choice of fresh records, and the area of an attack on a run."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Experiment, Flsim, MakeCorpus
from numpy.typing import NDArray

from flsim.attacks.membership.candidates import unigram_of
from flsim.attacks.membership.shadows import FreshRecords, blind_area, fresh_records, infer_users
from flsim.base.errors import InputError
from flsim.data.corpus import held_out, included
from flsim.data.records import Records
from flsim.measures.memorization.score import log_perplexity
from flsim.runs.config import FederatedConfig, load
from flsim.runs.folder import Run, newest_checkpoint, restored_model

Floats = NDArray[np.float64]
Sentences = list[list[int]]
HELD = "data.user_holdout=0.25"


def test_authors_have_the_records_of_all_their_users() -> None:
    users = FreshRecords(
        Records.from_lists([[1], [2], [3], [4]]),
        np.array([0, 1, 1, 2]),
        ("train:0", "train:1", "heldout:0"),
        ("b", "b", "a"),
        np.array([True, False, False]),
        np.array([0.3, 0.0, 0.0]),
    )
    authors = users.by_author()
    assert authors.users == authors.authors == ("a", "b")
    assert authors.owners.tolist() == [1, 1, 1, 0]
    assert (authors.is_member.tolist(), authors.shares.tolist()) == ([False, True], [0.0, 0.3])


def private_users(count: int, seed: int) -> list[Sentences]:
    """Return users of eight records of five words; each user draws words from two words."""
    rng = np.random.Generator(np.random.PCG64(seed))
    own = [rng.choice(np.arange(1, 60), 2, replace=False) for _ in range(count)]
    return [rng.choice(words, (8, 5)).tolist() for words in own]


@pytest.fixture
def private(experiment: Experiment, make_corpus: MakeCorpus) -> Callable[..., Run]:
    """Return a function that creates untrained runs over users who each repeat two words."""
    corpus = make_corpus(
        private_users(24, 0),
        test=private_users(12, 1),
        heldout=private_users(12, 2),
        vocabulary_size=64,
        name="private",
    )

    def make(*overrides: str) -> Run:
        config = load(experiment.config, ["canaries.count=0", "model.embedding=8", "model.units=16", *overrides])
        config = replace(config, data=replace(config.data, corpus=corpus.path))
        return Run.create(config, experiment.folder / f"run-{len(overrides)}-{config.seed}")

    return make


def train(run: Run) -> Run:
    """Train a run in this process."""
    training = run.training()
    for state in training.states(training.first_state(), run.rounds, lambda round_: round_ == run.rounds):
        run.save(state)
    return run


def test_fresh_records_are_of_participants_and_of_users_outside_training(private: Callable[..., Run]) -> None:
    """Members are the cohorts of two rounds, 6 of 24 users each. On both sides, a quarter of 8 records is fresh."""
    run = private(HELD)
    users = fresh_records(run, 2, count=100)
    assert isinstance(run.config, FederatedConfig)
    training = run.config.training_of(run.users, 2)
    cohorts = {int(user) for round_ in range(2) for user in training.cohort(round_)}
    assert [name for name, is_in in zip(users.users, users.is_member, strict=True) if is_in] == [
        f"train:{user}" for user in sorted(cohorts)
    ]
    assert sum(name.startswith(("heldout:", "test:")) for name in users.users) == 24
    assert users.shares[users.is_member].tolist() == pytest.approx([1 / len(cohorts)] * len(cohorts))
    for place, name in enumerate(users.users):
        split, user = name.split(":")
        whole = run.corpus.split(split)[int(user)]
        expected = [whole[record].tolist() for record in held_out(8, int(user), 0.25).tolist()]
        fresh = [users.records[record].tolist() for record in np.flatnonzero(users.owners == place).tolist()]
        assert fresh == expected
    few = fresh_records(run, 2, count=3, most=1)
    assert (few.is_member.sum(), (~few.is_member).sum(), len(few.records)) == (3, 6, 9)


def test_non_members_of_a_shadow_run_are_users_whom_its_coins_excluded(private: Callable[..., Run]) -> None:
    run = private(HELD, "data.shadow='user'", "training.cohort=3", "training.rounds=40")
    users = fresh_records(run, run.rounds, count=100)
    tossed = [bool(included(1, user, "user", run.config.seed)[0]) for user in range(24)]
    known = dict(zip(users.users, users.is_member.tolist(), strict=True))
    assert known == {f"train:{user}": is_in for user, is_in in enumerate(tossed)}


def test_the_error_of_a_run_without_fresh_records_names_the_setting(private: Callable[..., Run]) -> None:
    with pytest.raises(InputError, match=r"set data.user_holdout"):
        fresh_records(private(), 2, 10)


def test_users_are_detected_in_an_overfitted_run_and_not_in_an_untrained_one(
    private: Callable[..., Run], flsim: Flsim
) -> None:
    """The expected area is computed record by record, from the log-perplexity of its words and of its EOS."""
    run = train(private(HELD, "training.rounds=30", "training.cohort=24", "local.learning_rate=3.0"))
    (row,) = infer_users(run.path).to_dict("records")
    assert (row["unit"], row["n_in"], row["n_out"]) == ("user", 24, 24)
    assert row["auroc"] > 0.95
    assert row["auroc_low"] <= row["auroc"] <= row["auroc_high"]
    chance = 3 * np.sqrt(49 / (12 * 24 * 24))  # 3 standard deviations for equal distributions (Mann, Whitney)
    assert abs(row["permuted_auroc"] - 0.5) < chance
    assert abs(row["untrained_auroc"] - 0.5) < chance

    users, layout = fresh_records(run, run.rounds, 100), run.corpus.layout
    _, model = restored_model(run, newest_checkpoint(run.path), "cpu")
    endings = [torch.tensor([*record.tolist(), layout.eos]) for record in users.records]
    with torch.no_grad():
        nats = [float(log_perplexity(model, torch.tensor([layout.bos]), ending[None])) for ending in endings]
    unigram = unigram_of(run.corpus)
    difference = [float(-own - unigram[ending.numpy()].sum()) for own, ending in zip(nats, endings, strict=True)]
    means = [np.mean(np.array(difference)[users.owners == user]) for user in range(48)]
    pairs = [
        (inside > outside) + (inside == outside) / 2
        for inside in np.array(means)[users.is_member]
        for outside in np.array(means)[~users.is_member]
    ]
    assert row["auroc"] == pytest.approx(float(np.mean(pairs)), abs=2 / len(pairs))

    code, out, _ = flsim("membership", run.path, "--unit", "user", "--json")
    ((printed,),) = (one["rows"] for one in json.loads(out)["runs"])
    assert (code, printed["auroc"], printed["n_in"]) == (0, row["auroc"], 24)
    code, _, err = flsim("membership", run.path, "--unit", "user", "--attack", "loss")
    assert (code, len(err.splitlines())) == (2, 1)
    few = infer_users(run.path, users=5, round=run.rounds)
    assert few[["n_in", "round"]].to_numpy().tolist() == [[5, run.rounds]]


def test_the_control_detects_users_whose_records_differ_only_in_length() -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    is_member = np.arange(200) < 100
    alike = rng.normal(size=(200, 2))
    longer = alike + np.where(is_member, 2.0, 0.0)[:, None] * [1, 0]
    blind, chance = rng, 3 * np.sqrt(101 / (12 * 50 * 50) / 2)  # two halves, each of 50 and 50 users
    assert abs(blind_area(alike, is_member, blind) - 0.5) < chance
    assert blind_area(longer, is_member, blind) > 0.85  # Phi(2 / sqrt 2) = .92
