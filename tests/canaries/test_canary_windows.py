"""Windows of canaries, and the arms in and out, from settings to tables."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import PARTITION, Experiment, train_here

import flsim
from flsim.base.errors import InputError
from flsim.canaries.in_corpus import plant_corpus
from flsim.canaries.population import Population
from flsim.canaries.roster import read_roster
from flsim.canaries.spec import CanaryHParams, bounds_of
from flsim.data.corpus import Corpus
from flsim.planning.scale import Users, canaries_of
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.training.state import State

ROUNDS = 8
CENTRAL = f'{PARTITION}[training]\nkind = "central"\n'
ALGORITHMS = pytest.mark.parametrize(
    ("partition", "algorithm"),
    [
        ("non-iid", flsim.FedAvg(cohort=12)),
        ("iid", flsim.FedAvg(cohort=12)),
        ("non-iid", flsim.Central(flsim.CentralSGD(batch_size=64))),
        ("iid", flsim.Central(flsim.CentralSGD(batch_size=64), flsim.Privacy("dp", clip=1.0, noise_multiplier=0.1))),
    ],
    ids=["federated", "federated-twin", "central", "dp-sgd-twin"],
)


@pytest.mark.parametrize(
    ("window", "rounds", "bounds"),
    [
        ((0.0, 1.0), 200, (None, None)),
        ((0.0, 0.5), 200, (None, 100)),  # rounds 1 to 100: it ends when 100 are completed
        ((0.5, 0.6), 200, (101, 120)),
        ((0.29, 1.0), 100, (30, None)),  # 0.29 x 100 is 28.999999999999996
        ((100, 120), 200, (101, 120)),
        ((0.5, 0.5), 200, (101, 100)),
        ((0.0, 0.0), 200, (1, 0)),
        ((150, 400), 200, (151, 400)),
    ],
)
def test_rounds_of_a_window(
    window: tuple[float, float], rounds: int | None, bounds: tuple[int | None, int | None]
) -> None:
    assert bounds_of(window, rounds) == bounds


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
def test_windows_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CanaryHParams(**settings)


def test_a_window_after_training_and_a_fraction_of_an_unknown_length_are_refused(experiment: Experiment) -> None:
    with pytest.raises(InputError, match=r"begins after the last of 4 rounds"):
        train_here(experiment, ["canaries.windows=[[4, 6]]"])
    assert not (experiment.folder / "run").exists()
    with pytest.raises(InputError, match="whose length is unknown; give the number of rounds"):
        flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.5,), p_e=(0.5,), count=1, windows=((0, 0.5),)))


@pytest.mark.parametrize("setting", [{"windows": ((2, 4),)}, {"arm": "out"}])
def test_a_corpus_has_no_windows(experiment: Experiment, setting: dict[str, Any]) -> None:
    corpus = Corpus.open(experiment.folder / "corpus")
    with pytest.raises(InputError, match=f"canaries.{next(iter(setting))}: a corpus is the same in all rounds"):
        plant_corpus(corpus, experiment.folder / "planted", CanaryHParams(**setting), 0)
    assert not (experiment.folder / "planted").exists()


def test_always_is_what_runs_without_windows_are(experiment: Experiment) -> None:
    """Digest, files and users: nothing tells a window of all rounds from none."""
    plain = load(experiment.config, ["data.corpus='corpus'"])
    always = load(experiment.config, ["data.corpus='corpus'", "canaries.windows=[[0, 1]]", "canaries.arm='in'"])
    assert always.digest == plain.digest
    run = Run.create(load(experiment.config, ["canaries.windows=[[0, 1]]"]), experiment.folder / "run")
    assert "first_round" not in pd.read_parquet(run.path / "planted" / "roster.parquet")
    assert run.users.at(3) is run.users


@pytest.mark.parametrize(
    ("training", "windows", "has_length"),
    [
        (PARTITION, "[[0, 0.5]]", True),
        (PARTITION, "[[0, 3]]", False),
        (CENTRAL, "[[0, 0.5]]", True),
        (CENTRAL, "[[0, 3]]", False),
    ],
)
def test_fractions_of_training_are_of_its_length(
    experiment: Experiment, training: str, windows: str, has_length: bool
) -> None:
    """A run with windows in rounds may go on for more rounds; with fractions it would be another run."""
    experiment.config.write_text(training)
    length = "training.steps" if training is CENTRAL else "training.rounds"
    digests = {
        load(experiment.config, [f"canaries.windows={windows}", f"{length}={rounds}"]).digest for rounds in (10, 20)
    }
    assert len(digests) == 1 + has_length


def test_each_window_is_a_configuration_in_plans_and_rosters(experiment: Experiment) -> None:
    windows = ["canaries.windows=[[0.0, 0.5], [0.5, 0.75], [2, 2]]", "canaries.count=2", "canaries.p_u=[0.1]"]
    run = Run.create(load(experiment.config, windows), experiment.folder / "run")
    roster = read_roster(run.path / "planted" / "roster.parquet")
    first, last = roster["first_round"].fillna(1).tolist(), roster["last_round"].tolist()
    once = [(1, 2)] * 2 + [(3, 3)] * 2 + [(3, 2)] * 2
    assert list(zip(first, last, strict=True)) == once * 2  # of 4 rounds; two values of p_e
    assert roster["p_e"].tolist() == [0.5] * 6 + [1.0] * 6
    planned = canaries_of(run.config.canaries, Users(24, 192, 500, 40))
    assert [group.window for group in planned] == ["0-50%", "50-75%", "never"] * 2
    options = [part for text in windows for part in ("--set", text)]
    page = experiment.call("plan", experiment.config, "--no-calibration", *options).stdout
    assert "50-75%" in page


def first_states(
    experiment: Experiment, partition: str, algorithm: flsim.FedAvg | flsim.Central, **canaries: object
) -> tuple[Population, list[State]]:
    hparams = flsim.Canaries(p_u=(0.5,), p_e=(0.5,), count=4, **canaries)  # type: ignore[arg-type]
    users = flsim.plant(experiment.folder / "corpus", hparams, partition=partition, rounds=ROUNDS)  # type: ignore[arg-type]
    return users.users, [*flsim.simulate(users, flsim.Model(4, 4), algorithm, ROUNDS)]


def differing(one: list[State], other: list[State]) -> Iterator[int]:
    for mine, theirs in zip(one, other, strict=True):
        if any(not torch.equal(mine.params[name], value) for name, value in theirs.params.items()):
            yield mine.round


@ALGORITHMS
def test_the_arms_are_equal_until_the_window(
    experiment: Experiment, partition: str, algorithm: flsim.FedAvg | flsim.Central
) -> None:
    """And the arm out is the run of canaries whose window is empty, on the same records of the same twin."""
    users, inside = first_states(experiment, partition, algorithm, windows=((3, 5),))
    others, outside = first_states(experiment, partition, algorithm, windows=((3, 5),), arm="out")
    assert np.array_equal(users.overlay.records, others.overlay.records)
    assert list(differing(inside, outside)) == [4, 5, 6, 7, 8]
    _, never = first_states(experiment, partition, algorithm, windows=((0.5, 0.5),))
    assert not list(differing(outside, never))
