"""The mechanism: sensitivity, distribution and epsilon of the noise, and settings that are refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from helpers import Experiment, Flsim
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ive

import flsim as api
from flsim.base.errors import InputError
from flsim.models.language_model import Params
from flsim.privacy import noise as process
from flsim.privacy.accounting import ORDERS, SkellamDpEvent, gaussian, rdp_of, skellam
from flsim.privacy.conventions import CONVENTIONS
from flsim.privacy.ledger import PrivacyHParams, largest_norm, next_clip, noisy_mean, released, rounded
from flsim.privacy.noise import Skellam
from flsim.training.update import UpdateSum

SHAPES = {"embedding": (10_000, 96), "weight": (96, 2_010), "projection": (670, 96), "bias": (2_010,)}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())
ZERO = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
DP = PrivacyHParams("dp", clip=0.2, noise_multiplier=1.5)
ADAPTIVE = replace(DP, clip=0.1, target_quantile=0.5)


def flat(params: Params) -> torch.Tensor:
    return torch.cat([params[name].flatten() for name in sorted(params)])


def noise(hparams: PrivacyHParams = DP, clip: float = 0.2, cohort: int = 50, seed: int = 0, round_: int = 0) -> Params:
    return noisy_mean(ZERO, clip, hparams, cohort, fresh(ZERO, seed, round_))


def fresh(like: Params, seed: int = 0, round_: int = 0) -> Params:
    return process.step(DP.noise, seed, like, {}, round_)[0]


@pytest.mark.parametrize(
    ("hparams", "clip", "cohort", "deviation"),
    [
        (DP, 0.2, 50, 1.5 * 0.2 / 50),
        (DP, 0.2, 5_000, 1.5 * 0.2 / 5_000),
        # sigma_b = 50 / 20 = 2.5, so 1 / z_Delta^2 = 1 / 1.5^2 - 1 / 5^2 = 0.40444 and z_Delta = 1.57243
        (ADAPTIVE, 0.7, 50, 1.5724272550828777 * 0.7 / 50),
    ],
)
def test_the_noise_on_the_mean_is_gaussian_of_deviation_z_s_over_qn(
    hparams: PrivacyHParams, clip: float, cohort: int, deviation: float
) -> None:
    """Over n = 1.2 million coordinates, the sum of squares is chi-square of n degrees, and the mean is normal.

    Each of the three checks would fail once in a million seeds. A standard deviation that is wrong by 0.4% fails."""
    drawn = flat(noise(hparams, clip, cohort)).numpy() / deviation
    assert drawn.size == SIZE
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], SIZE)
    assert low < np.square(drawn).sum() < high
    assert high / low < 1.008**2
    assert abs(drawn.sum()) < stats.norm.ppf(1 - 5e-7) * math.sqrt(SIZE)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6


def test_the_noise_is_a_function_of_seed_and_round() -> None:
    """Two independent draws have no equal coordinate, and the correlation of 1.2 million is below 6 / sqrt(n)."""
    first = flat(noise())
    assert torch.equal(first, flat(noise()))
    reversed_order = noisy_mean(ZERO, 0.2, DP, 50, fresh(dict(reversed(ZERO.items()))))
    assert torch.equal(first, flat(reversed_order))
    for other in (noise(round_=1), noise(seed=1)):
        assert not (flat(other) == first).any()
        assert abs(np.corrcoef(first, flat(other))[0, 1]) < 6 / math.sqrt(SIZE)


def test_tensors_of_the_same_shape_have_different_noise() -> None:
    twins = {name: torch.zeros(1_000, dtype=torch.float64) for name in ("a", "b")}
    drawn = noisy_mean(twins, 0.2, DP, 50, fresh(twins))
    assert not (drawn["a"] == drawn["b"]).any()


NUMBERS = st.floats(-10, 10)
USER = st.tuples(arrays(np.float64, 3, elements=NUMBERS), arrays(np.float64, 2, elements=NUMBERS), st.integers(0, 9))
User = tuple[NDArray[np.float64], NDArray[np.float64], int]


@given(users=st.lists(USER, max_size=6), one=USER, other=USER, clip=st.floats(0.01, 5), cohort=st.integers(1, 8))
def test_one_user_moves_the_noiseless_mean_by_at_most_s_over_qn(
    users: list[User], one: User, other: User, clip: float, cohort: int
) -> None:
    """A replaced user moves the mean by at most twice the bound of an added user, with any number of examples."""
    hparams = PrivacyHParams("clip", clip=clip)
    like = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}

    def update(a: NDArray[np.float64], b: NDArray[np.float64], examples: int) -> UpdateSum:
        return UpdateSum.of_user({"a": torch.from_numpy(a), "b": torch.from_numpy(b)}, examples, 1.0, 1, clip=clip)

    def mean(total: UpdateSum) -> torch.Tensor:
        return flat(noisy_mean(total.delta, clip, hparams, cohort))

    base = UpdateSum.zero(like)
    for user in users:
        base = base.merge(update(*user))
    bound = clip / cohort * (1 + 1e-9)
    added, replaced = base.merge(update(*one)), base.merge(update(*other))
    assert float((mean(added) - mean(base)).norm()) <= bound
    assert float((mean(added) - mean(replaced)).norm()) <= 2 * bound
    # a user also moves the count that the clip adapts to: by 1/2 if added, and by 1 at most if replaced
    counts = [total.counts.within - total.counts.users / 2 for total in (base, added, replaced)]
    assert abs(counts[1] - counts[0]) == 0.5
    assert abs(counts[1] - counts[2]) in (0.0, 1.0)


def test_a_round_without_users_counts_as_half_of_them_within_the_clip() -> None:
    """The share b is 1/2 without noise, so a clip with gamma = 1/2 stays the same. A fixed clip never changes."""
    assert next_clip(0.3, 0, 0, PrivacyHParams("clip", clip=0.3, target_quantile=0.5), 10, 0, 0) == 0.3
    moved = next_clip(0.3, 0, 0, PrivacyHParams("clip", clip=0.3, target_quantile=0.75), 10, 0, 0)
    assert moved == pytest.approx(0.3 * math.exp(0.2 * 0.25), rel=1e-12)
    assert next_clip(0.3, 7, 10, DP, 10, 0, 0) == 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mechanism": "dp", "clip": 0.2, "noise_multiplier": -1.0}, "must be finite and at least 0, found -1"),
        ({"mechanism": "dp", "clip": 0.2, "noise_multiplier": math.nan}, "must be a finite number"),
        ({"mechanism": "dp", "clip": 0.2}, '"dp" needs noise_multiplier above 0, found 0; without noise, use "clip"'),
        ({"mechanism": "dp", "noise_multiplier": 1.0}, '"dp" needs a clip; set privacy.clip'),
        ({"mechanism": "clip"}, '"clip" needs a clip'),
        ({"mechanism": "clip", "clip": 0.0}, "clip must be above 0, found 0.0"),
        ({"mechanism": "clip", "clip": 0.2, "noise_multiplier": 1.0}, '"clip" adds no noise; remove noise_multiplier'),
        ({"mechanism": "clip", "clip": 0.2, "target_quantile": 0.5, "count_noise": 1.0}, '"clip" adds no noise'),
        ({"clip": 0.2}, 'mechanism "none" does not clip updates; remove clip'),
        ({"noise_multiplier": 1.0}, 'mechanism "none" adds no noise'),
        (
            {"mechanism": "dp", "clip": 0.2, "noise_multiplier": 1.0, "count_noise": 2.0},
            "count_noise is for an adaptive clip",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as caught:
        PrivacyHParams(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MODEL = api.Model(embedding=8, units=12)
(ZERO_OUT,) = (one for one in CONVENTIONS if one.name == "min-separation-zero-out-rdp")


def pmf(values: np.ndarray, variance: float) -> np.ndarray:
    """Return e^-variance I_|k|(variance), with the modified Bessel function (Skellam, 1946)."""
    return np.asarray(ive(np.abs(values), variance))


def test_noise_has_the_probabilities_of_skellam() -> None:
    values = np.arange(-6, 7)
    process = Skellam(0, {"a": torch.Size([20_000])}, steps=3, bits=8)
    noise = process.integers(0.5, 0)["a"].numpy()
    counts = [(noise == value).sum() for value in values] + [(np.abs(noise) > 6).sum()]
    expected = np.append(pmf(values, 1.5**2), 1 - pmf(values, 1.5**2).sum()) * 20_000
    assert stats.chisquare(counts, expected).pvalue > 0.01
    assert not np.array_equal(noise, process.integers(0.5, 1)["a"].numpy())


def test_rounding_has_the_probabilities_of_independent_coins_within_the_norm() -> None:
    """The norm of (2, 1) exceeds 2, so its probability 0.2 x 0.3 is shared by the other three results of (1.2, 0.3)."""
    update = {"a": torch.tensor([0.6], dtype=torch.float64), "b": torch.tensor([[0.15]], dtype=torch.float64)}
    drawn = [rounded(update, 1.0, 2, 0, 0, user) for user in range(4_000)]
    pairs = [(int(one["a"]), int(one["b"])) for one in drawn]
    probabilities = {(1, 0): 0.8 * 0.7, (2, 0): 0.2 * 0.7, (1, 1): 0.8 * 0.3}
    counts = [pairs.count(pair) for pair in probabilities]
    assert sum(counts) == 4_000
    assert stats.chisquare(counts, 4_000 * np.array([*probabilities.values()]) / 0.94).pvalue > 0.01


def test_rounded_updates_are_integers_near_the_update_and_never_longer_than_the_clip() -> None:
    torch.manual_seed(0)
    direction = torch.randn(1_000, dtype=torch.float64)
    update = {"a": 0.5 * direction / direction.norm()}  # as long as the clip
    for steps in (40, 10_000):
        values = rounded(update, 0.5, steps, 0, 0, 0)["a"]
        assert torch.equal(values, values.round())
        assert float(values.norm()) <= steps
        shrunk = update["a"] * largest_norm(steps, 1_000) / steps
        assert float((values * 0.5 / steps - shrunk).abs().max()) <= 0.5 / steps
    with pytest.raises(InputError, match="steps must be above 16 for 1,000 parameters, found 15"):
        rounded(update, 0.5, 15, 0, 0, 0)


def renyi(order: int, variance: float, distance: int) -> float:
    """Return the Renyi divergence of Skellam noise at a distance, summed over the integers."""
    values = np.arange(-100, 101)
    moved, still = (np.log(pmf(values - shift, variance)) for shift in (distance, 0))
    return float(np.log(np.exp(order * moved + (1 - order) * still).sum())) / (order - 1)


@pytest.mark.parametrize(("noise_multiplier", "steps"), [(4.0, 1), (2.0, 3), (4.0, 2)])
def test_the_cost_is_at_least_the_divergence_and_tends_to_that_of_gaussian_noise(
    noise_multiplier: float, steps: int
) -> None:
    """One value moves by `steps`. The published bound exceeds the sum over the integers by less than a quarter."""
    orders = np.array([2.0, 3.0, 5.0, 8.0])
    exact = [renyi(int(order), (noise_multiplier * steps) ** 2, steps) for order in orders]
    bound = skellam(orders, noise_multiplier, steps)
    assert (bound >= exact).all()
    assert (bound <= 1.25 * np.array(exact)).all()
    whole = ORDERS[ORDERS % 1 == 0]
    np.testing.assert_allclose(skellam(whole, 1.0, 10**6), gaussian(whole, 1.0), rtol=1e-9)


def test_the_bound_equals_values_computed_by_hand() -> None:
    """At order 3: z = 2 and 10 steps give 3 / 8 + min(11 / 6400, 3 / 8); z = 0.5 and 1 step give 6 + min(11, 6)."""
    assert skellam(np.array([3.0]), 2.0, 10)[0] == pytest.approx(3 / 8 + 11 / 6_400)
    assert skellam(np.array([3.0, 3.5]), 0.5, 1).tolist() == [12.0, math.inf]


def test_noise_tends_to_gaussian_noise_and_sums_to_the_update() -> None:
    noise = Skellam(0, {"a": torch.Size([20_000])}, steps=1_000, bits=20).integers(1.0, 0)
    decoded, wraps = released({"a": torch.full((20_000,), 5.0)}, noise, 2.0, 1_000, 40)
    assert wraps == 0
    assert stats.kstest(decoded["a"].numpy(), stats.norm(5 * 2 / 1_000, 2).cdf).pvalue > 0.01
    exact, _ = released({"a": torch.tensor([-7.0, 3.0])}, {"a": torch.zeros(2).double()}, 2.0, 1_000, 40)
    assert exact["a"].tolist() == [-0.014, 0.006]


def test_values_beyond_the_range_wrap_and_are_counted() -> None:
    """Numbers of 8 bits are -128 to 127, so 130 becomes -126, and -129 becomes 127."""
    total = {"a": torch.tensor([127.0, 130.0, -128.0]), "b": torch.tensor([-129.0])}
    noise = {name: torch.zeros_like(value) for name, value in total.items()}
    decoded, wraps = released(total, noise, 1.0, 1, 8)
    assert (decoded["a"].tolist(), decoded["b"].tolist(), wraps) == ([127.0, -126.0, -128.0], [127.0], 2)


def test_steps_and_bits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="bits must be at most 31, found 32"):
        Skellam(0, {}, steps=10, bits=32)
    with pytest.raises(InputError, match="standard deviation 2 x 64, which exceeds 8 bits"):
        Skellam(0, {}, steps=64, bits=8).check(2.0)
    Skellam(0, {}, steps=63, bits=8).check(2.0)


def fedavg(sampler: str, shards: int = 1, **options: object) -> api.FedAvg:
    privacy = api.Privacy(
        "dp", clip=0.5, noise_multiplier=2.0, noise="skellam", noise_options={"steps": 10_000, "bits": 30}
    )
    return api.FedAvg(5, sampler=sampler, sampler_options=options, privacy=privacy, shards=shards)


def test_shards_change_no_bit_and_the_ledger_composes_the_rounds_of_a_user(experiment: Experiment) -> None:
    """With 4 groups, a user takes part in at most 2 of 6 rounds, so epsilon is that of 2 Skellam mechanisms."""
    users = api.plant(experiment.folder / "corpus", api.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))
    states = [
        list(api.simulate(users, MODEL, fedavg("min-separation", shards, separation=4), 6))[-1] for shards in (1, 3)
    ]
    assert all(torch.equal(value, states[1].params[name]) for name, value in states[0].params.items())
    expected, _ = compute_epsilon(ORDERS, 2 * rdp_of(SkellamDpEvent(2.0, 10_000), ZERO_OUT), 1e-5)
    (spent,) = api.epsilon(states[0], delta=1e-5).values()
    assert spent == pytest.approx(expected, rel=1e-12)
    for sampler, options, message in (
        ("fixed-size", {}, "does not limit how often a user takes part"),
        ("poisson", {}, "does not limit how often a user takes part"),
        ("cyclic-poisson", {"separation": 4}, "cohorts must have the same size"),
        ("min-separation", {"separation": 4, "dropout": 0.1}, "cohorts must have the same size"),
        ("min-separation", {"separation": 4, "deadline": 2.0}, "cohorts must have the same size"),
    ):
        with pytest.raises(InputError, match=message):
            next(api.simulate(users, MODEL, fedavg(sampler, **options), 6))


def test_a_run_logs_the_wraps_of_its_rounds(experiment: Experiment, flsim: Flsim) -> None:
    settings = (
        *("training.rounds=2", "training.sampler=round-robin", "privacy.mechanism=dp", "privacy.clip=0.5"),
        *("privacy.noise_multiplier=2.0", "privacy.noise=skellam", "privacy.noise_options={steps=60, bits=8}"),
    )
    options = [part for setting in settings for part in ("--set", setting)]
    code, _, err = flsim("run", experiment.config, "--out", experiment.folder / "run", "--in-process", *options)
    assert code == 0, err
    assert "exceeded the modulus; raise bits or lower steps" in " ".join(err.split())
    lines = [json.loads(line) for line in (experiment.folder / "run" / "rounds.jsonl").read_text().splitlines()]
    assert all(line["wraps"] > 0 for line in lines)
