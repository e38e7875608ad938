"""The mechanism against its laws: sensitivity, the noise's distribution, and refused settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats

from flsim.base.errors import InputError
from flsim.models.language_model import Params
from flsim.privacy import noise as process
from flsim.privacy.mechanism import PrivacyHParams, next_clip, noisy_mean
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
    """Over n = 1.2 million coordinates: their sum of squares is chi-square of n degrees, their mean normal.

    Each of the three statements would fail once in a million seeds. A deviation off by 0.4% fails.
    """
    drawn = flat(noise(hparams, clip, cohort)).numpy() / deviation
    assert drawn.size == SIZE
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], SIZE)
    assert low < np.square(drawn).sum() < high
    assert high / low < 1.008**2
    assert abs(drawn.sum()) < stats.norm.ppf(1 - 5e-7) * math.sqrt(SIZE)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6


def test_the_noise_is_a_function_of_seed_and_round() -> None:
    """Of two independent draws no coordinate is equal, and the correlation of 1.2 million is below 6 / sqrt(n)."""
    first = flat(noise())
    assert torch.equal(first, flat(noise()))
    reversed_order = noisy_mean(ZERO, 0.2, DP, 50, fresh(dict(reversed(ZERO.items()))))
    assert torch.equal(first, flat(reversed_order))
    for other in (noise(round_=1), noise(seed=1)):
        assert not (flat(other) == first).any()
        assert abs(np.corrcoef(first, flat(other))[0, 1]) < 6 / math.sqrt(SIZE)


def test_tensors_of_one_shape_have_noise_of_their_own() -> None:
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
    """Added or removed; replaced, by twice that. However many examples a user has."""
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
    # and the count that the clip adapts to, by 1/2 and by 1
    counts = [total.counts.within - total.counts.users / 2 for total in (base, added, replaced)]
    assert abs(counts[1] - counts[0]) == 0.5
    assert abs(counts[1] - counts[2]) in (0.0, 1.0)


def test_a_round_that_nobody_came_to_counts_as_the_half() -> None:
    """b = 1/2 without noise; with gamma = 1/2 the clip stays, and a fixed one stays always."""
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
