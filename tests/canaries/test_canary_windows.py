"""Tests of windows of canaries, and of the arms `in` and `out`, from settings to tables."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import PARTITION, Experiment, train_here

import flsim
from clients.app import train
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.summation import TreeSum
from flsim.algorithms.wire import Address, decode_reply, encode_requests
from flsim.base.errors import InputError
from flsim.canaries.planting import Overlay
from flsim.canaries.population import (
    Partition,
    PlantedCorpus,
    Population,
    plant_corpus,
    planting_of,
    read_roster,
    write_population,
    write_roster,
)
from flsim.canaries.spec import Canary, CanaryHParams, bounds_of, injection_bounds
from flsim.data.corpus import Corpus
from flsim.planning.measure import UserNumbers, canaries_of
from flsim.results.rows import read_run
from flsim.runs.config import load
from flsim.runs.folder import Run, participation
from flsim.training.central import CentralTraining
from flsim.training.update import State, UpdateSum

CENTRAL = f'{PARTITION}[training]\nkind = "central"\n'


def test_rounds_of_a_window() -> None:
    expected = {
        (0.0, 1.0): (None, None),
        (0.0, 0.5): (None, 100),  # rounds 1 to 100: the window ends when 100 rounds are completed
        (0.5, 0.6): (101, 120),
        (100, 120): (101, 120),
        (0.5, 0.5): (101, 100),
        (0.0, 0.0): (1, 0),
        (150, 400): (151, 400),
    }
    assert {window: bounds_of(window, 200) for window in expected} == expected
    assert bounds_of((0.29, 1.0), 100) == (30, None)  # 0.29 x 100 is 28.999999999999996


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": ()}, "must list at least 1 value"),
        ({"windows": ((0.0, 0.5), (0.0, 0.5))}, "must list different values"),
        ({"windows": ((0.5, 0.2),)}, "not end before they begin"),
        ({"windows": ((-0.5, 0.2),)}, "must begin at 0 or later"),
        ({"windows": ((0.5, 20.0),)}, "must be fractions of training, from 0 to 1, or integer numbers of rounds"),
        ({"windows": ((float("nan"), 0.5),)}, "must be a finite number"),
    ],
)
def test_impossible_windows_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CanaryHParams(**settings)


def test_a_window_after_training_and_a_fraction_of_an_unknown_length_are_refused(experiment: Experiment) -> None:
    with pytest.raises(InputError, match=r"begins after the last of 4 rounds"):
        train_here(experiment, ["canaries.windows=[[4, 6]]"])
    assert not (experiment.folder / "run").exists()
    with pytest.raises(InputError, match="whose length is unknown; give the number of rounds"):
        flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.5,), p_e=(0.5,), count=1, windows=((0, 0.5),)))


@pytest.mark.parametrize("setting", [{"windows": ((2, 4),)}, {"arm": "out"}])
def test_windows_and_arms_are_refused_for_a_corpus(experiment: Experiment, setting: dict[str, Any]) -> None:
    corpus = Corpus.open(experiment.folder / "corpus")
    with pytest.raises(InputError, match=f"canaries.{next(iter(setting))}: a corpus is the same in all rounds"):
        plant_corpus(corpus, experiment.folder / "planted", CanaryHParams(**setting), 0)
    assert not (experiment.folder / "planted").exists()


def test_a_window_of_all_rounds_equals_no_window(experiment: Experiment) -> None:
    """A window of all rounds has the digest, files and users of a run without windows."""
    plain = load(experiment.config, ["data.corpus='corpus'"])
    always = load(experiment.config, ["data.corpus='corpus'", "canaries.windows=[[0, 1]]", "canaries.arm='in'"])
    assert always.digest == plain.digest
    run = Run.create(load(experiment.config, ["canaries.windows=[[0, 1]]"]), experiment.folder / "run")
    assert "first_round" not in pd.read_parquet(run.path / "planted" / "roster.parquet")
    assert run.users.at(3) is run.users


@pytest.mark.parametrize(("training", "length"), [(PARTITION, "rounds"), (CENTRAL, "steps")])
def test_fractions_of_training_are_of_its_length(experiment: Experiment, training: str, length: str) -> None:
    """With windows in rounds, a longer run has the same digest; with windows in fractions, it has another digest."""
    experiment.config.write_text(training)
    for windows, digests in (("[[0, 0.5]]", 2), ("[[0, 3]]", 1)):
        settings = [[f"canaries.windows={windows}", f"training.{length}={rounds}"] for rounds in (10, 20)]
        assert len({load(experiment.config, overrides).digest for overrides in settings}) == digests


def test_canaries_of_another_run_are_refused(experiment: Experiment) -> None:
    mine, other = (
        Run.create(load(experiment.config, [f"seed={seed}"]), experiment.folder / f"{seed}") for seed in "12"
    )
    _ = read_run(mine.path), mine.users
    shutil.rmtree(mine.path / "planted")
    shutil.copytree(other.path / "planted", mine.path / "planted")
    for read in (lambda: read_run(mine.path), lambda: Run.open(mine.path).users, mine.verify):
        with pytest.raises(InputError, match="these are the planted canaries of another run"):
            read()


def test_each_window_is_a_configuration_in_plans_and_rosters(experiment: Experiment) -> None:
    windows = ["canaries.windows=[[0.0, 0.5], [0.5, 0.75], [2, 2]]", "canaries.count=2", "canaries.p_u=[0.1]"]
    run = Run.create(load(experiment.config, windows), experiment.folder / "run")
    roster = read_roster(run.path / "planted" / "roster.parquet")
    first, last = roster["first_round"].fillna(1).tolist(), roster["last_round"].tolist()
    once = [(1, 2)] * 2 + [(3, 3)] * 2 + [(3, 2)] * 2
    assert list(zip(first, last, strict=True)) == once * 2  # windows of 4 rounds, for two values of p_e
    assert roster["p_e"].tolist() == [0.5] * 6 + [1.0] * 6
    with pytest.raises(InputError, match="has none of the 4 rounds, since both ends are rounded to 2 completed"):
        Run.create(load(experiment.config, ["canaries.windows=[[0.45, 0.6]]"]), experiment.folder / "none")
    planned = canaries_of(run.config.canaries, UserNumbers(24, 192, 500, 40))
    assert [group.window for group in planned] == ["0-50%", "50-75%", "never"] * 2
    options = [part for text in windows for part in ("--set", text)]
    page = experiment.call("plan", experiment.config, "--no-calibration", *options).stdout
    assert "50-75%" in page


# Canaries that are planted in some rounds: populations, training in this process and by a client, and exposed users.

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
    """Return the population with only the copies of one round, from 1, and without windows."""
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
    return always, replace(always, users=sometimes, planting=replace(always.planting, canaries=canaries))


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
        ("iid", flsim.Central(flsim.CentralSGD(batch_size=64))),
    ],
    ids=["fedavg", "scaffold", "central"],
)
def test_each_round_trains_on_what_is_planted_in_it(
    experiment: Experiment, partition: Partition, algorithm: flsim.FedAvg | flsim.Central
) -> None:
    """The oracle exchanges users by hand before each round. Central training reads all its steps in one piece."""
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
    assert last.round == expected.round
    assert all(torch.equal(last.params[name], value) for name, value in expected.params.items())
    *_, throughout = flsim.simulate(always, model, algorithm, ROUNDS)
    assert any(not torch.equal(last.params[name], value) for name, value in throughout.params.items())


@pytest.fixture
def run(experiment: Experiment, partition: Partition, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Make a run whose canaries have windows."""
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


@pytest.mark.parametrize("partition", ["iid"])
def test_a_client_trains_the_users_of_its_requests_round(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test calls the client's function with the content of a message, because only a node can make messages."""
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
def test_no_user_trains_on_a_canary_outside_its_window(run: Run) -> None:
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
    content = PlantedCorpus.read(planted)
    assert content is not None
    planting = replace(content.planting, canaries=windowed(content.planting.canaries))
    write_roster(planted.path / "planted", planting, planted.vocabulary)
    with pytest.raises(InputError, match="a corpus is the same in all rounds"):
        PlantedCorpus.read(planted)


# Strict injection: pseudo-users hold a canary and take part in one round, in addition to the round's cohort.

LENGTH = 6
MODEL = flsim.Model(4, 4)
GRID = "p_u = [0.2]\np_e = [0.5, 1.0]\n"
INJECTED: dict[str, Any] = {"injections": (3, 4), "injection_users": 2, "injection_copies": 5, "count": 3}


def planted(experiment: Experiment, partition: Any = "non-iid", **settings: Any) -> flsim.Planted:
    hparams = flsim.Canaries(**INJECTED | settings)
    return flsim.plant(experiment.folder / "corpus", hparams, partition=partition, rounds=LENGTH)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"injections": (0.5,), "p_u": (0.5,)}, "injections and p_u both set when canaries occur"),
        ({"injections": (0.5,), "windows": ((0.0, 0.5),)}, "injections and windows both"),
        ({"injections": (1.5,)}, "fractions of training below 1, or integer"),
        ({"injections": (-1,)}, "fractions of training below 1, or integer"),
        ({"injections": (0.5, 0.5)}, "must list different values"),
        ({"injection_copies": 2}, "injection_copies needs canaries.injections"),
    ],
)
def test_impossible_injections_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CanaryHParams(**settings)


def test_round_of_an_injection() -> None:
    """An injection is at a fraction of training, or after a number of completed rounds."""
    for at, rounds, round_ in ((0, 200, 1), (0.5, 200, 101), (100, None, 101), (0.99, 200, 199)):
        assert injection_bounds(at, rounds) == (round_, round_)
    with pytest.raises(InputError, match="after the last of 200 rounds"):
        injection_bounds(0.999, 200)


def test_pseudo_users_hold_only_copies_of_their_canary(experiment: Experiment) -> None:
    one = planted(experiment)
    users, canaries = one.users, one.canaries
    assert (len(users), len(users.extra), len(canaries)) == (24, 12, 6)
    assert not len(users.overlay.records)
    for number in range(12):
        assert [tuple(record.tolist()) for record in users[24 + number]] == [canaries[number // 2].tokens] * 5
    assert users.name(24) == "injected"
    mixed = users.records_at(np.array([users.records, 3, users.records + 59]))
    expected = [canaries[0].tokens, tuple(next(iter(users.records_at(np.array([3])))).tolist()), canaries[5].tokens]
    assert [tuple(record.tolist()) for record in mixed] == expected
    assert users.extra.most_records == 30
    out = planted(experiment, arm="out")
    assert [canary.tokens for canary in out.canaries] == [canary.tokens for canary in canaries]
    assert out.users.extra.most_records == 0


def sum_of(training: FederatedTraining, round_: int) -> UpdateSum:
    state = replace(training.first_state(), round=round_)
    requests = training.requests(state)
    total = TreeSum.of_replies(training.send_in_process()(requests), requests, 0).total
    assert total is not None
    return total


@pytest.mark.parametrize(("partition", "shards"), [("iid", 3), ("non-iid", 1)])
def test_a_rounds_sum_is_that_of_arm_out_and_of_its_pseudo_users(
    experiment: Experiment, partition: str, shards: int
) -> None:
    arms = [planted(experiment, partition, arm=arm) for arm in ("in", "out")]
    algorithm = flsim.FedAvg(cohort=12, shards=shards, branch=0)
    inside, outside = (algorithm.config(arm, MODEL, LENGTH, 0).training_of(arm.users, LENGTH) for arm in arms)
    assert isinstance(inside, FederatedTraining)
    assert isinstance(outside, FederatedTraining)
    # Users are trained one by one, because the other users of a group would change how an update is rounded.
    inside, outside = (replace(training, micro_cohort=1) for training in (inside, outside))
    engine, params = inside.engine_here(), inside.first_state().params
    for round_, pseudo in enumerate([[], [], [], range(24, 30), range(30, 36), []]):
        assert inside.cohort(round_).tolist() == [*outside.cohort(round_).tolist(), *pseudo]
        one, other = sum_of(inside, round_), sum_of(outside, round_)
        added = engine.train(params, inside.users, list(pseudo), 0, round_)
        assert one.counts.users - other.counts.users == len(pseudo)
        assert one.counts.weight - other.counts.weight == pytest.approx(added.counts.weight)
        for name, value in one.delta.items():
            torch.testing.assert_close(value - other.delta[name], added.delta[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("privacy", [flsim.Privacy(), flsim.Privacy("dp", clip=1.0, noise_multiplier=0.1)])
def test_a_steps_batch_is_extended_by_injected_records(experiment: Experiment, privacy: flsim.Privacy) -> None:
    arms = [planted(experiment, arm=arm) for arm in ("in", "out")]
    algorithm = flsim.Central(flsim.CentralSGD(batch_size=40), privacy)
    inside, outside = (algorithm.config(arm, MODEL, LENGTH, 0).training_of(arm.users, LENGTH) for arm in arms)
    assert isinstance(inside, CentralTraining)
    assert isinstance(outside, CentralTraining)
    one, other = inside.chunk(0, LENGTH), outside.chunk(0, LENGTH)
    assert (one.counts - other.counts).tolist() == [0, 0, 0, 30, 30, 0]
    read = [tuple(record.tolist()) for record in one.records]
    end = int(one.counts[:4].sum())
    assert read[end - 30 : end] == [canary.tokens for canary in arms[0].canaries[:3] for _ in range(10)]
    assert read[: end - 30] == [tuple(record.tolist()) for record in other.records][: end - 30]
    assert inside.largest_batch == 70


PRIVATE = flsim.Privacy("dp", clip=1.0, noise_multiplier=0.1)
WINDOWS: dict[str, Any] = {"p_u": (0.5,), "p_e": (0.5,), "count": 4, "windows": ((3, 5),)}


@pytest.mark.parametrize(
    ("canaries", "partition", "algorithm"),
    [
        (WINDOWS, "non-iid", flsim.FedAvg(cohort=12)),
        (WINDOWS, "iid", flsim.Central(flsim.CentralSGD(batch_size=64), PRIVATE)),
        (INJECTED, "non-iid", flsim.FedAvg(cohort=12, sampler="poisson", privacy=PRIVATE)),
        (INJECTED, "non-iid", flsim.FedAvg(cohort=12, sampler="with-replacement")),
        (INJECTED, "non-iid", flsim.Central(flsim.CentralSGD(batch_size=40))),
    ],
    ids=["federated", "dp-sgd-twin", "injected-dp", "injected-with-replacement", "injected-central"],
)
def test_the_arms_are_equal_until_the_window(
    experiment: Experiment, canaries: dict[str, Any], partition: Partition, algorithm: flsim.FedAvg | flsim.Central
) -> None:
    """Both arms have the same ledger, which ignores pseudo-users. An empty window equals arm `out` on the same twin."""

    def trained(**changes: Any) -> tuple[list[int], list[State]]:
        hparams = flsim.Canaries(**canaries | changes)
        users = flsim.plant(experiment.folder / "corpus", hparams, partition=partition, rounds=5)
        return users.users.overlay.records.tolist(), [*flsim.simulate(users, MODEL, algorithm, 5)]

    def equal_rounds(one: list[State], other: list[State]) -> list[int]:
        assert all(mine.ledger == theirs.ledger for mine, theirs in zip(one, other, strict=True))
        pairs = [(mine.params, theirs.params) for mine, theirs in zip(one, other, strict=True)]
        are_equal = [all(torch.equal(mine[name], theirs[name]) for name in mine) for mine, theirs in pairs]
        return [mine.round for mine, is_equal in zip(one, are_equal, strict=True) if is_equal]

    (records, inside), (others, outside) = trained(), trained(arm="out")
    assert records == others
    assert equal_rounds(inside, outside) == [1, 2, 3]
    if "windows" in canaries:
        assert equal_rounds(outside, trained(windows=((0.5, 0.5),))[1]) == [1, 2, 3, 4, 5]


def test_algorithms_that_do_not_support_pseudo_users_are_refused(experiment: Experiment) -> None:
    experiment.config.write_text(experiment.config.read_text().replace(GRID, "injections = [0.5]\n"))
    adaptive = ["privacy.mechanism='clip'", "privacy.clip=1.0", "privacy.target_quantile=0.5"]
    for overrides, message in (
        (["training.algorithm='scaffold'"], "SCAFFOLD: users keep states between rounds"),
        (adaptive, r"pseudo-users of canaries\.injections would move the adaptive clip"),
        (["training.sampler='fedbuff'", "training.sampler_options={concurrency=8}"], "begin in no round"),
    ):
        with pytest.raises(InputError, match=message):
            Run.create(load(experiment.config, overrides), experiment.folder / "run")
        assert not (experiment.folder / "run").exists()


@pytest.mark.parametrize("kind", ["federated", "central"])
def test_an_injected_run_lists_its_pseudo_users_and_measures_its_canaries(experiment: Experiment, kind: str) -> None:
    config = experiment.config.read_text().replace(GRID, "injections = [1, 0.5]\n")
    settings = ["canaries.injection_users=2", "canaries.injection_copies=3"]
    if kind == "central":
        config = config.replace("rounds = 4\ncohort = 6\n[local]", 'kind = "central"\nsteps = 4\nbatch_size = 20\n')
        config = (
            config[: config.index("batch_size = 20\n")] + "batch_size = 20\n[evaluation]\nevery = 2\nreferences = 200\n"
        )
    experiment.config.write_text(config)
    run = Run.open(train_here(experiment, settings))
    met = participation(run, 4)
    times = 3 if kind == "central" else 1
    expected = [
        (round_, canary, user)
        for round_, canaries in ((2, ("c0", "c1")), (3, ("c2", "c3")))
        for place, canary in enumerate(canaries)
        for user in np.repeat([24 + 4 * (round_ - 2) + 2 * place, 25 + 4 * (round_ - 2) + 2 * place], times).tolist()
    ]
    assert list(met.itertuples(index=False, name=None)) == expected
    assert participation(run, 1).empty
    roster = read_roster(run.path / "planted" / "roster.parquet")
    assert roster[["sharers", "insertions", "pseudo_users"]].to_numpy().tolist() == [[2, 6, 2]] * 4
    assert roster["first_round"].tolist() == roster["last_round"].tolist() == [2, 2, 3, 3]


def test_an_epsilon_does_not_cover_injected_users(experiment: Experiment) -> None:
    """Audit and plan print that an epsilon does not cover injected users; their bounds are not compared with it."""
    experiment.config.write_text(experiment.config.read_text().replace(GRID, "injections = [0.5]\n"))
    private = ["privacy.mechanism='dp'", "privacy.clip=0.5", "privacy.noise_multiplier=0.8"]
    run = train_here(experiment, [*private, "canaries.injection_users=3"])
    sentence = "Injected users take part with probability 1 (after 50%): an epsilon of the ledger does not cover them."
    audited = " ".join(experiment.call("audit", run).stdout.split())
    assert sentence in audited
    assert "Each canary is shared by 3 users." in audited
    assert "the ledger, which claims" not in audited
    settings = [part for text in private for part in ("--set", text)]
    plan = experiment.call("plan", experiment.config, "--no-calibration", *settings).stdout
    assert sentence in " ".join(plan.split())
