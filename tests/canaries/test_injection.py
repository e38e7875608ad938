"""Strict injection: pseudo-users who hold a canary and take part in one round, beside its cohort."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Experiment, train_here

import flsim
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.summation import TreeSum
from flsim.base.errors import InputError
from flsim.canaries.roster import read_roster
from flsim.canaries.spec import CanaryHParams, injection_bounds
from flsim.runs.config import load
from flsim.runs.folder import Run, participation
from flsim.simulation import Planted
from flsim.training.central import CentralTraining
from flsim.training.update import UpdateSum

ROUNDS = 6
MODEL = flsim.Model(4, 4)
GRID = "p_u = [0.2]\np_e = [0.5, 1.0]\n"
INJECTED: dict[str, Any] = {"injections": (3, 4), "injection_users": 2, "injection_copies": 5, "count": 3}
PARTITIONS = pytest.mark.parametrize("partition", ["iid", "non-iid"])


def planted(experiment: Experiment, partition: Any = "non-iid", **settings: Any) -> Planted:
    hparams = flsim.Canaries(**INJECTED | settings)
    return flsim.plant(experiment.folder / "corpus", hparams, partition=partition, rounds=ROUNDS)


@pytest.mark.parametrize(
    ("at", "rounds", "round_"), [(0, 200, 1), (0.5, 200, 101), (100, 200, 101), (100, None, 101), (0.999, 200, 201)]
)
def test_round_of_an_injection(at: float, rounds: int | None, round_: int) -> None:
    if rounds is not None and round_ > rounds:
        with pytest.raises(InputError, match="after the last of 200 rounds"):
            injection_bounds(at, rounds)
    else:
        assert injection_bounds(at, rounds) == (round_, round_)


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
def test_injections_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CanaryHParams(**settings)


@PARTITIONS
def test_pseudo_users_hold_copies_of_their_canary_alone(experiment: Experiment, partition: str) -> None:
    one = planted(experiment, partition)
    users, canaries = one.users, one.canaries
    assert (len(users), len(users.extra), len(canaries)) == (24, 12, 6)
    assert not len(users.overlay.records)
    for number in range(12):
        held = [tuple(record.tolist()) for record in users[24 + number]]
        assert held == [canaries[number // 2].tokens] * 5
    assert users.name(24) == "injected"
    mixed = users.records_at(np.array([users.records, 3, users.records + 59]))
    expected = [canaries[0].tokens, tuple(next(iter(users.records_at(np.array([3])))).tolist()), canaries[5].tokens]
    assert [tuple(record.tolist()) for record in mixed] == expected
    assert users.extra.most_records == 30
    out = planted(experiment, partition, arm="out")
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
    inside, outside = (algorithm.config(arm, MODEL, ROUNDS, 0).training_of(arm.users, ROUNDS) for arm in arms)
    assert isinstance(inside, FederatedTraining)
    assert isinstance(outside, FederatedTraining)
    # One user after another, so that who else is in a group does not change how an update is rounded.
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
    inside, outside = (algorithm.config(arm, MODEL, ROUNDS, 0).training_of(arm.users, ROUNDS) for arm in arms)
    assert isinstance(inside, CentralTraining)
    assert isinstance(outside, CentralTraining)
    one, other = inside.chunk(0, ROUNDS), outside.chunk(0, ROUNDS)
    assert (one.counts - other.counts).tolist() == [0, 0, 0, 30, 30, 0]
    read = [tuple(record.tolist()) for record in one.records]
    end = int(one.counts[:4].sum())
    assert read[end - 30 : end] == [canary.tokens for canary in arms[0].canaries[:3] for _ in range(10)]
    assert read[: end - 30] == [tuple(record.tolist()) for record in other.records][: end - 30]
    assert inside.largest_batch == 70


@pytest.mark.parametrize(
    "algorithm",
    [
        flsim.FedAvg(cohort=12),
        flsim.FedAvg(cohort=12, sampler="poisson", privacy=flsim.Privacy("dp", clip=1.0, noise_multiplier=1.0)),
        flsim.FedAvg(cohort=12, sampler="with-replacement"),
        flsim.Central(flsim.CentralSGD(batch_size=40)),
    ],
    ids=["fedavg", "dp", "with-replacement", "central"],
)
def test_arms_are_equal_until_the_first_injection(
    experiment: Experiment, algorithm: flsim.FedAvg | flsim.Central
) -> None:
    """And the ledger, which is about the population, does not know of the pseudo-users."""
    states = [
        [*flsim.simulate(planted(experiment, arm=arm), flsim.Model(4, 4), algorithm, ROUNDS)] for arm in ("in", "out")
    ]
    for one, other in zip(*states, strict=True):
        is_equal = all(torch.equal(one.params[name], value) for name, value in other.params.items())
        assert is_equal == (one.round <= 3)
        assert one.ledger == other.ledger


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.algorithm='scaffold'"], "SCAFFOLD: users keep states between rounds"),
        (
            ["privacy.mechanism='clip'", "privacy.clip=1.0", "privacy.target_quantile=0.5"],
            "pseudo-users of canaries.injections would move the adaptive clip",
        ),
    ],
)
def test_what_pseudo_users_cannot_take_part_in(experiment: Experiment, overrides: list[str], message: str) -> None:
    plain = experiment.config.read_text().replace(GRID, "injections = [0.5]\n")
    experiment.config.write_text(plain)
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


def test_an_epsilon_is_not_about_injected_users(experiment: Experiment) -> None:
    """Audit, report and plan say so, and no bound of injected canaries is held against the ledger."""
    experiment.config.write_text(experiment.config.read_text().replace(GRID, "injections = [0.5]\n"))
    private = ["privacy.mechanism='dp'", "privacy.clip=0.5", "privacy.noise_multiplier=0.8"]
    run = train_here(experiment, [*private, "canaries.injection_users=3"])
    sentence = "Injected users take part with probability 1 (after 50%): an epsilon of the ledger does not cover them."
    audited = " ".join(experiment.call("audit", run).stdout.split())
    assert sentence in audited
    assert "Each canary is shared by 3 users." in audited
    assert "the ledger, which claims" not in audited
    settings = [part for text in private for part in ("--set", text)]
    assert sentence in " ".join(
        experiment.call("plan", experiment.config, "--no-calibration", *settings).stdout.split()
    )
    experiment.call("report", run, "--out", "report.html")
    assert sentence in (experiment.folder / "report.html").read_text()
