"""Twins: runs of two partitions have the same records, copies, sizes of users, and users in a round."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from helpers import Experiment, MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.canaries.planting import plant
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.canaries.twin import Twin, make_twin
from flsim.data.corpus import Split
from flsim.data.records import Records, Users
from flsim.data.vocabulary import Layout
from flsim.runs.config import load
from flsim.runs.folder import Run

Everything = Counter[tuple[int, ...]]
USERS = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=7), max_size=9), min_size=1, max_size=9).filter(any)
PHRASES = ((20, 21, 22, 23, 24), (30, 31))


def everything(users: Users) -> Everything:
    return Counter(tuple(record.tolist()) for user in range(len(users)) for record in users[user])


def words(users: Users) -> list[int]:
    return [users[user].words for user in range(len(users))]


def assert_twins(real: Population, twin: Population) -> None:
    """The laws of what they hold."""
    assert len(real) == len(twin)
    records = everything(real)
    assert everything(twin) == records  # so copies of each canary as well
    longest = max(map(len, records))
    assert max(abs(a - b) for a, b in zip(words(real), words(twin), strict=True)) < max(longest, 1)
    assert len(real.overlay.records) == len(twin.overlay.records)
    assert Counter(real.overlay.canaries.tolist()) == Counter(twin.overlay.canaries.tolist())


@settings(max_examples=200)
@given(USERS, st.sampled_from(["probability", "copies"]), st.integers(0, 999), st.integers(1, 9))
def test_both_partitions_of_any_users_are_twins(
    users: list[list[list[int]]], how: Literal["probability", "copies"], seed: int, window: int
) -> None:
    """With canaries that are longer or shorter than what they replace; whatever the pieces that the twin is made in."""
    flat = Records.from_lists([record for user in users for record in user])
    ends = np.cumsum([0, *map(len, users)])
    split = Split(Layout(100), flat.tokens, flat.offsets, ends, Path("nowhere"))
    copies = {"probability": (None, None), "copies": (len(flat) // 2, len(flat) // 3)}[how]
    canaries = tuple(Canary(f"c{i}", phrase, 0.5, 0.5, copies[i]) for i, phrase in enumerate(PHRASES))
    planting = plant(split, canaries, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.data.records.WINDOW", window)
        twin, overlay = make_twin(split, planting, seed)
    phrases = tuple(np.array(phrase, np.uint16) for phrase in PHRASES)
    assert_twins(Population(split, phrases, planting.overlay), Population(split, phrases, overlay, twin))


def cohorts(run: Run, rounds: int) -> list[list[list[int]]]:
    """The users that each shard is asked for in each round."""
    state, training = run.latest_state(), run.federated.training_of(run.users, rounds)
    return [
        [request.users.tolist() for request in training.requests(replace(state, round=round_))]
        for round_ in range(rounds)
    ]


def create(experiment: Experiment, partition: str, *overrides: str) -> Run:
    settings = load(experiment.config, [f"data.partition={partition}", *overrides])
    return Run.create(settings, experiment.folder / partition)


@pytest.mark.parametrize("sampler", ["fixed-size", "poisson"])
def test_both_runs_ask_the_same_users_and_train_as_long(
    make_corpus: MakeCorpus, experiment: Experiment, sampler: str
) -> None:
    """Users of very different sizes, so that equal ones would show; a length in epochs, with a cap on records."""
    sizes = [[[1 + (user + record) % 30] * (1 + record % 9) for record in range(1 + 2 * user)] for user in range(16)]
    make_corpus(sizes, test=[[[1, 2]]], vocabulary_size=40, name="uneven")
    text = experiment.config.read_text().replace("rounds = 4", "epochs = 3.0")
    experiment.config.write_text(text)
    overrides = (f"data.corpus={experiment.folder}/uneven", f"training.sampler={sampler}", "local.max_records=4")
    real, twin = (create(experiment, partition, *overrides) for partition in ("non-iid", "iid"))
    assert_twins(real.users, twin.users)
    assert [canary.tokens for canary in real.canaries] == [canary.tokens for canary in twin.canaries]
    assert (real.rounds, real.rounds_per_epoch, real.population) == (
        twin.rounds,
        twin.rounds_per_epoch,
        twin.population,
    )
    asked = cohorts(real, real.rounds)
    assert asked == cohorts(twin, real.rounds)
    assert len({str(round_) for round_ in asked}) > 1
    assert [real.users[user].tokens.tolist() for user in range(16)] != [
        twin.users[user].tokens.tolist() for user in range(16)
    ]


def test_users_of_the_mean_size_are_no_twins(random_users: Callable[..., list[list[list[int]]]]) -> None:
    """That the law can fail: of users of 1 and of 9 records."""
    users = random_users(2, 9, 30)
    flat = Records.from_lists([users[0][0], *users[1]])
    split = Split(Layout(100), flat.tokens, flat.offsets, np.array([0, 1, 10]), Path("nowhere"))
    planting = plant(split, (Canary("c0", PHRASES[0], 1e-9, 1.0),), 0)
    twin, overlay = make_twin(split, planting, 0)
    phrases = (np.array(PHRASES[0], np.uint16),)
    assert_twins(Population(split, phrases, planting.overlay), Population(split, phrases, overlay, twin))
    equal = Twin(twin.order, np.array([0, 5, 10]))
    with pytest.raises(AssertionError):
        assert_twins(Population(split, phrases, planting.overlay), Population(split, phrases, overlay, equal))
