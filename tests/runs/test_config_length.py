"""Length of training and times of evaluation in a configuration: rounds, steps, words or epochs."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Split
from flsim.data.vocabulary import Layout
from flsim.runs.config import (
    DataHParams,
    FederatedConfig,
    ScheduledEvaluationHParams,
    TrainingHParams,
    parse,
)
from flsim.runs.config.custom_code import refuse_other_settings


def train_split(records: int, users: int) -> Split:
    """Records of 8 words, dealt to users in equal parts."""
    tokens, offsets = np.zeros(8 * records, np.uint16), np.arange(0, 8 * records + 1, 8)
    return Split(Layout(12), tokens, offsets, np.arange(users + 1) * records // users, Path("nowhere"))


def test_epochs_of_both_kinds_are_the_same_data() -> None:
    """1,000 records of 50 users: 32 steps of 32 records; 5 rounds of 10 users; with 2 local epochs 2.5; at most 10 of a
    user's 20 records 10."""
    train, data = train_split(1_000, 50), {"corpus": "c"}
    server = {"training": {"cohort": 10, "epochs": 3}}
    central = parse({"data": data, "training": {"kind": "central", "epochs": 3}}, "x")
    assert (central.rounds_per_epoch(train), central.rounds_over(train)) == (32, 96)
    words = parse({"data": data, "training": {"kind": "central", "words": 24_000}}, "x")
    assert words.rounds_over(train) == 96
    for local, rounds, epoch in (({}, 15, 5.0), ({"epochs": 2}, 8, 2.5), ({"max_records": 10}, 30, 10.0)):
        federated = parse({"data": data, "local": local, **server}, "x")
        assert (federated.rounds_per_epoch(train), federated.rounds_over(train)) == (epoch, rounds)


def test_evaluation_at_equal_epochs() -> None:
    """An epoch is 2.5 rounds, so that two are 5. Half an epoch is 1.25 rounds, and its multiples are rounded up."""
    for every, due in ((2.0, {5, 10}), (0.5, {2, 3, 4, 5, 7, 8, 9, 10}), (0.1, set(range(1, 11)))):
        schedule = ScheduledEvaluationHParams(every_epochs=every)
        assert {round_ for round_ in range(1, 11) if schedule.is_due(round_, 2.5)} == due
    with pytest.raises(InputError, match="every_epochs must be above 0"):
        ScheduledEvaluationHParams(every_epochs=0.0)


def test_no_evaluation_a_round_before_the_last() -> None:
    """Eight epochs of 4,000 users in cohorts of 51 are 627.45 rounds. Training and the second evaluation end at 628."""
    train = train_split(16_000, 4_000)
    config = parse({"data": {"corpus": "c"}, "training": {"cohort": 51, "epochs": 8}}, "x")
    schedule, per_epoch = ScheduledEvaluationHParams(every_epochs=4.0), config.rounds_per_epoch(train)
    assert config.rounds_over(train) == 628
    assert [round_ for round_ in range(1, 629) if schedule.is_due(round_, per_epoch)] == [314, 628]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 40), st.integers(1, 40))
def test_evaluations_are_due_once_so_many_epochs_are_read(users: int, cohort: int, upper: int, lower: int) -> None:
    """Rounds that are due are the least ones by which a multiple of the epochs has been read, in exact fractions."""
    per_epoch, every = Fraction(users, cohort), Fraction(upper, lower)
    due = {math.ceil(count * every * per_epoch) for count in range(1, 101 + int(100 / (every * per_epoch)))}
    schedule = ScheduledEvaluationHParams(every_epochs=float(every))
    evaluated = {round_ for round_ in range(1, 101) if schedule.is_due(round_, float(per_epoch))}
    assert evaluated == {round_ for round_ in due if round_ <= 100}


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("evaluation", {"every": 20, "every_epochs": 2.0}, r"every_epochs \(2\) and every \(20\) both set when"),
        ("training", {"rounds": 20, "epochs": 2.0}, r"epochs \(2\) and rounds \(20\) both set how long"),
    ],
)
def test_nothing_that_is_said_twice_is_ignored(section: str, values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse({"data": {"corpus": "c"}, section: values}, "x")


def test_a_refused_length_says_what_depends_on_it(tmp_path: Path) -> None:
    """Windows in fractions would move; another setting that differs as well is told first."""
    data, windows = DataHParams(tmp_path / "corpus"), CanaryHParams(windows=((0.2, 0.5),))
    started = FederatedConfig(data, canaries=windows, training=TrainingHParams(rounds=20))
    longer = replace(started, training=TrainingHParams(rounds=30))
    words = (
        "training.rounds was 20 and is now 30 (some settings depend on the length: a schedule, canaries with times in "
        "fractions of training, or privacy.noise)"
    )
    with pytest.raises(InputError, match=re.escape(words)):
        refuse_other_settings(started, longer, tmp_path / "run")
    with pytest.raises(InputError, match=re.escape("settings: seed was 0 and is now 1; resume")):
        refuse_other_settings(started, replace(longer, seed=1), tmp_path / "run")
