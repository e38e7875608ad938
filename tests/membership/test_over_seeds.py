"""Attacks on membership over seeds: means, Student's t, and differences paired by seed."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flsim.attacks.membership.tables import with_differences

AREAS = {"iid": {0: 0.50, 1: 0.52, 2: 0.54}, "non-iid": {0: 0.55, 1: 0.56, 3: 0.99}}


def rows(attack: str = "loss", shift: float = 0.0) -> pd.DataFrame:
    return pd.DataFrame(
        {"setting": partition, "series": partition, "unit": "record", "attack": attack, "seed": seed}
        | {"auroc": area + shift, "control_auroc": 0.5, "tpr": 0.01 * seed}
        for partition, areas in AREAS.items()
        for seed, area in areas.items()
    )


def test_means_and_intervals_are_over_the_seeds_of_a_setting() -> None:
    iid, non_iid = with_differences(rows()).to_dict("records")
    assert (iid["setting"], iid["seeds"], non_iid["seeds"]) == ("iid", 3, 3)
    assert iid["auroc"] == pytest.approx(0.52)
    half = stats.t.ppf(0.975, 2) * 0.02 / math.sqrt(3)
    assert (iid["low"], iid["high"]) == pytest.approx((0.52 - half, 0.52 + half))
    assert iid["tpr"] == pytest.approx(0.01)
    assert np.isnan(iid["difference"])


def test_differences_are_paired_by_the_seeds_that_both_settings_have() -> None:
    _, non_iid = with_differences(rows()).to_dict("records")
    differences = np.array([0.05, 0.04])  # seeds 0 and 1; seed 2 and seed 3 have no partner
    assert non_iid["difference"] == pytest.approx(differences.mean())
    half = stats.t.ppf(0.975, 1) * differences.std(ddof=1) / math.sqrt(2)
    assert (non_iid["difference_low"], non_iid["difference_high"]) == pytest.approx((0.045 - half, 0.045 + half))
    assert non_iid["p"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
