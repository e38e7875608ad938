"""Audits refute the broken mechanisms of `benchmarks.detection`, and tests of rounds compare rounds with their laws."""

from pathlib import Path

import numpy as np
import pytest
import torch

import flsim
from benchmarks import detection
from benchmarks.detection import MECHANISMS, audited, clip_of_each_layer, own, planted_in, without_clip
from flsim.attacks.audit.rounds import independence, participation
from flsim.privacy.ledger import Entry, Ledger
from flsim.runs.simulation import Planted
from flsim.training.update import global_norm, with_canaries

LIKE = {"weights": torch.zeros(50, 20), "bias": torch.zeros(20)}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_in(tmp_path_factory.mktemp("detection"))


def ledger(sampler: str = "poisson", noise: str = "independent", population: int = 400, rounds: int = 20) -> Ledger:
    return Ledger((Entry(sampler, population, 40, 2.0, rounds, noise),))


def test_a_run_without_a_clip_refutes_its_ledger(planted: Planted) -> None:
    """Without a clip, a canary user's update is 10 clip norms long: more guesses are right than the ledger allows."""
    refuted = audited(MECHANISMS["no clip"], planted, 100, 0)
    assert refuted == {"canary users": True, "participation": False, "noise": False}


def test_canary_users_pass_through_the_clip_of_real_users() -> None:
    """A clip per layer clips each of two tensors to S, and their length is S sqrt(2); without a clip, it is 10 S."""
    zero = {name: value.double() for name, value in LIKE.items()}
    lengths = [global_norm(with_canaries(zero, np.array([3]), 0, 0.5))]
    for change in (clip_of_each_layer, without_clip):
        with change():
            lengths.append(global_norm(with_canaries(zero, np.array([3]), 0, 0.5)))
    assert lengths == pytest.approx([0.5, 0.5 * 2**0.5, 5.0], rel=1e-9)
    assert global_norm(with_canaries(zero, np.array([3]), 0, 0.5)) == pytest.approx(0.5), "the clip is back"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("one cohort of a fixed seed", "participation"),
        ("one user counted 50 times", "participation"),
        ("a fixed size stated as Poisson sampling", "participation"),
        ("the same noise in every round", "noise"),
        ("noise divided by the square root of the cohort", "noise"),
    ],
)
def test_tests_of_rounds_refute_the_ledgers_of_broken_mechanisms(name: str, method: str, planted: Planted) -> None:
    mechanism = MECHANISMS[name]
    spent = ledger(mechanism.sampler, mechanism.noise)
    drawn, noise = participation(spent, 0, executes_code=True), independence(spent, 0, LIKE, executes_code=True)
    assert drawn is not None
    assert noise is not None
    assert {"participation": drawn.p_value < 1e-4, "noise": noise.p_value < 1e-4} == {
        "participation": method == "participation",
        "noise": method == "noise",
    }


@pytest.mark.parametrize("sampler", ["poisson", "fixed-size"])
@pytest.mark.parametrize(("population", "rounds"), [(60, 4), (400, 20)])
def test_honest_rounds_are_refuted_in_at_most_5_percent(sampler: str, population: int, rounds: int) -> None:
    """More than 33 refutations in 400 seeds have a probability below 0.3%, if each has probability 5%."""
    spent = ledger(sampler, population=population, rounds=rounds)
    tests = [participation(spent, seed, executes_code=False) for seed in range(400)]
    assert sum(test is not None and test.p_value < 0.05 for test in tests) <= 33
    assert None not in tests


def test_honest_noise_is_refuted_in_at_most_5_percent() -> None:
    """The limit for 400 seeds is derived in the test above."""
    tests = [independence(ledger(rounds=5), seed, LIKE, executes_code=False) for seed in range(400)]
    assert sum(test is not None and test.p_value < 0.05 for test in tests) <= 33


def test_custom_code_of_a_run_folder_is_not_executed_and_changing_settings_have_no_law() -> None:
    assert participation(ledger(own("FixedCohort")), 0, executes_code=False) is None
    assert independence(ledger(noise=own("SameEveryRound")), 0, LIKE, executes_code=False) is None
    changed = Ledger((*ledger().entries, Entry("poisson", 400, 20, 2.0, 5)))
    assert participation(changed, 0, executes_code=True) is None


def test_an_audit_of_a_simulation_has_the_tests_of_rounds(planted: Planted) -> None:
    algorithm = flsim.FedAvg(
        40, sampler=own("FixedCohort"), privacy=flsim.Privacy("dp", clip=0.5, noise_multiplier=2.0), shards=1
    )
    *_, last = flsim.simulate(planted, detection.MODEL, algorithm, 3)
    table = flsim.audit_simulation(last, planted, detection.MODEL, algorithm)
    rows = {row["method"]: row for row in table.to_dict("records")}
    assert rows["participation"]["refuted"]
    assert rows["participation"]["p_value"] < 1e-4
    assert not rows["noise"]["refuted"]
    assert rows["noise"]["n_in"] == 3


CORRELATED = 'banded{"bands": 3, "rounds": 20}'
CLAIMING_TOO_MUCH = """
from flsim.privacy.noise import BandedToeplitz, Skellam
from flsim.privacy.sampling import MinSeparation


class Half(Skellam):
    def integers(self, noise_multiplier, round_):
        return super().integers(noise_multiplier / 2, round_)


class Uncorrelated(BandedToeplitz):
    def next(self, state, round_):
        return self.fresh(round_), state


class Transposed(BandedToeplitz):
    def next(self, state, round_):
        after = self.fresh(round_ + 1)
        noise = {name: value - self.coefficients[1] * after[name] for name, value in self.fresh(round_).items()}
        return noise, state


class TwoGroups(MinSeparation):
    def draw(self, seed, round_, population):
        return super().draw(seed, round_ % 2, population)
"""


@pytest.fixture
def claiming(tmp_path: Path) -> Path:
    path = tmp_path / "claiming.py"
    path.write_text(CLAIMING_TOO_MUCH)
    return path


@pytest.mark.parametrize("noise", [CORRELATED, "tree", 'blt{"buffers": 2, "rounds": 20, "separation": 4, "times": 5}'])
def test_honest_correlated_noise_and_turns_are_not_refuted(noise: str) -> None:
    """Each of the two tests refutes honest mechanisms with probability 5%; the seed is fixed."""
    spent = ledger('min-separation{"separation": 4}', noise)
    drawn, tested = participation(spent, 0, executes_code=False), independence(spent, 0, LIKE, executes_code=False)
    assert drawn is not None
    assert tested is not None
    assert drawn.p_value == 1
    assert drawn.stated == "at most 5 rounds of a user, at least 4 rounds apart"
    assert tested.p_value > 0.05


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Uncorrelated", '"bands": 3, "rounds": 20'),
        ("Transposed", '"bands": 3, "rounds": 20'),
        ("Half", '"bits": 30, "steps": 1000'),
    ],
)
def test_noise_of_another_law_than_the_ledger_states_is_refuted(claiming: Path, name: str, options: str) -> None:
    """A test of noise refutes noise of another matrix, and noise with half of the standard deviation."""
    spent = ledger('min-separation{"separation": 4}', f"{claiming}:{name}{{{options}}}")
    tested = independence(spent, 0, LIKE, executes_code=True)
    assert tested is not None
    assert tested.p_value < 1e-4


def test_users_who_take_part_more_often_than_stated_are_refuted(claiming: Path) -> None:
    """Only two of the four stated groups take turns; therefore, a user takes part in every other round."""
    spent = ledger(f'{claiming}:TwoGroups{{"separation": 4}}', CORRELATED)
    drawn = participation(spent, 0, executes_code=True)
    assert drawn is not None
    assert drawn.p_value == 0


@pytest.mark.parametrize("steps", [1, 1_000])
def test_honest_skellam_noise_is_refuted_in_at_most_5_percent(steps: int) -> None:
    """The limit for 400 seeds is as above. With 1 step, the noise has standard deviation 2, and is far from normal."""
    spent = ledger('min-separation{"separation": 4}', f'skellam{{"bits": 30, "steps": {steps}}}', rounds=3)
    tests = [independence(spent, seed, LIKE, executes_code=False) for seed in range(400)]
    assert sum(test is not None and test.p_value < 0.05 for test in tests) <= 33
    assert None not in tests
