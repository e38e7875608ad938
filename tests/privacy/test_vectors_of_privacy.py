"""Privacy at inputs whose values follow from definitions: closed forms of Gaussian noise, and loops."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from custom_code import CODE
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from scipy.stats import norm

from flsim.base.errors import Diverged, InputError
from flsim.base.rng import stream
from flsim.privacy import accounting, ledger, sampling, table
from flsim.privacy.accounting import check_delta
from flsim.privacy.conventions import CONVENTIONS, SENSITIVITY, conventions_of, sound_convention
from flsim.privacy.ledger import (
    EPSILONS,
    AuditHParams,
    Entry,
    Ledger,
    PrivacyHParams,
    delta_curve,
    epsilon,
    next_clip,
    noisy_mean,
    spent,
)
from flsim.training.update import with_canaries

BY_NAME = {convention.name: convention for convention in CONVENTIONS}


def tight(rdp_at_1: float, delta: float, orders: Sequence[float]) -> float:
    """Return epsilon of Renyi divergences a x rdp_at_1 (Canonne, Kamath and Steinke, 2020, Proposition 12)."""
    return min(a * rdp_at_1 + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(3.0, 4, 1e-3), (8.0, 10, 1e-5)])
def test_rounds_of_all_users_are_gaussian_mechanisms(noise: float, rounds: int, delta: float) -> None:
    """The divergence of order a is a D^2 T / (2 z^2), D = 1 for S and 2 for 2S (Mironov, 2017, Proposition 7)."""
    ledger = Ledger((Entry("fixed-size", 40, 40, noise, rounds),))
    orders = accounting.ORDERS.tolist()
    for name, distance in (("paper-tight", 1), ("replace-one-rdp", 2)):
        expected = tight(distance**2 * rounds / 2 / noise**2, delta, orders)
        assert epsilon(ledger, delta, BY_NAME[name]) == pytest.approx(expected, rel=1e-6)
    loose = min(a * rounds / 2 / noise**2 + math.log(1 / delta) / (a - 1) for a in orders)
    assert epsilon(ledger, delta, BY_NAME["paper"]) == pytest.approx(loose, rel=1e-6)


def test_losses_of_gaussian_noise_are_tabulated_up_to_an_epsilon_of_100() -> None:
    """The limit is on epsilon from RDP. The expected delta of one release is in Balle and Wang (2018), Theorem 8."""
    convention, orders = BY_NAME["poisson-pld"], accounting.ORDERS.tolist()
    for sigma in (2.0, 0.7):
        found = accounting.epsilon_of(GaussianDpEvent(sigma), 1e-3, convention)
        below, above = (
            norm.sf(at * sigma - 1 / 2 / sigma) - math.exp(at) * norm.sf(at * sigma + 1 / 2 / sigma)
            for at in (found, found - 1e-3)
        )
        assert below <= 1e-3 <= above
    assert accounting.epsilon_of(NonPrivateDpEvent(), 1e-3, convention) == math.inf
    for limit in (99.0, 101.0):
        sigma = scipy.optimize.brentq(lambda sigma: tight(1 / 2 / sigma**2, 1e-3, orders) - limit, 0.01, 1)  # noqa: B023
        if limit < 100:
            assert accounting._check_size(GaussianDpEvent(sigma), 1e-3, convention) == pytest.approx(limit)
        else:
            with pytest.raises(InputError, match="losses are tabulated up to epsilon 100, and RDP computes 101 here"):
                accounting.epsilon_of(GaussianDpEvent(sigma), 1e-3, convention)


def test_epsilon_of_mironov_is_the_least_over_orders() -> None:
    """Mironov (2017), Proposition 3, gives ln 100 at order 2 and 0.3 + ln(100) / 8 at order 9, which is less."""
    rdp = np.select([accounting.ORDERS == 2, accounting.ORDERS == 9], [0.0, 0.3], math.inf)
    assert accounting.epsilon_of_mironov(rdp, 0.01) == pytest.approx(0.3 + math.log(100) / 8)
    assert accounting.epsilon_of_mironov(np.zeros_like(rdp), 0.01) == 0


def test_sensitivities_of_relations() -> None:
    assert SENSITIVITY == {"replace-one": "2S", "add-or-remove-one": "S", "zero-out": "S"}
    assert [one.name for one in CONVENTIONS if not one.is_sound] == ["paper", "paper-tight"]
    assert sound_convention("fixed-size").name == "replace-one-rdp"
    assert sound_convention("poisson").name == "poisson-rdp"
    assert sound_convention("round-robin").name == "round-robin-zero-out-rdp"
    assert [one.name for one in conventions_of("with-replacement")] == ["with-replacement-rdp", "with-replacement-pld"]


def test_an_unknown_relation_of_a_custom_sampler_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE["sampler"].replace("replace-one", "zero_out"))
    with pytest.raises(InputError, match=r"own.py:Turns: relation must be one of replace-one, .*found 'zero_out'"):
        conventions_of(f"{tmp_path}/own.py:Turns")


def test_curves_have_steps_of_a_twentieth_up_to_10_and_of_a_half_up_to_60() -> None:
    assert sound_convention("fixed-size").relation == "replace-one"
    expected = [*(step / 20 for step in range(200)), *(step / 2 for step in range(20, 121))]
    assert EPSILONS.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("noise", [2.0, 6.0])
def test_curves_of_delta_invert_epsilon(noise: float) -> None:
    """Epsilon at the delta of a point of the curve is that point. Without noise, every delta is 1."""
    ledger, convention = Ledger((Entry("fixed-size", 40, 40, noise, 1),)), BY_NAME["replace-one-rdp"]
    deltas = delta_curve(ledger, convention)
    assert len(deltas) == len(EPSILONS)
    between = [place for place in range(len(deltas)) if 1e-12 < deltas[place] < 0.1][::10]
    assert len(between) > 3
    for place in between:
        assert epsilon(ledger, float(deltas[place]), convention) == pytest.approx(EPSILONS[place], rel=1e-3)
    assert ((deltas >= 0) & (deltas <= 1)).all()
    bare = delta_curve(Ledger((Entry("fixed-size", 40, 40, 0.0, 1),)), convention)
    assert (bare == 1).all()


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 1.5])
def test_deltas_at_the_ends_are_refused(delta: float) -> None:
    with pytest.raises(InputError, match="delta must be above 0 and below 1"):
        check_delta(delta)


def test_brackets_outside_the_range_are_refused() -> None:
    with pytest.raises(InputError, match="nothing at this delta"):
        table._bracket(lambda at: 1.0, 0.0, "nothing")
    low, high = table._bracket(lambda at: 13.0 - at, 0.0, "nothing")  # e^13 is within 2^20
    assert low <= 13 <= high
    with pytest.raises(InputError, match="nothing at this delta"):
        table._bracket(lambda at: 30.0 - at, 0.0, "nothing")


def adaptive(**settings: float) -> PrivacyHParams:
    return PrivacyHParams(
        **{"mechanism": "dp", "clip": 0.5, "noise_multiplier": 1.0, "target_quantile": 0.7} | settings  # type: ignore[arg-type]
    )


def test_the_next_clip_follows_the_noisy_share() -> None:
    """Expected: Andrew et al. (2021), Algorithm 1, with counts of +-1/2. The default sigma_b is cohort / 20."""
    hparams = adaptive(clip_learning_rate=0.3)
    noise = stream(7, "count noise", 3).normal(0.0, 40 / 20)
    share = (11 * 0.5 - (30 - 11) * 0.5 + noise) / 40 + 0.5
    assert next_clip(0.5, 11, 30, hparams, 40, 7, 3) == pytest.approx(0.5 * math.exp(-0.3 * (share - 0.7)), rel=1e-12)
    noise = stream(7, "count noise", 3).normal(0.0, 5.0)
    share = (11 * 0.5 - (30 - 11) * 0.5 + noise) / 40 + 0.5
    found = next_clip(0.5, 11, 30, adaptive(count_noise=5.0), 40, 7, 3)
    assert found == pytest.approx(0.5 * math.exp(-0.2 * (share - 0.7)), rel=1e-12)
    with pytest.raises(Diverged, match="round 4: the adaptive clip is "):
        next_clip(0.5, 11, 30, adaptive(count_noise=1e5), 2, 7, 3)
    clip = PrivacyHParams(mechanism="clip", clip=0.5, target_quantile=0.7)
    assert next_clip(0.5, 11, 30, clip, 40, 7, 3) == pytest.approx(
        0.5 * math.exp(-0.2 * ((11 - 15) / 40 + 0.5 - 0.7)), rel=1e-12
    )
    assert next_clip(0.5, 11, 30, PrivacyHParams(mechanism="clip", clip=0.5), 40, 7, 3) == 0.5


def test_the_noise_of_updates_and_count_together_is_z() -> None:
    """z_Delta^-2 + (2 sigma_b)^-2 = z^-2 (Andrew et al., 2021, Theorem 1)."""
    for z, sigma in ((1.0, 2.0), (3.0, 1.6), (0.5, 10.0)):
        found = adaptive(noise_multiplier=z, count_noise=sigma).update_noise_multiplier(100)
        assert found**-2 + (2 * sigma) ** -2 == pytest.approx(z**-2, rel=1e-12)
    with pytest.raises(InputError, match=r"raise it above 0\.5"):
        adaptive(count_noise=0.5).update_noise_multiplier(100)
    assert PrivacyHParams("dp", 0.5, 2.0).update_noise_multiplier(100) == 2.0
    assert PrivacyHParams("dp", 0.5, 2.0).delta_for(50) == 1 / 500
    assert PrivacyHParams("dp", 0.5, 2.0, delta=0.01).delta_for(50) == 0.01


def test_means_have_noise_of_z_s() -> None:
    total, noise = {"w": torch.tensor([3.0, -1.0]).double()}, {"w": torch.tensor([0.5, 2.0]).double()}
    found = noisy_mean(total, 0.4, PrivacyHParams("dp", 0.4, 1.5), 8, noise)["w"].tolist()
    assert found == pytest.approx([(3 + 0.6 * 0.5) / 8, (-1 + 0.6 * 2) / 8])
    assert noisy_mean(total, 0.4, PrivacyHParams("clip", 0.4), 8)["w"].tolist() == [3 / 8, -1 / 8]


@pytest.mark.parametrize("has_coins", [False, True])
def test_more_canary_users_than_users_have_several_populations(has_coins: bool) -> None:
    """25 canary users and 10 users give three virtual populations, the last of which has 5 canary users."""
    settings = AuditHParams(25, has_coins)
    present = settings.present(3)
    tosses = [stream(3, "update canary coin", canary).random() < 0.5 for canary in range(25)]
    assert present.tolist() == (tosses if has_coins else [True] * 25)
    seen = set()
    for round_ in range(40):
        expected = []
        for copy, first in enumerate((0, 10, 20)):
            seed = int(stream(3, "update canary cohorts", copy).integers(2**62))
            drawn = sampling.draw_cohort(seed, round_, 10, 4, "fixed-size") + first
            expected += [user for user in drawn.tolist() if user < 25 and present[user]]
        found = settings.drawn(3, round_, 10, 4, "fixed-size").tolist()
        assert found == expected
        seen |= {*found}
    assert seen == {*np.flatnonzero(present).tolist()}
    assert AuditHParams().drawn(3, 0, 10, 4, "fixed-size").tolist() == []


def test_canary_vectors_and_their_cosines() -> None:
    like = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    vector, norm = ledger.direction(1, 2, like)
    flat = torch.cat([vector["a"].flatten(), vector["b"]]).double().numpy()
    assert norm == pytest.approx(np.sqrt((flat**2).sum()), rel=1e-9)
    total = {name: torch.ones_like(value).double() for name, value in like.items()}
    found = with_canaries(total, np.array([2, 2]), 1, 0.3)
    added = torch.cat([found["a"].flatten(), found["b"]]).numpy() - 1
    assert added == pytest.approx(2 * 0.3 * flat / norm, rel=1e-6)
    change = {name: torch.arange(1.0, value.numel() + 1).view(value.shape) for name, value in like.items()}
    line = torch.cat([change["a"].flatten(), change["b"]]).double().numpy()
    cosine = float(line @ flat / np.linalg.norm(line) / norm)
    assert ledger.cosines(change, 1, range(2, 4))[0] == pytest.approx(cosine, rel=1e-9)
    zero = {name: torch.zeros_like(value) for name, value in like.items()}
    assert ledger.cosines(zero, 1, range(2)).tolist() == [0, 0]


def test_sizes_and_probabilities_of_samplers() -> None:
    assert sampling.Poisson(3).sizes(20) == (0, 20)
    assert sampling.FixedSize(3).sizes(20) == (3, 3)
    event = sampling.Sampling("poisson", 20, 3)(Entry("poisson", 20, 3, 1.0, 1).event("S"))
    assert event.sampling_probability == 3 / 20
    drawn = sampling.Poisson(3).draw(2, 1, 20)
    assert drawn.tolist() == np.flatnonzero(stream(2, "poisson-cohort", 1).random(20) < 0.15).tolist()
    sampling.check_cohort(20, 20, "poisson")
    sampling.check_cohort(20, 1, "poisson")


@pytest.mark.parametrize(("sigma", "rate"), [(4.0, 0.2), (20.0, 0.05)])
def test_bounds_between_integer_orders_are_interpolated(sigma: float, rate: float) -> None:
    """(a - 1) x divergence is linear in a, from 0 at 1 (Wang, Balle and Kasiviswanathan, 2019, Corollary 10)."""
    at_2, at_3 = accounting.without_replacement(np.array([2.0, 3.0]), sigma, rate).tolist()
    expected = {1.5: at_2, 2.25: (0.75 * at_2 + 0.25 * 2 * at_3) / 1.25, 2.5: (at_2 + 2 * at_3) / 2 / 1.5, 3.0: at_3}
    for order, value in expected.items():
        assert value < order / 2 / sigma**2
        assert accounting.without_replacement(np.array([order]), sigma, rate)[0] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(("order", "sigma"), [(20.5, 0.25), (60.5, 0.8)])
def test_little_noise_has_the_moment_of_the_user_who_takes_part(order: float, sigma: float) -> None:
    """The moment E[(1 + u)^a] is rate^a e^(a (a - 1) / (2 sigma^2)), times 1 + O(e^(-(a - 1) / sigma^2))."""
    log_moment = order * math.log(0.3) + order * (order - 1) / 2 / sigma**2
    assert (order - 1) / sigma**2 > 90
    found = accounting.poisson(np.array([order]), sigma, 0.3)[0]
    assert found == pytest.approx(log_moment / (order - 1), rel=1e-9)


@pytest.mark.parametrize("number", [2**63, 3.0, True, "3"])
def test_counts_of_a_ledger_are_whole_numbers_of_64_bits(number: Any) -> None:
    for name in ("population", "cohort", "rounds"):
        counts = {"population": 9, "cohort": 3, "rounds": 2} | {name: number}
        with pytest.raises(InputError, match=rf"{name} must be (an integer|a number|below 2|below 9)"):
            Entry("fixed-size", noise_multiplier=1.0, **counts)
    assert Entry("fixed-size", 2**63 - 1, 3, 1.0, 2).population == 2**63 - 1


def test_spent_has_the_conventions_that_are_passed() -> None:
    ledger = Ledger((Entry("fixed-size", 40, 40, 3.0, 4),))
    names = ["replace-one-rdp", "paper-tight"]
    found = spent(ledger, "fixed-size", 1e-3, names)
    assert [*found.items()] == [(name, epsilon(ledger, 1e-3, BY_NAME[name])) for name in names]
    with pytest.raises(InputError, match="conventions: 'poisson-rdp' is not for fixed-size sampling"):
        spent(ledger, "fixed-size", 1e-3, ["poisson-rdp"])
    with pytest.raises(InputError, match="conventions"):
        spent(ledger, "fixed-size", 1e-3, "paper")
