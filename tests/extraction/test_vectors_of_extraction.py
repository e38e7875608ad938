"""Tests compare measures of extraction with values that follow from their definitions."""

import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from membership.before_model import LAYOUT, drawn, untrained
from populations import split_of
from scipy.stats import beta

from flsim.attacks.extraction import extract
from flsim.attacks.extraction.extract import (
    Scheme,
    Strings,
    bleu,
    copies_in,
    edit_distances,
    in_place,
    is_elicited,
    near_verbatim,
    occurrences,
    one_word_continuations,
)
from flsim.attacks.result import refuse_unlike
from flsim.base.errors import InputError
from flsim.base.statistics import difference_interval
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.records import Records
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import beam_search


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
def test_numbers_of_tries_follow_from_independent_trials(p_z: float) -> None:
    """The probability is 1 - (1 - p_z)^n. The least n reaches p, and n - 1 does not."""
    log_probs = np.log([p_z])
    for n in (1, 7, 1_000):
        assert extract.probability_within(n, log_probs)[0] == pytest.approx(1 - (1 - p_z) ** n, rel=1e-6)
    for p in (0.1, 0.5, 0.9):
        least = extract.least_tries(log_probs, p)[0]
        assert least >= 1
        assert 1 - (1 - p_z) ** least >= p * (1 - 1e-9)
        assert least == 1 or 1 - (1 - p_z) ** (least - 1) < p
    assert extract.least_tries(np.array([0.0, -math.inf]), 0.5).tolist() == [1, math.inf]
    assert extract.probability_within(3, np.array([0.0, -math.inf])).tolist() == [1, 0]


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


def test_rates_of_attacks_have_rates_of_controls() -> None:
    found = extract.rates_of(table())
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
    assert counts[10, 0.5] == (1, 0)  # probabilities within 10 tries: 0.89 and 0.096; control: 0.40
    assert counts[10, 0.9] == (0, 0)
    assert counts[100, 0.5] == (2, 1)
    assert counts[1_000_000, 0.9] == (2, 1)
    assert found[found["attack"] == "one-word prompt"]["rate"].tolist() == pytest.approx([1 / 3])
    assert found[found["attack"] == "near-verbatim"]["rate"].tolist() == [1]


def test_without_controls_there_is_no_excess() -> None:
    row = extract.rates_of(table().query("is_trained")).iloc[0]
    assert (row["rate"], row["control_strings"]) == (2 / 3, 0)
    assert row[["control_rate", "control_low", "excess", "excess_low", "excess_high"]].isna().all()


def test_similar_suffixes_are_counted_on_request() -> None:
    """Suffixes have 1, 2, 4, 4 and 4 words. At most two edits count if a word is right, and BLEU above 0.75."""
    near = table().assign(
        words=[4, 5, 7, 7, 7], edit_distance=[1, 1, 2, 3, 2], bleu=[0.0, 0.9, 0.75, 0.7501, 0.0], kind="record"
    )
    assert len(extract.rates_of(near)) == len(extract.rates_of(near, 2)) - 2
    found = extract.rates_of(near, 2).set_index("attack")[["extracted", "control_extracted"]]
    assert found.loc[["edit distance 2", "BLEU 0.75"]].to_numpy().tolist() == [[2, 1], [1, 1]]


def test_strings_of_few_users_have_controls_with_one_user_less() -> None:
    found = extract.eidetic_of(table())
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
    runs = [{"setting": setting, "seed": seed, "round": 10} for setting, seed in zip("bcab", (0, 0, 0, 1), strict=True)]
    named = pd.DataFrame([run | about | values for run in runs])
    found = extract.Extraction(frame=named, strings=named, eidetic=named, scheme=Scheme()).over_seeds
    assert found[["setting", "seeds"]].to_numpy().tolist() == [["b", 2], ["c", 1], ["a", 1]]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("seed", 0, "b: two runs have seed 0"), ("round", 4, "b: models after rounds 4 and 10 cannot be averaged")],
)
def test_runs_with_equal_seeds_or_different_rounds_are_not_averaged(column: str, value: int, message: str) -> None:
    frame = pd.DataFrame({"setting": "b", "seed": [0, 1], "round": 10, "rate": 0.3})
    frame.loc[1, column] = value
    with pytest.raises(InputError, match=message):
        refuse_unlike(frame, ["setting"])


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)])
def test_one_word_prompts_are_tried_up_to_the_longest_suffix(sizes: tuple[int, ...]) -> None:
    """One string of each group ends with the text that greedy decoding writes after a word; the other does not."""
    model = untrained("cifg", 1)
    written = extract.one_word_continuations(model, max(sizes), LAYOUT, torch.device("cpu")).tolist()
    groups = []
    for prefix, size in enumerate(sizes, 1):
        starts = {tuple(text[:size]) for text in written}
        unseen = next(word for word in range(LAYOUT.first_word, LAYOUT.last_word) if (word,) * size not in starts)
        texts = [[7] * prefix + written[5][:size], [7] * prefix + [unseen] * size]
        groups.append(Strings("record", prefix, Records.from_lists(texts), ("a", "b"), np.array([True, False])))
    attacked = extract.PromptedRun(model, LAYOUT, groups, 1, {}, lambda: (np.zeros(4, np.int64),) * 2)
    found = [*extract._measured(attacked, Scheme())]
    assert [one["is_elicited"].tolist() for one in found] == [[True, False]] * 2
    assert [one["words"].tolist() for one in found] == [[1 + sizes[0]] * 2, [2 + sizes[1]] * 2]


Phrase = list[int]
words = st.integers(1, 3)  # few words, therefore strings repeat
users = st.lists(st.lists(st.lists(words, max_size=7), max_size=4), min_size=1, max_size=6)


def canary(tokens: Phrase, **about: object) -> Canary:
    return Canary("c", tuple(tokens), 0.5, 0.5, **about)  # type: ignore[arg-type]


def counted(population: list[list[Phrase]], string: Phrase) -> tuple[int, int]:
    """Return the numbers of records and users with a string, by a search of every record word by word."""
    size = len(string)
    hits = [
        sum(any(record[at : at + size] == string for at in range(len(record) - size + 1)) for record in user)
        for user in population
    ]
    return sum(hits), sum(hit > 0 for hit in hits)


@settings(max_examples=40)
@given(users, st.lists(st.lists(words, min_size=1, max_size=5), min_size=1, max_size=8), st.integers(1, 5))
def test_occurrences_equal_those_of_a_search(population: list[list[Phrase]], strings: list[Phrase], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.attacks.extraction.extract.RECORDS", piece)  # users are in several pieces
        in_records, in_users = occurrences(
            Population.with_canaries(split_of(population), (), Overlay(np.empty(0, np.int64), np.empty(0, np.uint16))),
            Records.from_lists(strings),
        )
    assert list(zip(in_records.tolist(), in_users.tolist(), strict=True)) == [
        counted(population, string) for string in strings
    ]


POPULATION = [[[1, 1], [2, 2, 2]], [[3]], [[1, 2, 3, 1], [3, 3]]]


def in_records_and_users(canaries: tuple[Canary, ...], rounds: int) -> list[tuple[int, int]]:
    """Return counts of each canary's phrase in the population, in which canaries replace records 0, 2 and 4."""
    overlay = Overlay(np.array([0, 2, 4]), np.array([0, 0, 1], np.uint16))
    placed = in_place(Population.with_canaries(split_of(POPULATION), canaries, overlay), canaries, rounds)
    counts = occurrences(placed, Records.from_lists([list(one.tokens) for one in canaries]))
    assert (copies_in(placed, len(canaries)) == counts[0]).all()
    return list(zip(*(side.tolist() for side in counts), strict=True))


def test_canaries_count_from_the_first_round_of_their_window() -> None:
    canaries = canary([6, 6], first_round=3, last_round=4), canary([5, 6])
    assert in_records_and_users(canaries, 2) == [(0, 0), (1, 1)]
    assert in_records_and_users(canaries, 3) == in_records_and_users(canaries, 9) == [(2, 2), (1, 1)]


def test_pseudo_users_count_from_the_round_of_their_injection() -> None:
    """Two pseudo-users with three records each are injected in round 2."""
    injected = canary([6, 5, 5], copies=6, pseudo_users=2, first_round=2, last_round=2)
    canaries = canary([6, 6]), canary([5, 6]), injected
    assert in_records_and_users(canaries, 1)[2] == (0, 0)
    assert in_records_and_users(canaries, 2)[2] == (6, 2)


CPU = torch.device("cpu")
LENGTH = 4


@pytest.mark.parametrize("architecture", ["cifg", "transformer", "hf"])
def test_every_word_is_tried_as_a_prompt(architecture: str) -> None:
    model = untrained(architecture, 1)
    continuations = one_word_continuations(model, LENGTH, LAYOUT, CPU)
    words = range(LAYOUT.first_word, LAYOUT.last_word + 1)
    prompts, template = (
        [torch.tensor([LAYOUT.bos, word]) for word in words],
        Template((tuple(range(LAYOUT.vocabulary_size)),) * LENGTH),
    )
    written = [beam_search(model, prompt, template, 1)[0][0].tolist() for prompt in prompts]
    assert continuations.tolist() == written
    other = [(written[0][0] + 1) % LAYOUT.vocabulary_size, *written[0][1:]]
    strings = [[7, 8, *written[5]], [7, 8, *written[9][:2]], [7, 8, *other]]
    expected = [True, True, other in written]
    assert is_elicited(continuations, Records.from_lists(strings), 2).tolist() == expected


@pytest.mark.parametrize("width", [1, 3])
def test_near_verbatim_strings_differ_in_at_most_one_word(width: int) -> None:
    """Strings of all lengths are a beam's text with zero, one and two changed words, and random strings."""
    model = untrained(seed=2)
    strings = [record.tolist() for record in drawn(40, seed=5) if len(record) > 2]
    for prefix in ([5, 6], [9, 3], [11, 30]):
        for length in (1, 2, 4):
            tokens, _ = beam_search(model, torch.tensor([LAYOUT.bos, *prefix]), Template.words(LAYOUT, length), width)
            for wrong in range(min(3, length + 1)):
                text = tokens[-1].tolist()
                changed = [LAYOUT.first_word + (word + 7) % LAYOUT.words for word in text[:wrong]]
                strings.append([*prefix, *changed, *text[wrong:]])
    columns = near_verbatim(model, Records.from_lists(strings), 2, width, LAYOUT, CPU)
    for string, is_near, edits, score in zip(strings, *columns, strict=True):
        prefix, suffix = string[:2], string[2:]
        beams, _ = beam_search(model, torch.tensor([LAYOUT.bos, *prefix]), Template.words(LAYOUT, len(suffix)), width)
        assert edits == min(slow_distance(tuple(beam), tuple(suffix)) for beam in beams.tolist())
        assert score == max(bleu(beam, suffix) for beam in beams.tolist())
        distance = min(sum(a != b for a, b in zip(beam, suffix, strict=True)) for beam in beams.tolist())
        assert is_near == (distance == 0 or (distance == 1 and len(suffix) > 1)), string
    assert 0 < columns[0].sum() < len(strings)


@cache
def slow_distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the distance by its definition: last tokens are equal, or one is inserted, deleted or replaced."""
    if not one or not other:
        return len(one) + len(other)
    replaced = slow_distance(one[:-1], other[:-1]) + (one[-1] != other[-1])
    return min(replaced, slow_distance(one[:-1], other) + 1, slow_distance(one, other[:-1]) + 1)


def test_edit_distances_equal_the_definition() -> None:
    rng = np.random.default_rng(0)
    written, wanted = rng.integers(3, size=(40, 7)), rng.integers(3, size=(40, 5))
    expected = [
        slow_distance(tuple(one), tuple(two)) for one, two in zip(written.tolist(), wanted.tolist(), strict=True)
    ]
    assert edit_distances(written, wanted).tolist() == expected


@pytest.mark.parametrize(
    ("written", "wanted", "score"),
    [
        ("abcde", "abcde", 1.0),
        ("abcdx", "abcde", 0.66874),
        ("abcdefghixklmnopqrst", "abcdefghijklmnopqrst", 0.857893),
        ("aaabb", "aabbb", 0.66874),
        ("axc", "abc", 0.0),
        ("abcde", "abcdefg", 0.67032),
        ("abcdefg", "abcde", 0.614788),
    ],
)
def test_bleu_equals_that_of_sacrebleu(written: str, wanted: str, score: float) -> None:
    """Scores are of sacrebleu 2.6.0, sentence_bleu(smooth_method="none", tokenize="none", use_effective_order=True)."""
    assert bleu([*map(ord, written)], [*map(ord, wanted)]) == pytest.approx(score, abs=1e-6)
