"""Rates beside controls: counts by hand, intervals that others published, users, means over seeds, and the null."""

import math

import numpy as np
import pandas as pd
import pytest
from membership.before_model import LAYOUT, untrained
from scipy import stats

from flsim.attacks.extraction.discoverable import Scheme, discover
from flsim.attacks.extraction.extract import Extraction, is_elicited, near_verbatim, one_word_continuations
from flsim.attacks.extraction.rates import rates_of
from flsim.base.statistics import difference_interval
from flsim.data.records import Records


def strings(**columns: object) -> pd.DataFrame:
    usual = {"kind": "record", "prefix": 3, "is_greedy": False, "is_elicited": False, "is_near": False}
    return pd.DataFrame(usual | {"log_probability": -np.inf, "k_users": 1} | columns)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        ((56, 70, 48, 80), 0.0524, 0.3339),
        ((9, 10, 3, 10), 0.1705, 0.8090),
        ((6, 7, 2, 7), 0.0582, 0.8062),
        ((5, 56, 0, 29), -0.0381, 0.1926),
        ((0, 10, 0, 20), -0.1611, 0.2775),
        ((0, 10, 0, 10), -0.2775, 0.2775),
        ((10, 10, 0, 20), 0.6791, 1.0),
        ((10, 10, 0, 10), 0.6075, 1.0),
    ],
)
def test_newcombes_interval_is_that_of_his_table_ii(counts: tuple[int, ...], low: float, high: float) -> None:
    assert difference_interval(*counts) == pytest.approx((low, high), abs=5e-5)


def test_without_controls_there_is_no_excess() -> None:
    row = rates_of(strings(is_trained=[True, True], is_greedy=[True, False])).iloc[0]
    assert (row["rate"], row["control_strings"]) == (0.5, 0)
    assert row[["control_rate", "control_low", "excess", "excess_low", "excess_high"]].isna().all()


def test_means_and_intervals_are_over_the_seeds_of_a_setting() -> None:
    excesses = {"iid": [0.1, 0.2, 0.6], "non-iid": [0.3]}
    rates = pd.DataFrame(
        {
            "setting": partition,
            "series": partition,
            "kind": "record",
            "prefix": 1,
            "attack": "greedy",
            "n": np.nan,
            "p": np.nan,
        }
        | {"rate": excess + 0.1, "control_rate": 0.1, "excess": excess}
        for partition, values in excesses.items()
        for excess in values
    )
    measured = Extraction(frame=rates, strings=rates, eidetic=rates, scheme=Scheme())
    iid, non_iid = measured.over_seeds.to_dict("records")
    half = stats.t.ppf(0.975, 2) * np.std(excesses["iid"], ddof=1) / math.sqrt(3)
    assert (iid["seeds"], iid["excess"], iid["rate"]) == (3, pytest.approx(0.3), pytest.approx(0.4))
    assert (iid["excess_low"], iid["excess_high"]) == pytest.approx((0.3 - half, 0.3 + half))
    assert (non_iid["seeds"], non_iid["excess"]) == (1, 0.3)
    assert math.isnan(non_iid["excess_low"])


def test_a_model_without_training_extracts_no_more_than_from_controls() -> None:
    """600 random strings of 36 words, which no model was trained on: half of them count as trained."""
    model, rng = untrained(), np.random.default_rng(0)
    texts = Records.from_lists(rng.integers(LAYOUT.first_word, LAYOUT.last_word, (600, 4), endpoint=True).tolist())
    is_greedy, log_probs = discover(model, texts, 1, Scheme(top_k=0), LAYOUT)
    continuations = one_word_continuations(model, 3, LAYOUT, model.device)
    table = rates_of(
        strings(
            is_trained=np.arange(600) < 300,
            is_greedy=is_greedy,
            log_probability=log_probs,
            is_elicited=is_elicited(continuations, texts, 1),
            is_near=near_verbatim(model, texts, 1, 1, LAYOUT, model.device)[0],
        )
    )
    assert (table["excess_low"] <= 0).all()
    assert (table["excess_high"] >= 0).all()
    at_one = table[(table["n"] == 1) & (table["p"] == 0.1)].iloc[0]
    assert at_one["extracted"] == at_one["control_extracted"] == 0  # chance is 36^-3
    # One in V^3 = 64,000 suffixes is drawn: half of all are by n = ln 2 x 64,000 samples, and nearly all by a million.
    assert table[(table["n"] == 1e6) & (table["p"] == 0.9)].iloc[0]["rate"] > 0.99
    assert table[(table["n"] == 1e3) & (table["p"] == 0.5)].iloc[0]["rate"] < 0.01
