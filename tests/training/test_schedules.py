"""Schedules of learning rates against closed forms, and in local training and the server's step."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stacking import LAYOUT, model_of, random_population, start_of
from training_oracle import train_cohort

from flsim.algorithms.built_in import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import InputError
from flsim.models.architectures import ModelHParams
from flsim.training.central import CentralHParams
from flsim.training.cohort.engine import CohortEngine
from flsim.training.hparams import LocalHParams, rate_at

CLOSED: dict[str, Callable[[int, int], float]] = {
    "constant": lambda _t, _total: 1.0,
    "linear": lambda t, total: (total - t) / total,
    "cosine": lambda t, total: math.cos(math.pi * t / (2 * total)) ** 2,  # (1 + cos 2x) / 2 = cos^2 x
}
POPULATION = random_population(5, 6, LAYOUT)


def test_steps_fall_at_milestones_in_all_kinds_of_training() -> None:
    """A fraction of 0.6 is round 120 of 200, and the factor applies once more after the second milestone."""
    expected = [1.0] * 120 + [0.5] * 30 + [0.25] * 50
    both: dict[str, Any] = {"milestones": (0.6, 150.0), "milestone_factor": 0.5}
    local = LocalHParams(learning_rate=1.0, schedule="steps", **both)
    central = CentralHParams(learning_rate=1.0, schedule="steps", **both)
    server = FedAvgHParams(
        server_learning_rate=1.0, server_schedule="steps", server_milestones=(0.6, 150.0), server_milestone_factor=0.5
    )
    for rate in (local.rate, central.rate, server.server_rate):
        assert [rate(at, 200) for at in range(200)] == expected
    warm = replace(central, warmup=10)
    assert [warm.rate(at, 200) for at in range(200)] == [(at + 1) / 10 for at in range(10)] + expected[10:]
    assert LocalHParams(schedule="steps", milestones=(1,)).rate(1, 2) == pytest.approx(0.03)  # a tenth by default


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "steps"}, 'schedule "steps" needs milestones'),
        ({"milestones": (3,)}, 'schedule "constant" has no milestones'),
        ({"schedule": "steps", "milestones": (1.5,)}, "fractions of training below 1, or integers of at least 1"),
        ({"schedule": "steps", "milestones": (0,)}, "fractions of training below 1, or integers of at least 1"),
        ({"schedule": "steps", "milestones": (3,), "milestone_factor": 0.0}, "milestone_factor must be above 0"),
    ],
)
@pytest.mark.parametrize("kind", [LocalHParams, CentralHParams])
def test_milestones_that_are_none(kind: Callable[..., object], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**settings)
    with pytest.raises(InputError, match=r"server_(schedule|milestone)"):
        FedAvgHParams(**{f"server_{name}": value for name, value in settings.items()})


@given(st.sampled_from(sorted(CLOSED)), st.integers(1, 10_000), st.data(), st.floats(1e-6, 10))
def test_rates_are_those_of_the_closed_forms(name: str, total: int, data: st.DataObject, rate: float) -> None:
    """They begin at the rate, never rise, and are never negative."""
    at = data.draw(st.integers(0, total - 1))
    found = rate_at(rate, name, at, total)
    assert found == pytest.approx(rate * CLOSED[name](at, total), rel=1e-9, abs=1e-12 * rate)
    assert rate_at(rate, name, 0, total) == rate
    assert 0 <= found <= (rate_at(rate, name, at - 1, total) if at else rate)


@given(st.sampled_from(sorted(CLOSED)), st.integers(1, 50), st.integers(0, 60), st.floats(1e-6, 10))
def test_a_warmup_rises_along_a_line_and_leaves_the_rest_to_the_schedule(
    name: str, total: int, warmup: int, rate: float
) -> None:
    for step in range(total):
        expected = (
            rate * (step + 1) / warmup if step < warmup else rate_at(rate, name, step - warmup, max(total - warmup, 1))
        )
        assert rate_at(rate, name, step, total, warmup) == expected
        central = CentralHParams(learning_rate=rate, schedule=name, warmup=warmup)
        assert central.rate(step, total) == expected


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("micro_cohort", [None, 3])
def test_a_round_trains_at_its_own_rate_in_every_engine(optimizer: str, micro_cohort: int | None) -> None:
    """A round with a schedule is a round at the rate that the closed form has; to the bit in the plain engine."""
    model, hparams = model_of(0), LocalHParams(batch_size=3, learning_rate=0.5, optimizer=optimizer, schedule="cosine")
    engine = CohortEngine(start_of(model), LAYOUT, hparams, micro_cohort, rounds=4)
    for round_ in range(4):
        constant = replace(hparams, schedule="constant", learning_rate=hparams.rate(round_, 4))
        expected = train_cohort(model, POPULATION, range(5), constant, 0, round_)
        mine = train_cohort(model, POPULATION, range(5), hparams, 0, round_, rounds=4)
        stacked = engine.train(start_of(model), POPULATION, range(5), 0, round_)
        for name, value in expected.delta.items():
            assert torch.equal(mine.delta[name], value)
            torch.testing.assert_close(stacked.delta[name], value, rtol=0, atol=1e-10)


def test_training_ends_where_its_length_says() -> None:
    """The loop that a run, `flsim verify` and `flsim.simulate` share knows the length; without one it cannot be."""
    server = FedAvgHParams(cohort=3, server_schedule="cosine", rounds=99)
    local = LocalHParams(batch_size=3, schedule="linear")
    training = FederatedTraining(POPULATION, ModelHParams(3, 5), server, local, length=4)
    *_, last = training.states(training.first_state(), 4)
    state = training.first_state()
    for round_ in range(4):
        fixed = replace(
            training,
            algorithm=replace(server, server_learning_rate=server.server_rate(round_, 4), server_schedule="constant"),
            local=replace(local, learning_rate=local.rate(round_, 4), schedule="constant"),
        )
        (state,) = fixed.states(state, round_ + 1)
    assert all(torch.equal(state.params[name], value) for name, value in last.params.items())
    with pytest.raises(ValueError, match="needs the number of rounds"):
        local.rate(0, None)


OWN = """
def halves(at, total):
    return 0.5**at

def negative(at, total):
    return 1 - 2 * at

def fails(at, total):
    return {}[at]
"""


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "my_schedules.py"
    path.write_text(OWN)
    assert [rate_at(0.8, f"{path}:halves", at, 3) for at in range(3)] == [0.8, 0.4, 0.2]
    with pytest.raises(
        InputError, match=r"negative: returned the factor -1 at 1 of 3; return a finite number of at least 0"
    ):
        rate_at(0.8, f"{path}:negative", 1, 3)
    with pytest.raises(InputError, match=r"my_schedules\.py:9: KeyError: 2"):
        rate_at(0.8, f"{path}:fails", 2, 3)
    with pytest.raises(
        InputError, match="schedule must be one of constant, linear, cosine, steps, found 'exponential'"
    ):
        LocalHParams(schedule="exponential")
