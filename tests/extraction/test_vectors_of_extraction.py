"""Extraction at inputs whose values follow from their definition."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from membership.before_model import LAYOUT, untrained
from scipy.stats import beta

from flsim.attacks.extraction import extract, rates, strings
from flsim.attacks.extraction.strings import Scheme, Strings
from flsim.base.statistics import difference_interval
from flsim.canaries.spec import Canary
from flsim.data.records import Records


@pytest.mark.parametrize(
    ("first", "last", "planted_after"),
    [(None, None, 1), (1, None, 1), (2, None, 2), (3, 4, 3), (3, 2, None), (1, 0, None), (None, 5, 1)],
)
def test_canaries_are_planted_from_the_first_round_of_their_window(
    first: int | None, last: int | None, planted_after: int | None
) -> None:
    canary = Canary("c", (1, 2), 0.5, 0.5, first_round=first, last_round=last)
    found = [rounds for rounds in range(1, 8) if extract._is_planted(canary, rounds)]
    assert found == ([] if planted_after is None else list(range(planted_after, 8)))
    control = Canary("c", (1, 2), 0.5, 0.5, is_planted=False, first_round=first, last_round=last)
    assert not any(extract._is_planted(control, rounds) for rounds in range(1, 8))


@pytest.mark.parametrize("p_z", [1e-7, 0.013, 0.3, 0.999])
def test_tries_are_bernoulli(p_z: float) -> None:
    """1 - (1 - p_z)^n, and the least n at which it reaches p, by trying."""
    log_probs = np.log([p_z])
    for n in (1, 7, 1_000):
        assert strings.probability_within(n, log_probs)[0] == pytest.approx(1 - (1 - p_z) ** n, rel=1e-6)
    for p in (0.1, 0.5, 0.9):
        least = strings.least_tries(log_probs, p)[0]
        assert least >= 1
        assert 1 - (1 - p_z) ** least >= p * (1 - 1e-9)
        assert least == 1 or 1 - (1 - p_z) ** (least - 1) < p
    assert strings.least_tries(np.array([0.0, -math.inf]), 0.5).tolist() == [1, math.inf]
    assert strings.probability_within(3, np.array([0.0, -math.inf])).tolist() == [1, 0]


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "kind": "record",
            "prefix": 3,
            "is_trained": [True, True, True, False, False],
            "is_greedy": [True, True, False, True, False],
            "log_probability": np.log([0.2, 0.01, 1e-9, 0.05, 1e-9]),
            "is_elicited": [True, False, False, False, False],
            "is_near": [True, True, True, True, False],
            "k_users": [1, 2, 12, 0, 4],
        }
    )


def test_rates_of_attacks_stand_beside_controls() -> None:
    found = rates.rates_of(table())
    greedy = found[found["attack"] == "greedy"].iloc[0]
    assert (greedy["rate"], greedy["control_rate"], greedy["excess"]) == pytest.approx((2 / 3, 1 / 2, 1 / 6))
    assert (greedy["low"], greedy["high"]) == pytest.approx((beta.ppf(0.025, 2, 2), beta.ppf(0.975, 3, 1)))
    assert (greedy["control_low"], greedy["control_high"]) == pytest.approx(
        (beta.ppf(0.025, 1, 2), beta.ppf(0.975, 2, 1))
    )
    assert (greedy["excess_low"], greedy["excess_high"]) == pytest.approx(difference_interval(2, 3, 1, 2))
    sampling = found[found["attack"] == "sampling"]
    assert len(sampling) == 21
    keys = zip(sampling["n"].astype(int), sampling["p"], strict=True)
    counts = dict(zip(keys, zip(sampling["extracted"], sampling["control_extracted"], strict=True), strict=True))
    assert counts[1, 0.1] == (1, 0)
    assert counts[10, 0.5] == (1, 0)  # 0.89 and 0.096; 0.40
    assert counts[10, 0.9] == (0, 0)
    assert counts[100, 0.5] == (2, 1)
    assert counts[1_000_000, 0.9] == (2, 1)
    assert found[found["attack"] == "one-word prompt"]["rate"].tolist() == pytest.approx([1 / 3])
    assert found[found["attack"] == "near-verbatim"]["rate"].tolist() == [1]


def test_without_controls_there_is_no_excess() -> None:
    row = rates.rates_of(table().query("is_trained")).iloc[0]
    assert (row["rate"], row["control_strings"]) == (2 / 3, 0)
    assert row[["control_rate", "control_low", "excess", "excess_low", "excess_high"]].isna().all()


def test_similar_suffixes_are_counted_on_request() -> None:
    """Suffixes of 1, 2, 4, 4 and 4 words: at most two edits, of which one word must be right, and BLEU above 0.75."""
    near = table().assign(
        words=[4, 5, 7, 7, 7], edit_distance=[1, 1, 2, 3, 2], bleu=[0.0, 0.9, 0.75, 0.7501, 0.0], kind="record"
    )
    assert len(rates.rates_of(near)) == len(rates.rates_of(near, 2)) - 2
    found = rates.rates_of(near, 2).set_index("attack")[["extracted", "control_extracted"]]
    assert found.loc[["edit distance 2", "BLEU 0.75"]].to_numpy().tolist() == [[2, 1], [1, 1]]


def test_strings_of_few_users_stand_beside_controls_of_one_less() -> None:
    found = rates.eidetic_of(table())
    assert set(found["attack"]) == {"greedy", "sampling"}
    assert set(found["n"].dropna()) == {1_000_000}
    assert set(found["p"].dropna()) == {0.5}
    greedy = found[found["attack"] == "greedy"].set_index("k_users")
    assert greedy["strings"].tolist() == [1, 2, 2, 2, 3]
    assert greedy["control_strings"].tolist() == [1, 1, 2, 2, 2]
    assert greedy.index.tolist() == [1, 2, 5, 10, math.inf]


def test_means_over_seeds_are_in_the_order_of_the_settings() -> None:
    about = {"series": "s", "kind": "record", "prefix": 1, "attack": "greedy", "n": np.nan, "p": np.nan}
    values = {"rate": 0.3, "control_rate": 0.1, "excess": 0.2}
    named = pd.DataFrame([{"setting": setting} | about | values for setting in ("b", "c", "a", "b")])
    found = extract.Extraction(frame=named, strings=named, eidetic=named, scheme=Scheme()).over_seeds
    assert found[["setting", "seeds"]].to_numpy().tolist() == [["b", 2], ["c", 1], ["a", 1]]


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)])
def test_one_word_prompts_are_tried_up_to_the_longest_suffix(sizes: tuple[int, ...]) -> None:
    """A string of each group ends in what greedy decoding writes after a word; other strings end in other words."""
    model = untrained("cifg", 1)
    written = extract.one_word_continuations(model, max(sizes), LAYOUT, torch.device("cpu")).tolist()
    groups = []
    for prefix, size in enumerate(sizes, 1):
        starts = {tuple(text[:size]) for text in written}
        unseen = next(word for word in range(LAYOUT.first_word, LAYOUT.last_word) if (word,) * size not in starts)
        texts = [[7] * prefix + written[5][:size], [7] * prefix + [unseen] * size]
        groups.append(Strings("record", prefix, Records.from_lists(texts), ("a", "b"), np.array([True, False])))
    attacked = extract.Attacked(model, LAYOUT, groups, 1, {}, lambda: (np.zeros(4, np.int64),) * 2)
    found = [*extract._measured(attacked, Scheme())]
    assert [one["is_elicited"].tolist() for one in found] == [[True, False]] * 2
    assert [one["words"].tolist() for one in found] == [[1 + sizes[0]] * 2, [2 + sizes[1]] * 2]
