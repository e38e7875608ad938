"""Tests attack an untrained model, which memorized nothing, and an overfitted one, which memorized its records."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from membership.before_model import LAYOUT, before, before_two, in_pairs, untrained

from flsim.algorithms.fedavg import train_user
from flsim.attacks.membership.candidates import BLIND, BUILT_IN, Attack, Candidates, Targets, quantile_of_others
from flsim.attacks.membership.inference import column, row_of, scores_of
from flsim.base.errors import RunFailed
from flsim.base.rng import stream
from flsim.base.statistics import auroc, roc
from flsim.data.records import Records
from flsim.models.language_model import TrainableModel
from flsim.training.update import LocalHParams, local_batches

# The least areas that attacks reach on a model that memorized its records. Gradients vanish last.
OVERFITTED = dict.fromkeys(("loss", "reference", "zlib", "min-k", "min-k++", "neighbourhood", "quantile"), 0.95)
OVERFITTED |= {"gradient": 0.7, "wbc": 0.95, "recall": 0.9, "dc-pdd": 0.8}


@cache
def by_heart(epochs: int = 80) -> tuple[TrainableModel, Candidates, Targets]:
    """Return a model after this number of epochs over only the 50 members, with candidates and targets."""
    records, targets = in_pairs(50, seed=3, shortest=4)
    model = untrained(seed=1)
    members = Records.from_lists(
        [record.tolist() for record, member in zip(records, targets.is_member, strict=True) if member]
    )
    hparams = LocalHParams(epochs=epochs, batch_size=10, learning_rate=0.02, optimizer="adam")
    train_user(model, local_batches(members, LAYOUT, hparams, stream(0, "test")), hparams)
    return model, before_two(model, records), targets


@pytest.mark.parametrize("name", BUILT_IN)
def test_attacks_on_an_untrained_model_have_areas_near_one_half(name: str) -> None:
    """For equal distributions, the mean is 1/2 and the variance (n + m + 1) / (12 n m) (Mann and Whitney, 1947)."""
    records, targets = in_pairs(300, seed=5)
    row = row_of(BUILT_IN[name], before_two(untrained(), records), targets)
    n, m = row["n_in"], row["n_out"]
    assert (n, m) == ((150, 150) if BUILT_IN[name].fit else (300, 300))
    assert abs(row["auroc"] - 0.5) < 3 * math.sqrt((n + m + 1) / (12 * n * m))


@pytest.mark.parametrize("name", OVERFITTED)
def test_attacks_detect_fifty_records_that_a_model_memorized(name: str) -> None:
    _, candidates, targets = by_heart()
    row = row_of(BUILT_IN[name], candidates, targets)
    assert row["auroc"] > OVERFITTED[name]
    assert row[column("tpr", 0.1)] >= 0.5


def knows(epochs: int) -> tuple[Candidates, Targets]:
    return by_heart(epochs)[1:]


def zeros(candidates: Candidates, targets: Targets) -> float:
    """Return the share of members that score 0."""
    scores, _ = scores_of(BUILT_IN["ez"], candidates, targets)
    return float((scores[targets.is_member] == 0).mean())


def test_the_error_zone_detects_members_while_the_model_makes_errors() -> None:
    """Records with fewer than two errors score 0: 16% of members after 10 epochs, and at least 42% after 80.

    The share after 80 epochs depends on the processor, because small differences grow during training.
    """
    (early, few), (late, many) = ((row_of(BUILT_IN["ez"], *known), zeros(*known)) for known in (knows(10), knows(80)))
    assert early["auroc_low"] > 0.6
    assert late["auroc"] < early["auroc"]
    assert many > 2 * few


@pytest.mark.parametrize("name", ["loss", "quantile", "blind"])
def test_areas_with_permuted_labels_are_near_one_half(name: str) -> None:
    """The model memorized its records. Without the permutation, most areas would be near 1."""
    _, candidates, targets = by_heart()
    row = row_of(BUILT_IN[name], candidates, targets)
    n, m = row["n_in"], row["n_out"]
    assert abs(row["permuted_auroc"] - 0.5) < 3 * math.sqrt((n + m + 1) / (12 * n * m))


def test_the_blind_control_detects_that_members_have_other_words() -> None:
    """Members have frequent words and non-members rare words, so no model is needed to distinguish them."""
    records, targets = in_pairs(100, seed=2)
    rare = np.where(targets.is_member, 0, 18)
    shifted = [
        [LAYOUT.first_word + (token - LAYOUT.first_word) // 2 + more for token in record.tolist()]
        for record, more in zip(records, rare.tolist(), strict=True)
    ]
    weights = np.arange(LAYOUT.vocabulary_size, 0.0, -1)
    candidates = replace(before(untrained(), Records.from_lists(shifted)), unigram=np.log(weights / weights.sum()))
    assert row_of(BLIND, candidates, targets)["auroc"] > 0.9


def test_quantiles_are_fitted_to_non_members() -> None:
    """Scores of members do not change the fit, and about a tenth of the 100 non-members is above the quantile."""
    rng = np.random.default_rng(4)
    is_member, statistics = np.arange(200) % 2 == 0, rng.normal(size=(200, 4))
    other = statistics.copy()
    other[is_member, 0] += 100
    one, same = (quantile_of_others(values, is_member)(statistics) for values in (statistics, other))
    np.testing.assert_allclose(one, same, atol=1e-9)
    assert 5 <= (one[~is_member] > 1e-9).sum() <= 10


def test_a_fitted_attack_is_measured_on_pairs_that_it_was_not_fitted_to() -> None:
    """The attack memorizes the numbers of the members that it is fitted to, and would recognize them perfectly."""
    records, targets = in_pairs(40)
    fitted: list[float] = []

    def fit(statistics: np.ndarray, is_member: np.ndarray) -> object:
        fitted.extend(statistics[:, 0].tolist())
        known = set(statistics[is_member, 0].tolist())
        return lambda values: np.array([value in known for value in values[:, 0]], float)

    attack = Attack("names", lambda candidates: np.arange(float(len(candidates)))[:, None], fit=fit)  # type: ignore[arg-type]
    scores, kept = scores_of(attack, before(untrained(), records), targets)
    assert not kept[np.array(fitted, int)].any()
    assert len(fitted) == kept.sum() == 40
    assert {*targets.pairs[kept]}.isdisjoint({*targets.pairs[~kept]})
    assert (scores == 0).all()


@pytest.mark.parametrize("scores", [[1.0, 2.0], float("nan"), "words"])
def test_scores_that_are_not_a_finite_number_for_each_record_are_refused(scores: object) -> None:
    records, targets = in_pairs(5)
    attack = Attack("mine", lambda candidates: np.full(len(candidates), scores) if scores != [1.0, 2.0] else scores)
    with pytest.raises(RunFailed, match="attack mine: did not return a finite number for each of 10 records"):
        scores_of(attack, before(untrained(), records), targets)


def test_rates_and_curves_follow_from_the_scores() -> None:
    """The attack returns given scores of 200 pairs; members are 0.5 above non-members on average."""
    records, targets = in_pairs(200)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=400) + 0.5 * targets.is_member
    row = row_of(Attack("given scores", lambda _: scores), before(untrained(), records), targets)
    members, others = scores[targets.is_member], scores[~targets.is_member]
    assert row["auroc"] == auroc(members, others)
    for level in (0.01, 0.1):
        at = roc(members, others).at(level)
        assert (row[column("alarms", level)], row[column("tpr", level)]) == (at.alarms, at.tpr)
        assert (row[column("tpr_low", level)], row[column("tpr_high", level)]) == (at.low, at.high)
    assert row[column("tpr", 0.001)] is None  # 200 non-members cannot show a rate below 1/200
    assert row["curve_fpr"][0] == 1 / 200
    assert (row["curve_fpr"][-1], row["curve_tpr"][-1]) == (1.0, 1.0)
    assert all(np.diff(row["curve_tpr"]) >= 0)
    assert all(np.less_equal(row["curve_low"], row["curve_tpr"]))
    assert all(np.less_equal(row["curve_tpr"], row["curve_high"]))
