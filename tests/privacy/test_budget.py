"""A run ends before the round that would exceed privacy.max_epsilon, and a resumed run does not exceed it either."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import CENTRAL, Experiment

import flsim
from flsim.base.errors import InputError
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import Entry, Ledger, PrivacyHParams, affordable_rounds, epsilon
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run

NOISY = ("training.sampler=poisson", "privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=2.0")


def spent(rounds: int, delta: float = 1 / 240) -> float:
    return epsilon(Ledger((Entry("poisson", 24, 6, 2.0, rounds),)), delta, sound_convention("poisson"))


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 40])
def test_affordable_rounds_are_the_most_within_a_budget(rounds: int) -> None:
    """The budget is equal to, just above or just below an epsilon. Expected: trying every number of rounds below 60."""

    def planned(number: int) -> Entry:
        return Entry("poisson", 24, 6, 2.0, number)

    for budget in (spent(rounds), spent(rounds) * 1.001, (spent(rounds) + spent(rounds + 1)) / 2):
        oracle = max(number for number in range(1, 60) if spent(number) <= budget)
        assert affordable_rounds(planned, 60, budget, 1 / 240) == oracle == rounds
    assert affordable_rounds(planned, rounds, spent(60), 1 / 240) == rounds
    with pytest.raises(InputError, match=r"max_epsilon 0\.1: one round has epsilon .*; raise"):
        affordable_rounds(planned, rounds, 0.1, 1 / 240)


def test_a_run_ends_within_its_budget_and_a_resume_follows_a_changed_budget(experiment: Experiment) -> None:
    budget = (spent(2) + spent(3)) / 2
    overrides = (*NOISY, f"privacy.max_epsilon={budget}", "training.rounds=9")
    run = Run.create(load_config(experiment.config, overrides), experiment.folder / "run")
    assert run.rounds == 2
    assert run.is_evaluated_at(2)
    *_, last = run.training().states(run.training().first_state(), run.rounds)
    run.save(last)
    assert run.epsilons(last)["poisson-rdp"] == spent(2) <= budget
    assert run.config.digest == load_config(experiment.config, NOISY).digest  # a setting of length, as training.rounds
    longer = load_config(experiment.config, (*NOISY, f"privacy.max_epsilon={spent(4)}", "training.rounds=9"))
    assert Run.reopen(longer, run.path).rounds == 4
    shorter = load_config(experiment.config, (*NOISY, f"privacy.max_epsilon={spent(1)}", "training.rounds=9"))
    with pytest.raises(InputError, match="2 rounds are trained already, and the settings have 1"):
        Run.reopen(shorter, run.path)


def test_a_simulation_ends_within_its_budget(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    planted = flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))
    privacy = flsim.Privacy("dp", clip=0.5, noise_multiplier=2.0, max_epsilon=spent(2))
    method = flsim.FedAvg(6, sampler="poisson", privacy=privacy, shards=1)
    states = list(flsim.simulate(planted, flsim.Model(3, 5), method, 5))
    assert [state.round for state in states] == [1, 2]
    unlimited = replace(method, privacy=replace(privacy, max_epsilon=None))
    assert len(list(flsim.simulate(planted, flsim.Model(3, 5), unlimited, 5))) == 5
    assert "training ends after round 2 of 5" in capsys.readouterr().err


def test_a_budget_needs_the_dp_mechanism_and_a_built_in_sampler(experiment: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='mechanism "clip" has no epsilon; remove max_epsilon, or use "dp"'):
        PrivacyHParams("clip", clip=0.5, max_epsilon=3.0)
    own = tmp_path / "own.py"
    own.write_text("from flsim.privacy.sampling import Poisson\nclass Mine(Poisson):\n    pass\n")
    overrides = (*NOISY, f"training.sampler={own}:Mine", "privacy.max_epsilon=3.0")
    with pytest.raises(InputError, match=r"privacy\.max_epsilon needs a built-in sampler and noise"):
        load_config(experiment.config, overrides)


def test_central_training_ends_within_its_budget(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """DP-SGD protects records: the expected epsilon is that of steps over the records of the planted corpus."""
    experiment.config.write_text(CENTRAL)
    noisy = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=2.0", "privacy.delta=1e-4")
    records = Run.create(load_config(experiment.config, noisy), experiment.folder / "unlimited").train.records

    def spent_on_records(steps: int) -> float:
        ledger = Ledger((Entry("poisson", records, 9, 2.0, steps),))
        return epsilon(ledger, 1e-4, sound_convention("poisson"))

    budget = (spent_on_records(3) + spent_on_records(4)) / 2
    run = Run.create(
        load_config(experiment.config, (*noisy, f"privacy.max_epsilon={budget}")), experiment.folder / "run"
    )
    assert run.rounds == 3
    *_, last = run.training().states(run.training().first_state(), run.rounds)
    assert (last.round, run.epsilons(last)["poisson-rdp"]) == (3, spent_on_records(3))
    assert last.ledger.rounds == 3
