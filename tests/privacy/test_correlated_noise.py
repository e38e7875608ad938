"""Correlated noise: sensitivity against enumeration, epsilon against other projects, streams against dense solves."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from helpers import Experiment
from numpy.typing import NDArray

import flsim
from flsim.algorithms import checkpoint
from flsim.algorithms.checkpoint import digest_of
from flsim.base.errors import InputError
from flsim.base.extensions import made
from flsim.privacy import noise
from flsim.privacy.accounting import epsilon_of_mironov, rdp_of
from flsim.privacy.conventions import CONVENTIONS, sound_convention
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.noise import (
    blt_coefficients,
    error_of,
    inverse_square_root_coefficients,
    optimal_bands,
    optimal_blt,
    sensitivity_of_toeplitz,
    series,
    square_root_coefficients,
)
from flsim.privacy.sampling import Participation, Sampling
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run

Floats = NDArray[np.float64]
SHAPES = {"a": torch.Size([3, 2]), "b": torch.Size([2])}
BY_NAME = {convention.name: convention for convention in CONVENTIONS}
ONCE = Participation(1, 1)
PROCESSES = [
    'banded{"bands": 1, "rounds": 9}',
    'banded{"bands": 3, "rounds": 9}',
    'blt{"buffers": 1, "rounds": 9, "separation": 3, "times": 3}',
    'blt{"buffers": 3, "rounds": 9, "separation": 3, "times": 3}',
    "tree",
    'banded-inverse{"bands": 1}',
    'banded-inverse{"bands": 4}',
]


def process(name: str, seed: int = 0, shapes: dict[str, torch.Size] | None = None) -> noise.Correlated:
    kind = noise.noise_class(name)
    assert issubclass(kind, noise.Correlated)
    return made(name, kind, seed, SHAPES if shapes is None else shapes)


def by_enumeration(matrix: Floats, participation: Participation) -> float:
    """Return the largest norm of a sum of columns (entries >= 0) over all rounds in which a user may take part."""
    rounds, largest = len(matrix), 0.0
    for size in range(1, participation.times + 1):
        for taken in itertools.combinations(range(rounds), size):
            if (np.diff(taken) >= participation.separation).all():
                largest = max(largest, float(np.linalg.norm(matrix[:, list(taken)].sum(1))))
    return largest


def drawn(name: str, rounds: int, seed: int = 0, shapes: dict[str, torch.Size] | None = None) -> Floats:
    """Return the noise of all rounds as a stream draws it, float64 [rounds, values]."""
    like = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in (shapes or SHAPES).items()}
    slots, flat = noise.init(name, seed, like), []
    for round_ in range(rounds):
        values, slots = noise.step(name, seed, like, slots, round_)
        flat.append(np.concatenate([values[key].numpy().ravel() for key in sorted(values)]))
    return np.stack(flat)


@pytest.mark.parametrize(
    ("rounds", "times", "separation", "squared"), [(8, 9, 3, 7.429065), (8, 2, 2, 4.989845), (9, 9, 4, 6.460104)]
)
def test_sensitivity_of_the_square_root(rounds: int, times: int, separation: int, squared: float) -> None:
    """Sensitivity equals the enumeration, and jax_privacy 2.0.0: get_min_sep_sensitivity_upper_bound (of
    matrix_factorization.sensitivity) of toeplitz.optimal_max_error_strategy_coefs(rounds), materialized."""
    coefficients, participation = square_root_coefficients(rounds), Participation(times, separation)
    found = sensitivity_of_toeplitz(coefficients, participation)
    assert found**2 == pytest.approx(squared, abs=1e-6)
    dense = np.array([[coefficients[i - j] if i >= j else 0 for j in range(rounds)] for i in range(rounds)])
    assert by_enumeration(dense, replace(participation, times=min(times, rounds))) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(("rounds", "loss"), [(100, 2.5314), (7_840, 3.9205)])
def test_losses_of_the_square_root(rounds: int, loss: float) -> None:
    """Error and squared sensitivity are both sum c_i^2 (Fichtenberger, Henzinger and Upadhyay, 2023)."""
    coefficients, inverse = square_root_coefficients(rounds), inverse_square_root_coefficients(rounds)
    assert math.sqrt(error_of(inverse)) * np.linalg.norm(coefficients) == pytest.approx(loss, abs=1e-3)
    assert np.square(coefficients).sum() == pytest.approx(loss, abs=1e-3)
    assert inverse[:5].tolist() == [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]  # jax_privacy's test of BISR


@pytest.mark.parametrize(("rounds", "bands", "loss"), [(100, 4, 5.32476445103614), (200, 16, 4.302031853793786)])
def test_optimal_bands_are_those_of_google(rounds: int, bands: int, loss: float) -> None:
    """In jax_privacy 2.0.0, the root of (jnp.cumsum(toeplitz.inverse_coef(c, rounds))**2).sum() * (c**2).sum() is the
    loss; c = toeplitz.optimize_banded_toeplitz(rounds, bands, max_optimizer_steps=1000, reduction_fn=jnp.max)."""
    coefficients = np.array(optimal_bands(rounds, bands))
    error = error_of(series(np.ones(1), coefficients, rounds))
    assert math.sqrt(error) * np.linalg.norm(coefficients) == pytest.approx(loss, rel=1e-6)
    assert coefficients[0] == 1


def test_more_buffers_than_can_be_optimized_are_refused() -> None:
    with pytest.raises(InputError, match="buffers must be at most 16, found 1,000"):
        made('blt{"buffers": 1000, "rounds": 9, "separation": 3, "times": 3}', noise.BufferedToeplitz, 0, {})


@pytest.mark.parametrize(
    ("rounds", "buffers", "times", "separation", "loss"),
    [
        (100, 2, 1, 100, 2.53652289233209),
        (1_000, 2, 1, 1_000, 3.3212617376501115),
        (1_000, 3, 10, 100, 14.884258152741554),
    ],
)
def test_optimal_buffers_are_those_of_google(
    rounds: int, buffers: int, times: int, separation: int, loss: float
) -> None:
    """The loss equals that of jax_privacy 2.0.0: the root of (jnp.cumsum(toeplitz.inverse_coef(c, rounds))**2).sum() *
    toeplitz.minsep_sensitivity_squared(c, separation, times, rounds). There c is blt.toeplitz_coefs(rounds), and blt is
    buffered_toeplitz.optimize(n=rounds, min_sep=separation, max_participations=times, min_buffers=buffers,
    max_buffers=buffers)."""
    scales, decays = (np.array(values) for values in optimal_blt(rounds, buffers, times, separation))
    coefficients, inverse = blt_coefficients(scales, decays, rounds)
    sensitivity = sensitivity_of_toeplitz(coefficients, Participation(times, separation))
    assert math.sqrt(error_of(inverse)) * sensitivity == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("participation", [ONCE, Participation(2, 3), Participation(3, 3), Participation(2, 4)])
@pytest.mark.parametrize("rounds", [1, 5, 9])
def test_sensitivity_is_that_of_enumeration(name: str, participation: Participation, rounds: int) -> None:
    """Sensitivity of the first rounds equals enumeration; with repeats, that of trees and bands is an upper bound."""
    noisy = process(name)
    if getattr(noisy, "bands", 0) > participation.separation and name.startswith("banded{"):
        with pytest.raises(InputError, match="bands must be at most 1, because a user can take part again"):
            noisy.sensitivity(rounds, participation)
        return
    expected = by_enumeration(noisy.matrix(rounds), participation)
    found = noisy.sensitivity(rounds, participation)
    assert found >= expected * (1 - 1e-12)
    is_banded = name.startswith("banded{")  # counts k rounds, although fewer may fit into the first rounds
    is_exact = participation.times == 1 or not (name == "tree" or is_banded)
    assert not is_exact or found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", PROCESSES)
def test_streamed_noise_equals_a_dense_solve(name: str) -> None:
    noisy, rounds = process(name), 20
    fresh = [noisy.fresh(round_) for round_ in range(rounds)]
    independent = np.stack([np.concatenate([one[key].numpy().ravel() for key in sorted(one)]) for one in fresh])
    np.testing.assert_allclose(drawn(name, rounds), np.linalg.solve(noisy.matrix(rounds), independent), atol=1e-10)
    assert (np.triu(noisy.matrix(rounds), 1) == 0).all()
    assert (np.diag(noisy.matrix(rounds)) == 1).all()


@pytest.mark.parametrize(("multiplier", "expected"), [(1.0, 5.3493), (5.0, 0.9318), (7 / 3, 2.1073)])
def test_epsilon_without_amplification_is_that_of_one_gaussian_mechanism(multiplier: float, expected: float) -> None:
    """Noise / sensitivity is the multiplier. Expected: dp_accounting's exact Gaussian mechanism at delta 1e-7."""
    sampler, name = 'min-separation{"separation": 3}', 'blt{"buffers": 2, "rounds": 9, "separation": 3, "times": 3}'
    sensitivity = process(name).sensitivity(9, Participation(3, 3))
    entry = Entry(sampler, 30, 5, multiplier * sensitivity, 9, name)
    spent = epsilon(Ledger((entry,)), 1e-7, BY_NAME["min-separation-zero-out-pld"])
    assert spent == pytest.approx(expected, abs=2e-4)
    assert entry.event("2S") == GaussianDpEvent(multiplier * sensitivity / 2 / sensitivity)


@pytest.mark.parametrize(("multiplier", "published"), [(1.13, 19.74), (8.83, 2.04)])
def test_epsilon_of_a_tree_of_tensorflow_privacy(multiplier: float, published: float) -> None:
    """Epsilon equals that of test_compute_eps_tree in tensorflow/privacy, analysis/tree_aggregation_accountant_test.py:
    1,600 rounds, each user once, delta 1e-6. This source converts Renyi DP with Mironov's Proposition 3."""
    entry = Entry("round-robin", 1_600, 1, multiplier, 1_600, "tree")
    assert process("tree").sensitivity(1_600, ONCE) ** 2 == pytest.approx(11)
    spent = epsilon_of_mironov(rdp_of(entry.event("S"), BY_NAME["round-robin-zero-out-rdp"]), 1e-6)
    assert spent == pytest.approx(published, abs=0.01)


def test_bands_are_amplified_by_sampling_within_groups() -> None:
    """The event is that of jax_privacy's accounting.amplified_bandmf_event: ceil(n / b) Poisson rounds at rate b q."""
    name, sampler = 'banded{"bands": 3, "rounds": 10}', 'cyclic-poisson{"separation": 4}'
    column = float(np.linalg.norm(optimal_bands(10, 3)))
    entry = Entry(sampler, 400, 20, 1.5, 10, name)
    assert entry.event("S") == SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(1.5 / column)), 3)
    alike = Entry('min-separation{"separation": 4}', 400, 20, 1.5, 10, name)
    assert alike.event("S") == SelfComposedDpEvent(GaussianDpEvent(1.5 / column), 3)
    spent = [
        epsilon(Ledger((one,)), 1e-5, sound_convention(of))
        for one, of in ((entry, "cyclic-poisson"), (alike, "min-separation"))
    ]
    assert spent[0] < spent[1] / 2


def test_independent_noise_costs_one_mechanism_for_each_round_of_a_user() -> None:
    """With 5 of 30 users in turn, each user takes part in 2 of 12 rounds, and some users in 3 of 13 rounds."""
    for rounds, times in ((1, 1), (12, 2), (13, 3)):
        entry = Entry("round-robin", 30, 5, 2.0, rounds)
        assert entry.event("S") == SelfComposedDpEvent(GaussianDpEvent(2.0), times)


@pytest.mark.parametrize("sampler", ["fixed-size", "poisson"])
@pytest.mark.parametrize("name", ["tree", *PROCESSES[1:4]])
def test_noise_and_a_sampler_that_do_not_fit_are_refused(sampler: str, name: str) -> None:
    with pytest.raises(InputError, match="does not limit how often a user takes part"):
        Entry(sampler, 30, 5, 1.0, 9, name).event("S")


def test_settings_that_change_between_rounds_are_refused() -> None:
    one = Entry("round-robin", 30, 5, 1.0, 4, "tree")
    with pytest.raises(InputError, match='noise "tree": settings changed between rounds'):
        Ledger((one, replace(one, noise_multiplier=2.0))).event("S")
    assert Ledger((one, replace(one, rounds=3))).entries[0].noise == "tree"
    assert Ledger((one,)).record(replace(one, rounds=3)).entries == (replace(one, rounds=7),)


def test_the_name_of_noise_has_all_settings_that_the_noise_depends_on() -> None:
    sampling = Sampling('min-separation{"separation": 10}', 200, 5)
    assert noise.settled('banded{"bands": 4}', sampling, 30) == 'banded{"bands": 4, "rounds": 30}'
    blt = noise.settled('blt{"buffers": 2}', sampling, 35)
    assert json.loads(blt[3:]) == {"buffers": 2, "rounds": 35, "times": 4, "separation": 10}
    assert noise.settled("tree", sampling, 30) == "tree"
    entry = Entry(sampling.sampler, 200, 5, 1.0, 7, blt)
    assert Ledger.from_json(Ledger((entry,)).to_json()) == Ledger((entry,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": "banded"}, 'noise "banded" has bands, found none'),
        ({"noise": "banded", "noise_options": {"bands": 2, "rounds": 9}}, "has bands, found bands, rounds"),
        ({"noise": "blt", "noise_options": {"buffers": 1.5}}, "buffers must be an integer, found 1.5"),
        ({"noise": "tree", "target_quantile": 0.5}, "an adaptive clip needs independent noise"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flsim.Privacy("dp", clip=0.5, noise_multiplier=1.0, **settings)  # type: ignore[arg-type]


MODEL = flsim.Model(3, 5)


def planted(experiment: Experiment) -> flsim.Planted:
    return flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))


def fedavg(name: str, sampler: str = "min-separation", **options: object) -> flsim.FedAvg:
    privacy = flsim.Privacy("dp", clip=0.5, noise_multiplier=1.0, noise=name, noise_options=options)
    groups = {"separation": 4} if sampler in ("min-separation", "cyclic-poisson") else {}
    return flsim.FedAvg(5, sampler=sampler, sampler_options=groups, privacy=privacy, shards=1)


def test_the_identity_matrix_is_dp_fedavg_bit_for_bit(experiment: Experiment) -> None:
    users = planted(experiment)
    for sampler in ("min-separation", "round-robin", "cyclic-poisson"):
        states = [
            list(flsim.simulate(users, MODEL, method, 6))
            for method in (fedavg("independent", sampler), fedavg("banded", sampler, bands=1))
        ]
        for one, other in zip(*states, strict=True):
            assert all(torch.equal(value, other.params[name]) for name, value in one.params.items())
        assert flsim.epsilon(states[0][-1]) == pytest.approx(flsim.epsilon(states[1][-1]), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [("banded", "{bands = 4}"), ("blt", "{buffers = 2}"), ("tree", "{}"), ("banded-inverse", "{bands = 3}")],
)
def test_a_run_resumes_to_the_same_bits(experiment: Experiment, name: str, options: str) -> None:
    overrides = (
        *("training.rounds=7", "training.sampler=min-separation", "training.sampler_options={separation = 4}"),
        *("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=1.0", f"privacy.noise={name}"),
        f"privacy.noise_options={options}",
    )
    run = Run.create(load_config(experiment.config, overrides), experiment.folder / "run")
    whole = list(run.training().states(run.training().first_state(), 7))
    resumed = run.load(run.save(whole[3]))
    again = list(Run.open(run.path).training().states(resumed, 7))
    assert [digest_of(state) for state in again] == [digest_of(state) for state in whole[4:]]
    (entry,) = whole[-1].ledger.entries
    assert entry.rounds == 7
    loaded, _ = checkpoint.load(run.save(whole[-1]))
    assert run.epsilons(loaded) == run.epsilons(whole[-1])
    (spent,) = run.epsilons(loaded).values()
    assert 0 < spent < math.inf


def test_noise_and_sampling_that_do_not_fit_are_refused_before_training(experiment: Experiment) -> None:
    users = planted(experiment)
    for method, message in (
        (fedavg("blt", "poisson", buffers=2), "does not limit how often a user takes part"),
        (fedavg("banded", bands=5), "bands must be at most 4, because a user can take part again"),
        (replace(fedavg("tree"), cohort=7), "separation of 4 allows cohorts of at most 6 of the 24 users, found 7"),
    ):
        with pytest.raises(InputError, match=message):
            flsim.simulate(users, MODEL, method, 6)
