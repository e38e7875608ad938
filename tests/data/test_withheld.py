"""Tests of withheld records: which are drawn, that nothing else reads them, and that runs respect them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Experiment, MakeCorpus
from hypothesis import given
from hypothesis import strategies as st
from populations import split_of

import flsim as api
from flsim.base.errors import InputError
from flsim.canaries.population import Partition, plant_corpus
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import PartialSplit, Shadow, Split, held_out, included, record_words, without_withheld
from flsim.data.records import Records
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.training.update import State

Sentences = list[list[int]]
USERS = st.lists(st.lists(st.lists(st.integers(1, 90), max_size=4), max_size=9), min_size=1, max_size=8).filter(any)
RandomUsers = Callable[..., list[Sentences]]
HELD = "data.user_holdout=0.25"  # 2 of the 8 records of each of 24 users


def listed(records: Records) -> Sentences:
    return [record.tolist() for record in records]


@given(USERS, st.floats(0, 0.99), st.sampled_from([None, "user", "record"]), st.integers(0, 99), st.data())
def test_kept_records_equal_those_of_filtered_lists(
    users: list[Sentences], share: float, shadow: Shadow | None, seed: int, data: st.DataObject
) -> None:
    """Users, records at any positions, their words and counts equal those of lists without the withheld records."""
    left = []
    for user, records in enumerate(users):
        held = set(held_out(len(records), user, share).tolist())
        assert len(held) == max(0, min(int(np.floor(share * len(records) + 0.5)), len(records) - 1))
        assert held <= set(range(len(records)))
        tossed = [True] * len(records) if shadow is None else included(len(records), user, shadow, seed)
        left.append([record for place, record in enumerate(records) if place not in held and tossed[place]])
    if not any(left):
        with pytest.raises(InputError, match="exclude all records"):
            without_withheld(split_of(users), share, shadow, seed)
        return
    split = without_withheld(split_of(users), share, shadow, seed)
    expected = left if split.__class__ is Split else [records for records in left if records]
    assert [listed(split[user]) for user in range(len(split))] == expected
    flat = [record for records in expected for record in records]
    order = data.draw(st.permutations(range(len(flat))))
    assert listed(split.records_at(np.array(order, np.int64))) == [flat[place] for place in order]
    assert (split.records, split.words) == (len(flat), sum(map(len, flat)))
    assert np.concatenate([words for _, words in record_words(split)]).tolist() == [len(record) for record in flat]
    if isinstance(split, PartialSplit):
        assert [left[user] for user in split.users] == expected


def test_coins_are_fair_and_independent_of_neighbours_and_seeds() -> None:
    """4,000 fair coins have 2,000 heads on average, with standard deviation 31.6; the bound is four deviations."""
    tossed = np.array([included(3, user, "user", 5) for user in range(4_000)])
    assert (tossed == tossed[:, :1]).all()
    tossed = tossed[:, 0]
    of_another_seed = np.array([included(1, user, "user", 6)[0] for user in range(4_000)])
    for agreement in (tossed, tossed[1:] == tossed[:-1], tossed == of_another_seed, included(4_000, 0, "record", 1)):
        assert abs(agreement.sum() - 2_000) < 127


@pytest.mark.parametrize(
    ("algorithm", "partition"),
    [
        (api.FedAvg(cohort=6, local=api.LocalSGD(batch_size=4)), "non-iid"),
        (api.Central(api.CentralSGD(batch_size=8)), "iid"),
    ],
    ids=["federated", "central"],
)
def test_training_does_not_read_held_records(
    make_corpus: MakeCorpus, random_users: RandomUsers, algorithm: api.FedAvg | api.Central, partition: Partition
) -> None:
    """Corpora that differ only in withheld records train equal bits, with canaries; without the setting they do not."""
    users = random_users(24, 8, 36)
    others = [
        [[7] * 3 if place in held_out(8, user, 0.25) else record for place, record in enumerate(records)]
        for user, records in enumerate(users)
    ]
    corpora = [make_corpus(records, vocabulary_size=40, name=name) for name, records in (("a", users), ("b", others))]
    canaries = api.Canaries(p_u=(0.1,), p_e=(0.5,), count=6)

    def states(share: float) -> list[State]:
        planted = [api.plant(corpus, canaries, partition=partition, seed=2, user_holdout=share) for corpus in corpora]
        assert sum(len(one.users.overlay.records) for one in planted)
        return [[*api.simulate(one, api.Model(4, 6), algorithm, 6, seed=2)][-1] for one in planted]

    one, other = states(0.25)
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)
    one, other = states(0.0)
    assert not all(torch.equal(one.params[name], other.params[name]) for name in one.params)


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_each_record_is_withheld_or_trained_on_once(experiment: Experiment, partition: str) -> None:
    """Each record of the corpus is withheld, or is trained on in one place, unchanged or replaced by a canary."""
    path = experiment.folder / partition
    run = Run.create(load(experiment.config, [HELD, f"data.partition='{partition}'"]), path)
    run.verify()
    assert json.loads((path / "planted" / "population.json").read_text())["kept"] == 24 * 6
    assert isinstance(run.train, PartialSplit)
    assert run.users.split.records == run.users.records == 24 * 6
    whole = run.corpus.split("train")
    expected = [list(np.delete(np.arange(8), held_out(8, user, 0.25)) + 8 * user) for user in range(24)]
    assert run.train.positions.tolist() == np.concatenate(expected).tolist()
    places = np.arange(144) if run.users.twin is None else run.users.twin.order
    assert sorted(places) == list(range(144))
    is_planted = np.isin(np.arange(144), run.users.overlay.records)
    assert is_planted.any()
    for place in np.flatnonzero(~is_planted):
        (ours,) = run.users.records_at(np.array([place]))
        assert (ours == whole.records_at(run.train.positions[places[[place]]]).tokens).all()


def test_lengths_and_privacy_count_what_is_trained_on(experiment: Experiment) -> None:
    """The population of a shadow run is the users whose coins include them; an epoch is their number / 6 rounds."""
    config = load(experiment.config, [HELD, "data.shadow='user'"])
    run = Run.create(config, experiment.folder / "run")
    users = [user for user in range(24) if included(1, user, "user", config.seed)[0]]
    assert 0 < len(users) < 24
    assert run.population == len(run.users) == len(users)
    assert run.rounds_per_epoch == len(users) / 6
    assert [run.users.name(user) for user in range(len(users))] == [f"train{user}" for user in users]


def test_a_resumed_run_keeps_its_withheld_records_and_refuses_another_share(experiment: Experiment) -> None:
    run = Run.create(load(experiment.config, [HELD]), experiment.folder / "run")
    assert Run.reopen(run.config, run.path).train.records == run.train.records == 144
    with pytest.raises(InputError, match="started with other settings"):
        Run.reopen(replace(run.config, data=replace(run.config.data, user_holdout=0.5)), run.path)
    (run.path / "planted" / "kept.u32").write_bytes(b"")
    with pytest.raises(InputError, match=r"kept\.u32"):
        Run.reopen(run.config, run.path)


def test_settings_keep_their_digests_and_refuse_impossible_values(
    experiment: Experiment, make_corpus: MakeCorpus, random_users: RandomUsers, tmp_path: Path
) -> None:
    config = load(experiment.config)
    assert replace(config, data=replace(config.data, user_holdout=0.0, shadow=None)).digest == config.digest
    digests = {load(experiment.config, [setting]).digest for setting in (HELD, "data.shadow='user'")}
    assert len(digests | {config.digest}) == 3
    for wrong in ("data.user_holdout=1", "data.user_holdout=-0.1"):
        with pytest.raises(InputError, match=r"must be (at least 0|below 1)"):
            load(experiment.config, [wrong])
    with pytest.raises(InputError, match="shadow"):
        load(experiment.config, ["data.shadow='author'"])
    corpus = make_corpus(random_users(24, 8, 36), vocabulary_size=40, name="plain")
    planted = plant_corpus(corpus, tmp_path / "planted", CanaryHParams(insertions=(2,), count=2), 0)
    with pytest.raises(InputError, match="has canaries in some of them"):
        api.plant(planted, user_holdout=0.25)
