"""The test at equal perplexity, and its correction for several rows, as numbers, text and files show them.

Runs are simulated: their exposure is a function of their cross-entropy, less a known effect in the non-IID partition,
so that the difference at equal perplexity is that effect. IID runs are trained further, so at the end it is larger.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from results.levels import beside_of
from scipy import stats

from flsim.base.statistics import holm
from flsim.results.differences import twins
from flsim.results.sweeps import read_sweep

MakeRun = Callable[..., Path]
MakeSweep = Callable[..., Path]
CANARIES = 9
NATS = {"iid": (5.0, 4.0, 3.5), "non-iid": (5.2, 4.6, 4.0)}  # the lowest of both is 4 nats
STRONG, WEAK = (2.1, 1.8, 2.2, 1.9, 2.0), (0.4, 1.0, 0.2, 1.3, 0.9)
NONE, NEITHER = (0.5, -0.4, 0.1, -0.3, 0.2), (-0.6, 0.2, 0.4, -0.1, -0.2)
FOUR: Mapping[str, Sequence[float]] = {"strong": STRONG, "weak": WEAK, "none": NONE, "neither": NEITHER}


def exposures(nats: float, effect: float) -> list[float]:
    """Return the exposure of each canary, bits; the effect is larger for some of them, and `effect` on average."""
    return [3 * (7 - nats) + canary - effect * (1 + (canary - CANARIES // 2) / 8) for canary in range(CANARIES)]


def rounds_of(partition: str, effect: float) -> dict[int, dict[str, Sequence[float] | float]]:
    """Return the evaluations of a run: 3 bits for each nat below 7, less the effect in the non-IID partition."""
    rounds: dict[int, dict[str, Sequence[float] | float]] = {}
    for place, nats in enumerate(NATS[partition]):
        bits = exposures(nats, effect if partition == "non-iid" else 0.0)
        flags = [float(value >= 10) for value in bits]
        rounds[10 * (place + 1)] = {"perplexity": math.exp(nats), "exposure": bits, "rs": flags, "references": 1e9}
    return rounds


def p_of(*rows: Sequence[float | None]) -> list[float]:
    return [float(stats.ttest_1samp(row, 0).pvalue) for row in rows]


@pytest.fixture
def make_sweep(sweep_of: MakeSweep) -> MakeSweep:
    """Write a sweep: the effect on each seed of a setting, None where its non-IID run has not begun."""

    def make(effects: Mapping[str, Sequence[float | None]]) -> Path:
        return sweep_of(
            {
                (grid, partition): [
                    rounds_of(partition, effect or 0.0) if effect is not None or partition == "iid" else None
                    for effect in effects[grid]
                ]
                for grid in effects
                for partition in NATS
            }
        )

    return make


def test_p_is_scipys_and_its_correction_is_holms(make_sweep: MakeSweep) -> None:
    """A strong effect is told from none; a weak one is below 5% by itself, and not as one of four rows."""
    table = beside_of(twins(read_sweep(make_sweep(FOUR)))).set_index("a")
    p = p_of(STRONG, WEAK, NONE, NEITHER)
    assert table["like_exposure_difference"].tolist() == pytest.approx([2, 0.76, 0.02, -0.06])
    assert table["like_exposure_p"].tolist() == pytest.approx(p)
    assert table["like_exposure_p_holm"].tolist() == pytest.approx(holm(p))
    assert table["exposure_p"].lt(0.05).all()  # at the end of training 1.5 bits more are of utility
    strong, weak, *rest = table["like_exposure_p_holm"]
    assert strong < 0.05 < weak
    assert table["like_exposure_p"].iloc[1] < 0.05
    assert rest == [1, 1]


def test_rows_without_a_test_are_blank_and_do_not_count(make_sweep: MakeSweep) -> None:
    """One row has one seed, which has a p over canaries at the end alone; one has no run of one partition."""
    folder = make_sweep({"strong": STRONG, "single": [1.0], "weak": WEAK, "waiting": [None, None]})
    table = beside_of(twins(read_sweep(folder)))
    tested = p_of(STRONG, WEAK)
    assert table["like_exposure_p"].isna().tolist() == [False, True, False, True]
    assert table["like_exposure_p_holm"].isna().tolist() == [False, True, False, True]
    assert table["like_exposure_p_holm"].dropna().tolist() == pytest.approx(holm(tested))
    assert table["like_exposure_p_holm"].iloc[2] == table["like_exposure_p"].iloc[2]  # the larger of two
    assert (table["over"].iloc[1], table["like_exposure_difference"].iloc[1]) == ("canaries", pytest.approx(1))
    assert table["exposure_p_holm"].isna().tolist() == [False, False, False, True]
    assert "like_exposure_p_holm" not in beside_of(twins(read_sweep(folder))[1:2])
