"""Values that the tests of other projects expect of the same quantities, copied with their file and commit."""

import math

import numpy as np
import pytest

from flsim.privacy.accounting import rdp_of
from flsim.privacy.conventions import CONVENTIONS
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.mechanism import PrivacyHParams, next_clip
from flsim.privacy.table import calibrate

BY_NAME = {convention.name: convention for convention in CONVENTIONS}
NEARLY = 1e-12  # quantiles 0 and 1, which we refuse


def poisson(users: int, of: int, noise: float, rounds: int) -> Entry:
    return Entry("poisson", of, users, noise, rounds)


@pytest.mark.parametrize(
    ("clip", "quantile", "norms", "clips"),
    [
        (16.0, NEARLY, (5.0, 2.5), (8.0, 4.0, 4 / math.sqrt(2), 2.0, 2.0)),
        (0.5, 1 - NEARLY, (1.5, 3.0), (1.0, 2.0, 2 * math.sqrt(2), 4.0, 4.0)),
    ],
    ids=["target zero", "target one"],
)
def test_adaptive_clips_of_tensorflow_privacy(
    clip: float, quantile: float, norms: tuple[float, ...], clips: tuple[float, ...]
) -> None:
    """tensorflow/privacy at 0c27474, dp_query/quantile_adaptive_clip_sum_query_test.py, the geometric updates."""
    hparams = PrivacyHParams("clip", clip=clip, target_quantile=quantile, clip_learning_rate=math.log(2))
    for round_, expected in enumerate(clips):
        within = sum(norm <= clip + 1e-9 for norm in norms)
        clip = next_clip(clip, within, 2, hparams, 2, 0, round_)
        assert clip == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("quantile", "rate", "expected"), [(0.5, 0.1, 3.0), (0.2, 0.2, 2.825293600752746)])
def test_adaptive_clips_of_pfl(quantile: float, rate: float, expected: float) -> None:
    """apple/pfl-research at 058b537, tests/privacy/test_adaptive_clipping.py: half of 1,000 users are within 3."""
    hparams = PrivacyHParams("clip", clip=3.0, target_quantile=quantile, clip_learning_rate=rate)
    assert next_clip(3.0, 500, 1_000, hparams, 1_000, 0, 50) == pytest.approx(expected, rel=1e-15)


def test_renyi_divergences_of_dp_accounting() -> None:
    """google/differential-privacy at 0b109e9, rdp/rdp_privacy_accountant_test.py: q = 0.01, sigma = 2.5, 50 rounds.

    At order 1.5 it has 6.70579741e-4, a sum of absolute values of a series of mixed signs. The integral of Mironov et
    al. (2019), section 3, is 6.50070897e-4 in 40 digits (`test_renyi.poisson_by_integral`).
    """
    accountant = rdp_of(Ledger((poisson(1, 100, 2.5, 50),)).event("S"), BY_NAME["poisson-rdp"])
    orders = np.asarray(accountant.orders).tolist()
    for order, expected in ((1.5, 6.50070897e-4), (2.5, 1.08548710e-3), (5.0, 2.18075656e-3), (50, 2.38460375e-2)):
        assert accountant.rdp[orders.index(order)] == pytest.approx(expected, rel=1e-4)


def test_a_gaussian_of_dp_accounting() -> None:
    """As before: sigma = 4.530877117 is (1, 1e-6) over all real orders, so that ours may be a little above."""
    computed = epsilon(Ledger((poisson(10, 10, 4.530877117, 1),)), 1e-6, BY_NAME["poisson-rdp"])
    assert 1 - 1e-6 <= computed < 1.002


@pytest.mark.parametrize(
    ("entry", "delta"), [(poisson(10, 10, math.sqrt(3), 3), 0.126936), (poisson(1, 5, 0.5, 3), 0.15594)]
)
def test_losses_of_dp_accounting(entry: Entry, delta: float) -> None:
    """google/differential-privacy at 0c0e3fd, pld/pld_privacy_accountant_test.py: epsilon is 1 at these deltas."""
    assert epsilon(Ledger((entry,)), delta, BY_NAME["poisson-pld"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("convention", "rounds", "expected"),
    [
        ("poisson-rdp-opacus", 2_250, 7.32911117143),
        ("poisson-rdp", 2_250, 7.32911117143),
        ("poisson-prv-opacus", 2_249, 6.777395712150674),
    ],
)
def test_epsilons_of_opacus(convention: str, rounds: int, expected: float) -> None:
    """meta-pytorch/opacus at 3993387, opacus/tests/accountants_test.py: q = 0.04, sigma = 1.5, delta = 1e-5."""
    computed = epsilon(Ledger((poisson(4, 100, 1.5, rounds),)), 1e-5, BY_NAME[convention])
    assert computed == pytest.approx(expected, abs=1e-6 if "opacus" in convention else 0.01)


@pytest.mark.parametrize(("rounds", "expected"), [(2_250, 1.416), (2_000, 1.3562)])
def test_noise_of_opacus(rounds: int, expected: float) -> None:
    """As before, of get_noise_multiplier: epsilon 8 within 0.01, which is a thousandth of the noise."""
    computed = calibrate(poisson(4, 100, 1.0, rounds), 8.0, 1e-5, BY_NAME["poisson-rdp-opacus"])
    assert computed == pytest.approx(expected, rel=2e-3)


def test_the_examples_of_jax_privacy() -> None:
    """google-deepmind/jax_privacy at 12d6c56, jax_privacy/accounting.py: DP-SGD with q = 0.1 at delta 1e-6."""
    losses = BY_NAME["poisson-pld"]

    def spent(noise: float, rounds: int) -> float:
        return epsilon(Ledger((poisson(1, 10, noise, rounds),)), 1e-6, losses)

    assert round(spent(3.0, 512), 2) == 3.77
    assert spent(9.665, 512) < 1 < spent(9.655, 512)
    assert spent(3.0, 155) <= 2 < spent(3.0, 156)
