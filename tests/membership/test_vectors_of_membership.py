"""Tests compare scores of attacks with values from their definitions, written out with loops."""

import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import scipy
import torch
from membership.before_model import LAYOUT, before, before_two, drawn, untrained
from scipy.stats import norm

from flsim.attacks.audit.bounds import Allowed
from flsim.attacks.membership import candidates, inference, scores, shadows
from flsim.attacks.membership.candidates import BUILT_IN, Candidates
from flsim.attacks.membership.inference import LEVELS, success
from flsim.attacks.membership.shadows import FreshRecords, steps_of, user_statistics
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.base.statistics import auroc
from flsim.data.corpus import held_out
from flsim.data.records import Records, author_of

PHI = np.array([0.5, -1.0, 2.0])
SHADOWS = np.array([[0.1, -1.5, 1.0], [0.9, -0.5, 3.0], [0.4, -2.0, 1.5], [1.4, -0.9, 0.5], [0.2, 0.3, 2.5]])
IS_IN = np.array(
    [[True, False, True], [False, True, True], [True, False, False], [False, True, False], [True, True, True]]
)


def moments(is_in: bool, point: int) -> tuple[float, list[float]]:
    values = [SHADOWS[model, point] for model in range(5) if IS_IN[model, point] == is_in]
    return sum(values) / len(values), values


def deviation(is_in: bool, point: int, is_fixed: bool) -> float:
    """Return the maximum-likelihood deviation of a point's scores, or of all points' scores around their means."""
    points = range(3) if is_fixed else (point,)
    squares = [(value - moments(is_in, at)[0]) ** 2 for at in points for value in moments(is_in, at)[1]]
    return math.sqrt(sum(squares) / len(squares))


@pytest.mark.parametrize("is_fixed", [True, False])
def test_lira_is_the_ratio_of_two_normal_densities(is_fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "FEW", 6 if is_fixed else 5)
    online, offline = (attack(PHI, SHADOWS, IS_IN) for attack in (shadows.lira_online, shadows.lira_offline))
    for point in range(3):
        sides = [(moments(is_in, point)[0], deviation(is_in, point, is_fixed)) for is_in in (True, False)]
        one, other = (norm.logpdf(PHI[point], *side) for side in sides)
        assert online[point] == pytest.approx(one - other, rel=1e-9)
        assert offline[point] == pytest.approx(norm.cdf(PHI[point], *sides[1]), rel=1e-9)


@pytest.mark.parametrize("models", [63, 64])
def test_lira_shares_variances_below_64_models(models: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=3), rng.normal(size=(models, 3)), rng.random((models, 3)) < 0.5
    found = shadows.lira_online(*points).tolist()
    for few in (0, 100):
        monkeypatch.setattr(shadows, "FEW", few)
        assert (shadows.lira_online(*points).tolist() == found) == ((models < few) == (models < 64))


def test_lira_of_equal_scores_and_of_a_side_without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point in all models scores NaN, without a mean of the other side. Equal scores get a least deviation."""
    assert shadows.lira_offline(np.array([1.0]), np.array([[2.0]]), np.array([[True]])).shape == (1,)
    monkeypatch.setattr(shadows, "FEW", 0)
    is_in = np.array([[True, True], [True, False], [True, True]])
    values = np.array([[1.0, 2.0], [2.0, 3.0], [3.0, 2.0]])
    found = shadows.lira_online(np.array([1.0, 2.0]), values, is_in)
    assert math.isnan(found[0])
    assert found[1] == math.inf or found[1] > 1e30  # models IN all score 2, the model OUT scores 3
    found = shadows.lira_offline(np.array([1.0, 2.0, 4.0]), np.full((2, 3), 2.0), np.zeros((2, 3), bool))
    assert found.tolist() == [0.0, 0.5, 1.0]


def test_rmia_ratios_equal_those_of_loops() -> None:
    target, references = np.array([0.5, 0.2, 0.9]), np.exp(-np.abs(SHADOWS))
    online, offline = shadows.online_ratios(target, references), shadows.offline_ratios(target, references, IS_IN)
    steep = shadows.offline_ratios(target, references, IS_IN, 0.7)
    for point in range(3):
        assert online[point] == pytest.approx(target[point] / (sum(references[:, point]) / 5), rel=1e-12)
        out = [references[model, point] for model in range(5) if not IS_IN[model, point]]
        mean = sum(out) / len(out)
        assert offline[point] == pytest.approx(target[point] / (1.3 / 2 * mean + 0.7 / 2), rel=1e-12)
        assert steep[point] == pytest.approx(target[point] / (1.7 / 2 * mean + 0.3 / 2), rel=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_rmia_counts_the_population_that_is_exceeded(gamma: float) -> None:
    ratios, population = np.array([0.5, 1.0, 2.0, 4.5]), np.array([2.0, 0.5, 1.0, 2.0, 0.25])
    expected = [sum(ratio / other > gamma for other in population) / 5 for ratio in ratios]
    assert shadows.rmia_scores(ratios, population, gamma).tolist() == expected
    if gamma == 1:
        assert shadows.rmia_scores(ratios, population).tolist() == expected


LOG_PROBS = np.array([[-1.0, -4.0, -2.0, -3.0, -0.5], [-2.0, -1.0, -9.0, -9.0, -9.0]])
LENGTHS = np.array([5, 2])


def test_scores_of_records_of_two_lengths() -> None:
    assert scores.mean_log_probability(LOG_PROBS, LENGTHS).tolist() == [-10.5 / 5, -1.5]
    of_reference = np.array([[-2.0, -2.0, -1.0, -1.0, -1.5], [-0.5, -0.5, -7.0, -7.0, -7.0]])
    assert scores.against_reference(LOG_PROBS, of_reference, LENGTHS).tolist() == [-3.0, -2.0]
    assert scores.lowest_share(LOG_PROBS, LENGTHS, 0.4).tolist() == [-3.5, -2.0]
    assert scores.lowest_share(LOG_PROBS, LENGTHS).tolist() == [-4.0, -2.0]
    assert scores.lowest_share(LOG_PROBS, LENGTHS, 1.0).tolist() == [-10.5 / 5, -1.5]
    texts = ["a word, and a word, and a word", "a"]
    sizes = [len(zlib.compress(text.encode())) for text in texts]
    assert scores.per_compressed_byte(LOG_PROBS, LENGTHS, texts).tolist() == [-10.5 / sizes[0], -3.0 / sizes[1]]
    neighbours = np.array([[-1.0, -2.0], [-3.0, -5.0]])
    assert scores.against_neighbours(np.array([-1.0, -2.0]), neighbours).tolist() == [0.5, 2.0]
    z = scores.standardized(LOG_PROBS, np.full((2, 5), -2.0), np.array([[2.0] * 5, [0.0, 4.0, 1.0, 1.0, 1.0]]))
    assert z.tolist() == [[0.5, -1.0, 0.0, -0.5, 0.75], [0.0, 0.25, -7.0, -7.0, -7.0]]


def test_min_k_of_thirty_tokens_takes_six() -> None:
    """0.2 x 30 is 6. The share 0.29 of 100 tokens takes 29, although 0.29 x 100 is 28.999999999999996 in float64."""
    values = -np.arange(1.0, 31.0)[None]
    assert scores.lowest_share(values, np.array([30]))[0] == -(25 + 26 + 27 + 28 + 29 + 30) / 6
    values = -np.arange(1.0, 101.0)[None]
    assert scores.lowest_share(values, np.array([100]), 0.29)[0] == -np.arange(72, 101).mean()
    assert scores.lowest_share(values[:, :9], np.array([9]))[0] == -9


def test_scores_equal_those_of_the_authors_code() -> None:
    """The expected values are outputs of the authors' functions, called with these arrays, one record at a time.

    ez: error_zone_pos_neg_sum_ratio, github.com/JetBrains-Research/ez-mia at aa0b6b7, mia/ez_score.py. wbc: the mean of
    _compute_window_score over the sizes of configs/example.yaml, github.com/Stry233/WBC at 8112878, attacks/wbc.py.
    dc-pdd: cal_met, github.com/zhang-wei-chao/DC-PDD at 8461d44, com_det_sco.py, with the other sign.
    """
    rng = np.random.default_rng(0)
    shape, lengths = (6, 45), np.array([45, 20, 7, 3, 1, 4])
    log_probs, of_reference = -rng.exponential(2, shape).round(2), -rng.exponential(2.2, shape).round(2)
    is_likeliest, tokens = rng.random(shape) < 0.4, rng.integers(1, 12, shape)
    weights = rng.random(12) + 0.1
    of_reference[5] = log_probs[5] - 1  # no shift is negative
    of_unigram = np.log(weights / weights.sum())[tokens]
    ez = [1.2038318254389995, 2.0798004987528578, 0.016110471806672483, 0.0, 0.0, 0.0]
    wbc = [0.6313635887473097, 0.7903637770897832, 0.0, 1.0, 0.0, 1.0]
    dc_pdd = [0.009092384996751598, 0.00936523536804012, 0.008046875037708378, 0.01, 0.01, 0.01]
    assert scores.error_zone(log_probs, of_reference, is_likeliest, lengths) == pytest.approx(ez, rel=1e-9)
    assert scores.windows_above(log_probs, of_reference, lengths) == pytest.approx(wbc, rel=1e-9)
    assert scores.divergence(log_probs, of_unigram, tokens, lengths) == pytest.approx(dc_pdd, rel=1e-9)


def test_recall_is_the_ratio_after_a_prefix_read_word_by_word() -> None:
    """The ratio is LL(x | P) / LL(x): Xie et al. (2024), equation 1, get_conditional_ll, github.com/ruoyuxie/recall."""
    model, records = untrained("transformer"), drawn(15)
    candidates = before_two(model, records)
    assert candidates.context is not None
    ratios = BUILT_IN["recall"].score(candidates)
    for record, ratio in zip(records, ratios, strict=True):
        text = record.tolist() + [LAYOUT.eos] * LAYOUT.ends_with_eos(len(record))
        means = []
        for length in (len(candidates.context.tokens), 0):
            prefix = candidates.context.tokens[:length].tolist()
            state, log_probs = model.start(torch.tensor([[LAYOUT.bos, *prefix]]))
            values = []
            for token in text:
                values.append(float(log_probs[0, token]))
                state, log_probs = model.step(state, torch.tensor([token]))
            means.append(sum(values) / len(values))
        assert ratio == pytest.approx(means[0] / means[1], rel=1e-4)


def test_a_context_is_cut_to_the_positions_of_the_model() -> None:
    """Only the first record of the context fits: the model has 12 positions for a record, plus this record's words."""
    every = before_two(untrained(), drawn(5))
    assert every.context is not None
    first = len(every.context[0])
    short = replace(every, context=Records.from_lists([every.context[0].tolist()]))
    expected = BUILT_IN["recall"].score(short)
    model: Any = every.model
    model.config = SimpleNamespace(max_position_embeddings=12 + first)
    assert BUILT_IN["recall"].score(every).tolist() == expected.tolist()
    model.config = SimpleNamespace(max_position_embeddings=11 + first)
    for refused in (every, replace(every, context=None)):
        with pytest.raises(InputError, match="attack recall: found no held-out record that is not attacked and fits"):
            BUILT_IN["recall"].score(refused)


@pytest.mark.parametrize("name", ["ez", "wbc"])
def test_attacks_with_a_reference_model_need_one(name: str) -> None:
    with pytest.raises(InputError, match=f"attack {name}: needs a reference; name one with --reference"):
        BUILT_IN[name].score(before(untrained(), drawn(5)))


@pytest.mark.parametrize("level", [0.2, 0.7])
def test_quantile_fits_minimize_the_pinball_loss(level: float) -> None:
    """A search by Nelder and Mead from the fit finds no lower loss; the loss is convex."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(60, 2))
    values = 1 + features @ [2.0, -1.0] + rng.exponential(size=60)

    def loss(coefficients: np.ndarray) -> float:
        residuals = values - coefficients[0] - features @ coefficients[1:]
        return float(np.maximum(level * residuals, (level - 1) * residuals).mean())

    found = scores.quantile_fit(features, values, level)
    best = scipy.optimize.minimize(loss, found, method="Nelder-Mead").fun
    assert loss(found) <= best + 1e-9
    assert (values < found[0] + features @ found[1:] - 1e-9).mean() <= level


@pytest.mark.parametrize("penalty", [1e-3, 0.5])
def test_logistic_fits_are_stationary(penalty: float) -> None:
    """The penalized gradient is 0 at the fit, with the best constant."""
    rng = np.random.default_rng(2)
    features = rng.normal(size=(200, 2))
    is_member = rng.random(200) < scipy.special.expit(features @ [1.0, -0.5] + 0.8)
    found = scores.logistic_fit(features, is_member, penalty)

    def balance(constant: float) -> float:
        return float((is_member - scipy.special.expit(constant + features @ found)).mean())

    constant = scipy.optimize.brentq(balance, -10, 10)
    residuals = is_member - scipy.special.expit(constant + features @ found)
    assert features.T @ residuals / 200 == pytest.approx(penalty * found, abs=1e-4)
    assert (scores.logistic_fit(features, is_member) == scores.logistic_fit(features, is_member, 1e-3)).all()


def test_statistics_of_users_are_means_over_their_records() -> None:
    model, reference = np.array([-1.0, -3.0, -2.0, -7.0]), np.array([-4.0, -4.0, -2.0, -1.0])
    assert user_statistics(model, reference, np.array([0, 1, 0, 1])).tolist() == [1.5, -2.5]


def make_shadows() -> shadows.Shadows:
    population = np.array([[-1.0, -2.0], [-0.5, -1.5], [-1.2, -2.5], [-0.8, -1.1], [-2.0, -0.3]])
    return shadows.Shadows("user", ("a", "b", "c"), -np.abs(SHADOWS), IS_IN, population)


def test_counterfactual_memorization_is_a_difference_of_means() -> None:
    found = shadows.counterfactual(make_shadows())
    for point, row in enumerate(found.to_dict("records")):
        sides = [-np.abs(SHADOWS[IS_IN[:, point] == is_in, point]) for is_in in (True, False)]
        assert (row["n_in"], row["n_out"]) == tuple(map(len, sides))
        assert row["memorization"] == pytest.approx(sides[0].mean() - sides[1].mean())
        error = math.sqrt(sum(side.var(ddof=1) / len(side) for side in sides))
        assert row["standard_error"] == pytest.approx(error)


def test_each_run_is_attacked_with_the_other_runs_as_shadows() -> None:
    made = make_shadows()
    found = shadows.leave_one_out(made)
    for run in range(5):
        others = [other for other in range(5) if other != run]
        is_in, phi = IS_IN[others], made.phi[others]
        known = is_in.any(axis=0) & ~is_in.all(axis=0)
        assert np.isfinite(found["LiRA online"][run]).tolist() == known.tolist()
        is_in, phi, own = is_in[:, known], phi[:, known], made.phi[run, known]
        p, z, z_others = np.exp(phi), np.exp(made.population[run]), np.exp(made.population[others])
        online = shadows.rmia_scores(np.exp(own) / p.mean(0), z / z_others.mean(0))
        out = np.where(is_in, np.nan, p)
        ratios = np.exp(own) / (0.65 * np.nanmean(out, axis=0) + 0.35)
        offline = shadows.rmia_scores(ratios, z / (0.65 * z_others.mean(0) + 0.35))
        assert found["loss"][run, known].tolist() == own.tolist()
        assert found["LiRA online"][run, known] == pytest.approx(shadows.lira_online(own, phi, is_in))
        assert found["LiRA offline"][run, known] == pytest.approx(shadows.lira_offline(own, phi, is_in))
        assert found["RMIA online"][run, known].tolist() == online.tolist()
        assert found["RMIA offline"][run, known].tolist() == offline.tolist()


@dataclass
class Held:
    """A split with users of 4, 0, 10 and 7 records."""

    user_offsets = np.array([0, 4, 4, 14, 21])
    records = 21


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_candidates_of_shadow_models_are_those_that_a_run_may_train_on(share: float) -> None:
    held = {
        first + record
        for user, (first, last) in enumerate(pairwise(Held.user_offsets.tolist()))
        for record in held_out(last - first, user, share).tolist()
    }
    assert len(held) == (6 if share else 0)  # 1, 3 and 2 records
    found = shadows._candidates(Held(), "record", share)  # type: ignore[arg-type]
    assert found.tolist() == [record for record in range(21) if record not in held]
    assert shadows._candidates(Held(), "user", share).tolist() == [0, 2, 3]  # type: ignore[arg-type]


def run_of(unit: str = "user", partition: str = "non-iid") -> Any:
    names = ["ann#0", "ann#1", "ann#2", "bob#0", "cid#0"]
    split = SimpleNamespace(names=names)
    config = SimpleNamespace(unit=unit, data=SimpleNamespace(partition=partition))
    return SimpleNamespace(config=config, corpus=SimpleNamespace(split=lambda name: split))


def test_the_ledgers_bound_for_an_author_is_that_of_all_their_users() -> None:
    """The number of steps is the most training users of any author: three of Ann's. Dan has none and counts as one."""
    claim: Any = MagicMock(curve=Allowed.point(0.4, 0.01))
    names = sorted({author_of(name) for name in run_of().corpus.split("train").names})
    assert len(names) == 3

    def side(users: tuple[str, ...], authors: tuple[str, ...]) -> FreshRecords:
        size = len(users)
        return FreshRecords(drawn(size), np.arange(size), users, authors, np.ones(size, bool), np.ones(size))

    users = side(("train:0", "train:3"), ("ann", "bob"))
    sides = [users, *(side(authors, authors) for authors in (("ann", "dan"), ("bob", "dan"), ("dan",)))]
    assert [steps_of(run_of(), one) for one in sides] == [1, 3, 1, 1]
    assert [steps_of(run, users) for run in (run_of(unit="record"), run_of(partition="iid"))] == [None, None]
    scores, is_member = np.arange(2000.0), np.arange(2000) % 2 == 0
    row = success("a", "author", scores, is_member, ["ann"] * 2000, 0, claim, "user", 3)
    for level in LEVELS:
        x = 1 - level
        for _ in range(3):
            x = claim.curve.least_probability(x)
        assert row[f"allowed_at_{level:g}"] == pytest.approx(1 - x, rel=1e-12)


def test_neighbours_are_drawn_from_the_other_words() -> None:
    """Expected words come from the same uniform numbers and the distribution of all words except the replaced word."""
    first, last, oov = LAYOUT.first_word, LAYOUT.last_word, LAYOUT.oov
    texts = [[first, last, first + 3, oov], [oov], [last, last]]
    records = Records.from_lists(texts)
    plain = before(untrained(), records)
    weights = np.arange(1.0, LAYOUT.vocabulary_size + 1) ** 2
    unigram = np.log(weights / weights.sum())
    every = Candidates(plain.model, records, plain.keys, plain.vocabulary, unigram, 0, LAYOUT)
    found = [neighbour.tolist() for neighbour in every.neighbours(200)]
    for index, text in enumerate(texts):
        rng = stream(0, "neighbours", f"train:{index}")
        places, uniforms = rng.integers(len(text), size=200), rng.random(200)
        for place, uniform, neighbour in zip(places, uniforms, found[200 * index :], strict=False):
            others = [word for word in range(first, last + 1) if word != text[place]]
            cumulative = weights[others].cumsum()
            word = others[int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))]
            assert neighbour == [*text[:place], word, *text[place + 1 :]]


def test_success_has_the_interval_of_resampled_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are percentiles of the area, over pooled pairs of run and target, of runs drawn from the named stream."""
    monkeypatch.setattr(shadows, "RESAMPLES", 100)
    rng = np.random.default_rng(4)
    is_in = np.array([[(run + target) % 3 != 0 for target in range(7)] for run in range(5)])
    made = shadows.Shadows("user", tuple("abcdefg"), rng.normal(size=(5, 7)) + is_in, is_in, rng.normal(size=(5, 4)))
    assert shadows.success_of_shadows(made).equals(shadows.success_of_shadows(made, 0))
    found = shadows.success_of_shadows(made, 3).set_index("attack").loc["loss"]
    values = shadows.leave_one_out(made)["loss"]
    pairs = [
        tuple([value for value, own in zip(*row, strict=True) if own == side and np.isfinite(value)] for side in (1, 0))
        for row in zip(values, is_in, strict=True)
    ]

    def area(runs: Iterable[int]) -> float:
        members, others = ([value for run in runs for value in pairs[run][side]] for side in (0, 1))
        wins = [(member > other) + (member == other) / 2 for member in members for other in others]
        return float(np.mean(wins))

    drawn_runs = stream(3, "shadow bootstrap", "loss").integers(5, size=(100, 5))
    low, high = np.quantile([area(runs.tolist()) for runs in drawn_runs], [0.025, 0.975])
    assert found["auroc"] == pytest.approx(area(range(5)))
    assert (found["auroc_low"], found["auroc_high"]) == pytest.approx((low, high))
    assert (found["shadows"], found["n_in"]) == (4, sum(len(members) for members, _ in pairs))
    assert found["n_out"] == sum(len(others) for _, others in pairs)


def test_success_excludes_targets_that_all_or_no_other_runs_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without a score does not change the result, whether or not it is a member of the run."""
    monkeypatch.setattr(shadows, "RESAMPLES", 100)
    rng = np.random.default_rng(4)
    is_in = np.array([[(run + target) % 3 != 0 for target in range(7)] for run in range(5)])
    phi, population = rng.normal(size=(5, 9)), rng.normal(size=(5, 4))
    few = shadows.Shadows("user", tuple("abcdefg"), phi[:, :7], is_in, population)
    sides = np.column_stack([is_in, np.ones(5, bool), np.zeros(5, bool)])
    assert shadows.success_of_shadows(shadows.Shadows("user", tuple("abcdefghi"), phi, sides, population)).equals(
        shadows.success_of_shadows(few)
    )


def test_unigrams_are_of_words_and_a_final_eos() -> None:
    """A record with the layout's greatest number of words has no EOS. Values after the end are 0."""
    first = LAYOUT.first_word
    plain = before(untrained(), Records.from_lists([[first, first + 2], [first + 1] * 12]))
    unigram = np.log(np.arange(1.0, LAYOUT.vocabulary_size + 1))
    every = Candidates(plain.model, plain.records, plain.keys, plain.vocabulary, unigram, 0, LAYOUT)
    of_words = np.log(1.0 + np.array([first, first + 2, LAYOUT.eos]))
    assert every.unigram_log_probs[0].tolist() == [*of_words.tolist(), *[0.0] * 9]
    assert every.unigram_log_probs[1].tolist() == [math.log(first + 2)] * 12
    assert every.lengths.tolist() == [3, 12]


def test_neighbours_have_words_if_a_sum_of_probabilities_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first word's interval is [0, 1/2). (1 - 2^-53) / 2 + 1/2 is rounded to 1, which is in no word's interval."""
    first, last = LAYOUT.first_word, LAYOUT.last_word
    probabilities = np.zeros(LAYOUT.vocabulary_size)
    probabilities[[first, last]] = 1 / 2
    highest = math.nextafter(1, 0)
    assert highest / 2 + 1 / 2 == 1
    fixed = SimpleNamespace(
        integers=lambda words, size: np.zeros(size, np.int64), random=lambda size: np.full(size, highest)
    )
    monkeypatch.setattr(candidates, "stream", lambda *keys: fixed)
    plain = before(untrained(), Records.from_lists([[first, first + 1]]))
    with np.errstate(divide="ignore"):
        unigram = np.log(probabilities)
    every = Candidates(plain.model, plain.records, plain.keys, plain.vocabulary, unigram, 0, LAYOUT)
    assert [neighbour.tolist() for neighbour in every.neighbours(2)] == [[last, first + 1]] * 2


@pytest.mark.parametrize(
    ("area", "low", "records", "verdict", "is_confounded"),
    [
        (0.405, 0.3, 10, "Undecided", None),
        (0.8, 0.6, 10, "Above", True),
        (0.554, 0.51, 56, "Undecided", None),
        (0.57, 0.56, 5_000, "Above", True),
        (0.57, 0.49, 5_000, "Undecided", None),  # records of few authors
        (0.54, 0.53, 5_000, "At", False),
    ],
)
def test_the_blind_control_is_judged_by_what_chance_reaches(
    area: float, low: float, records: int, verdict: str, is_confounded: bool | None
) -> None:
    """Of the areas of scores without a difference, 97.5% are up to the stated one, within 0.02."""
    values, text = inference.blind_control(area, low, records, records)
    assert values == {"control_auroc": area, "is_confounded": is_confounded}
    assert text.partition("only. ")[2].startswith(verdict)
    if verdict == "Undecided" and records < 100:
        rng = np.random.default_rng(0)
        areas = [auroc(*rng.random((2, records))) for _ in range(4_000)]
        high = float(re.findall(r"0\.\d+", text)[1])
        assert np.quantile(areas, 0.975) == pytest.approx(high, abs=0.02)
