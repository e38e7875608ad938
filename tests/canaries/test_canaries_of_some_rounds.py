"""Canaries that are planted in some rounds: in populations, in training here and by a client, and in who met them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import PARTITION, Experiment

import flsim
from clients.app import train
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.wire import Address, decode_reply, encode_requests
from flsim.base.errors import InputError
from flsim.canaries.in_corpus import Planted, plant_corpus, planting_of
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Partition, Population, write_population
from flsim.canaries.roster import write_roster
from flsim.canaries.spec import Canary
from flsim.data.corpus import Corpus
from flsim.runs.config import load
from flsim.runs.folder import Run, participation
from flsim.training.state import State

BOUNDS = [(2, 3), (3, None), (None, 2), (None, None)]  # first and last round, from 1
ROUNDS = 4
CANARIES = flsim.Canaries(p_u=(0.5,), p_e=(0.5,), count=4)
PARTITIONS = pytest.mark.parametrize("partition", ["iid", "non-iid"])


def windowed(canaries: Sequence[Canary]) -> tuple[Canary, ...]:
    return tuple(
        replace(canary, first_round=first, last_round=last)
        for canary, (first, last) in zip(canaries, BOUNDS, strict=True)
    )


def of_round(users: Population, round_: int) -> Population:
    """The users with the copies of a round, from 1, alone, and no windows."""
    kept = [
        place
        for place, canary in enumerate(users.overlay.canaries)
        if (BOUNDS[canary][0] or 1) <= round_ <= (BOUNDS[canary][1] or ROUNDS)
    ]
    overlay = Overlay(users.overlay.records[kept], users.overlay.canaries[kept])
    return Population(users.split, users.phrases, overlay, users.twin)


def planted_in(experiment: Experiment, partition: Partition) -> tuple[flsim.Planted, flsim.Planted]:
    """Plant the same canaries in all rounds, and in those of `BOUNDS`."""
    always = flsim.plant(Corpus.open(experiment.folder / "corpus"), CANARIES, partition=partition)
    users, canaries = always.users, windowed(always.canaries)
    assert len(np.unique(users.overlay.canaries)) == len(BOUNDS)
    sometimes = Population.with_canaries(users.split, canaries, users.overlay, users.twin)
    return always, replace(always, users=sometimes, canaries=canaries)


@PARTITIONS
def test_a_round_has_the_copies_whose_window_it_is_in(experiment: Experiment, partition: Partition) -> None:
    always, sometimes = planted_in(experiment, partition)
    assert always.users.at(0) is always.users
    everything = np.arange(always.users.records)
    for round_ in range(1, ROUNDS + 1):
        users, expected = sometimes.users.at(round_ - 1), of_round(always.users, round_)
        assert 0 < len(expected.overlay.records) < len(always.users.overlay.records)
        assert users.at(0) is users
        pairs = [(users[user], expected[user]) for user in range(len(users))]
        for one, other in [*pairs, (users.records_at(everything), expected.records_at(everything))]:
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.offsets.tolist() == other.offsets.tolist()


@pytest.mark.parametrize(
    ("partition", "algorithm"),
    [
        ("iid", flsim.FedAvg(cohort=12)),
        ("non-iid", flsim.FedAvg(cohort=12, algorithm="scaffold")),
        ("non-iid", flsim.Central(flsim.CentralSGD(batch_size=64))),
        ("iid", flsim.Central(flsim.CentralSGD(batch_size=64), flsim.Privacy("dp", clip=1.0, noise_multiplier=0.1))),
    ],
    ids=["fedavg", "scaffold", "central", "dp-sgd"],
)
def test_each_round_trains_on_what_is_planted_in_it(
    experiment: Experiment, partition: Partition, algorithm: flsim.FedAvg | flsim.Central
) -> None:
    """Against training whose users are exchanged by hand before each round; steps are rounds, read in one piece."""
    always, sometimes = planted_in(experiment, partition)
    model = flsim.Model(4, 4)
    *_, last = flsim.simulate(sometimes, model, algorithm, ROUNDS, every=ROUNDS)
    training = algorithm.config(always, model, ROUNDS, 0).training_of(always.users, ROUNDS)
    expected = training.first_state()
    for round_ in range(1, ROUNDS + 1):
        users = of_round(always.users, round_)
        exchanged = (
            replace(training, users=users)
            if isinstance(training, FederatedTraining)
            else replace(training, records=users)  # type: ignore[type-var]
        )
        (expected,) = exchanged.states(expected, round_)
    assert_equal(last, expected)
    *_, throughout = flsim.simulate(always, model, algorithm, ROUNDS)
    assert any(not torch.equal(last.params[name], value) for name, value in throughout.params.items())


def assert_equal(one: State, other: State) -> None:
    assert one.round == other.round
    for name, value in other.params.items():
        assert torch.equal(one.params[name], value)


@pytest.fixture
def run(experiment: Experiment, partition: Partition, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A new run whose canaries have windows."""
    monkeypatch.chdir(experiment.folder)
    experiment.config.write_text(f"{PARTITION}[training]\nrounds = {ROUNDS}\ncohort = 12\n")
    settings = load(experiment.config, ["data.corpus='corpus'", f"data.partition='{partition}'"])
    settings = replace(settings, canaries=CANARIES)
    made = Run.create(settings, experiment.folder / "run")
    planting = planting_of(made.corpus, made.config.canaries, made.config.seed)
    folder = made.path / "planted"
    shutil.rmtree(folder)
    folder.mkdir()
    write_population(
        folder, made.corpus, replace(planting, canaries=windowed(planting.canaries)), partition, made.config.seed
    )
    return Run.open(made.path)


@PARTITIONS
def test_a_client_trains_the_users_of_its_requests_round(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own function, with a message's content in the place of messages, which only a node can make."""
    monkeypatch.setattr("clients.app.Message", lambda content, reply_to: content)
    training, address = run.federated.training_of(run.users, ROUNDS), Address(str(run.path), run.config.digest)
    client: Any = train
    engine, everything = training.engine_here(), run.users
    for round_ in range(1, ROUNDS + 1):
        (request, *_) = training.requests(replace(training.first_state(), round=round_ - 1))
        (content,) = encode_requests([request], address)
        answered = decode_reply(client(SimpleNamespace(content=content), SimpleNamespace(run_id=1))).update
        users = of_round(everything, round_)
        expected = engine.train(request.params, users, request.users.tolist(), run.config.seed, round_ - 1)
        for name, value in expected.delta.items():
            assert torch.equal(answered.delta[name], value)


@PARTITIONS
def test_nobody_meets_a_canary_outside_its_window(run: Run) -> None:
    rows = participation(run, ROUNDS)
    drawn = sorted(zip(*(part.tolist() for part in run.config.meetings(run.users, ROUNDS)), strict=True))
    inside = [
        (round_, run.canaries[canary].id, user)
        for round_, canary, user in drawn
        if (BOUNDS[canary][0] or 1) <= round_ <= (BOUNDS[canary][1] or ROUNDS)
    ]
    assert list(rows.itertuples(index=False, name=None)) == inside
    assert 0 < len(inside) < len(drawn)


def test_a_corpus_whose_canaries_are_of_some_rounds_is_refused(experiment: Experiment) -> None:
    planted = plant_corpus(Corpus.open(experiment.folder / "corpus"), experiment.folder / "planted", CANARIES, 0)
    content = Planted.read(planted)
    assert content is not None
    planting = replace(content.planting, canaries=windowed(content.planting.canaries))
    write_roster(planted.path / "planted", planting, planted.vocabulary)
    with pytest.raises(InputError, match="a corpus is the same in all rounds"):
        Planted.read(planted)
