"""Tests of templates with holes: how they are parsed, the sizes of their spaces, and which fillings are drawn."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log, prod
from string import ascii_lowercase, digits

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.arrays import Ints
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.secrets import (
    Hole,
    Secrets,
    are_cards,
    are_social_security_numbers,
    check_digits,
    fillings,
    parse,
    templates,
    unknown_symbols,
)
from flsim.data.records import By, Vocabulary

TOKENS = ("the", "number", "is", "-", *reversed(digits), *ascii_lowercase, "seven", "eight")  # ids of digits descend
VOCABULARY = Vocabulary(TOKENS, tuple(range(len(TOKENS), 0, -1)))
HOLES = st.one_of(
    st.builds(Hole, st.sampled_from("dlwk"), st.integers(1, 99)), st.sampled_from([Hole("card", 16), Hole("ssn", 9)])
)
TEXTS = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"]), min_size=1)


def numbers_of(text: str) -> Ints:
    return np.array([[int(symbol) for symbol in text]])


def text_of(tokens: list[int]) -> str:
    return " ".join(VOCABULARY.decode(tokens))


# 79927398713: "Luhn algorithm", Wikipedia. The others are the test numbers of Visa, MasterCard, Discover and American
# Express in PayPal's "Test credit card account numbers" for Payflow.
@pytest.mark.parametrize(
    "number",
    ["79927398713", "4111111111111111", "4012888888881881", "5555555555554444", "6011111111111117", "378282246310005"],
)
def test_published_numbers_and_no_neighbours_of_theirs_have_a_valid_check_digit(number: str) -> None:
    assert check_digits(numbers_of(number[:-1])).tolist() == [int(number[-1])]
    assert are_cards(numbers_of(number)).all()
    others = [number[:-1] + str(check) for check in range(10) if str(check) != number[-1]]
    assert not any(are_cards(numbers_of(other)).any() for other in others)


def test_social_security_numbers_are_in_their_ranges() -> None:
    """The test checks all areas, with groups and serials at the ends of their ranges."""
    groups, serials = (0, 1, 99), (0, 1, 9_999)
    for area in range(1_000):
        texts = [f"{area:03}{group:02}{serial:04}" for group, serial in product(groups, serials)]
        is_valid = are_social_security_numbers(np.vstack([numbers_of(text) for text in texts]))
        is_area = area != 0 and area != 666 and area < 900
        assert is_valid.tolist() == [is_area and group > 0 and serial > 0 for group, serial in product(groups, serials)]
    areas = sum(1 <= area <= 899 and area != 666 for area in range(1_000))
    assert fillings("{ssn}", words=1) == areas * 99 * 9_999


@given(st.lists(HOLES, min_size=1, max_size=4), st.lists(TEXTS, min_size=5, max_size=5), st.integers(0, 31))
def test_a_template_is_parsed_and_printed_again(holes: list[Hole], texts: list[str], kept: int) -> None:
    """Fixed texts are between the holes and after them, or are missing."""
    parts: list[str | Hole] = [Hole("d", 1)]
    for place, text in enumerate(texts[: len(holes) + 1]):
        parts += [text] * (kept >> place & 1) + list(holes[place : place + 1])
    assert parse("".join(map(str, parts))) == tuple(parts)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("my code is {x4}", r"unknown hole {x4}; known are {dN}"),
        ("my code is {d}", r"unknown hole {d}"),
        ("my code is d9}", r"unknown hole my code is d9}"),
        ("my code is", r"has no hole for a secret; add one, such as {d9}"),
    ],
)
def test_wrong_templates_are_refused_in_one_line(template: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        parse(template)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("template", "missing"), [("my code is {d1}", "my"), ("the {d2} ?", "?")])
def test_tokens_outside_the_vocabulary_are_refused(template: str, missing: str) -> None:
    with pytest.raises(InputError, match=re.escape(f'needs the token "{missing}", which is not in the vocabulary')):
        Secrets.from_template(template, VOCABULARY)
    with pytest.raises(InputError, match=r'needs the token "0".* {wN} in place of digits'):
        Secrets.from_template("the {d2}", Vocabulary(("the", "is"), (2, 1)))


def test_in_a_corpus_of_characters_every_character_is_a_token() -> None:
    """The space before a hole is kept; spaces at the ends of a template are removed, as in records."""
    vocabulary = Vocabulary((" ", *"eghinst.-", *digits), tuple(range(20, 0, -1)), by="characters")
    secrets = Secrets.from_template("  the thing  is {ssn}-{d1}. ", vocabulary)
    (drawn,) = secrets.draw(stream(0, "test"), 1).tolist()
    assert re.fullmatch(r"the thing is [0-9]{9}-[0-9]\.", vocabulary.text(drawn))
    assert secrets.known == len("the thing is ")
    with pytest.raises(InputError, match=r'needs the token "g".* write it with other characters, or import'):
        Secrets.from_template("the thing is {d1}", replace(vocabulary, words=(" ", *"ehinst.-", *digits)))
    with pytest.raises(InputError, match=r"{w2} is a hole for words, but the corpus is by characters; use {lN}"):
        Secrets.from_template("the {w2}", vocabulary)


def expected_fillings(template: str) -> Iterator[str]:
    """Yield all fillings of a small template, as products of the symbols that each hole allows."""
    alphabets = {"d": digits, "l": ascii_lowercase, "w": TOKENS}
    choices: list[list[str]] = []
    for part in parse(template):
        if isinstance(part, str):
            choices += [[token] for token in part.split()]
        else:
            choices += [list(alphabets[part.kind])] * part.symbols
    return map(" ".join, product(*choices))


@pytest.mark.parametrize("template", ["{d1}", "the number is {d3}", "{l1} - {d2} the", "is {w2}", "{w1}{d1}"])
def test_the_space_has_every_filling_once(template: str) -> None:
    secrets = Secrets.from_template(template, VOCABULARY)
    texts = [text_of(row) for row in secrets.all().tolist()]
    assert sorted(texts) == sorted(expected_fillings(template))
    assert len(texts) == len(set(texts)) == secrets.space == fillings(template, len(TOKENS))
    assert secrets.space == prod(map(len, secrets.allowed))
    assert {len(row) for row in secrets.all()} == {secrets.length}
    assert secrets.length - secrets.known == unknown_symbols(template)
    drawn = secrets.draw(stream(0, "uniform"), 20 * min(secrets.space, 1_600))
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    if secrets.space <= 1_600:  # chi-squared, with 20 draws of each filling on average
        assert len(counts) == secrets.space
        assert scipy.stats.chisquare(counts).pvalue > 0.001


def test_the_first_and_last_filling_of_a_large_space() -> None:
    """The first and last fillings are the ends of the ranges of cards and social security numbers, and not beyond."""
    for hole, first, last in (("{card}", "0000000000000000", "9999999999999995"), ("{ssn}", "001010001", "899999999")):
        (part,) = Secrets.from_template(hole, VOCABULARY).parts
        ends = part.fill(np.array([0, part.fillings - 1]))
        assert [text_of(row).replace(" ", "") for row in ends.tolist()] == [first, last]
    (part,) = Secrets.from_template("{ssn}", VOCABULARY).parts
    around = part.fill(np.array([665, 664]) * 99 * 9_999)  # areas 1 to 665 come before 667
    assert [text_of(row).replace(" ", "")[:3] for row in around.tolist()] == ["667", "665"]


@settings(max_examples=50, derandomize=True)
@given(
    st.lists(st.sampled_from(["the ", "- ", "{d3} ", "{l2} ", "{w1} ", "{card} ", "{ssn} "]), min_size=1, max_size=5),
    st.integers(0, 10**6),
)
def test_every_drawn_filling_fills_its_template(pieces: list[str], seed: int) -> None:
    template = "is {d1} " + "".join(pieces)
    secrets = Secrets.from_template(template, VOCABULARY)
    pattern = template.replace("{card}", "{d16}").replace("{ssn}", "{d9}")
    for kind, symbol in (("d", "[0-9]"), ("l", "[a-z]"), ("w", r"\S+")):
        for length in (1, 2, 3, 9, 16):
            pattern = pattern.replace(f"{{{kind}{length}}}", " ".join([symbol] * length))
    for row in secrets.draw(stream(seed, "test"), 20).tolist():
        assert re.fullmatch(pattern.strip(), text_of(row))
        assert secrets.is_filling(row)
        assert not secrets.is_filling(row[:-1])
        assert not secrets.is_filling([*row[:1], VOCABULARY.ids["the"], *row[2:]])  # a word instead of the digit
    card = Secrets.from_template("is {card}", VOCABULARY)
    (row,) = card.draw(stream(seed, "test"), 1).tolist()
    others = [[*row[:-1], VOCABULARY.ids[digit]] for digit in digits]
    assert [other for other in others if card.is_filling(other)] == [row], "one check digit is right"


def test_references_are_all_other_fillings_of_a_small_space_and_draws_without_secrets_of_a_large_one() -> None:
    secrets = Secrets.from_template("the {d2}", VOCABULARY)
    mine = secrets.all()[[5, 17, 99]]
    for count in (97, 200):
        among = secrets.references(0, count, mine)
        assert {*map(tuple, among.tolist()), *map(tuple, mine.tolist())} == {*map(tuple, secrets.all().tolist())}
        assert len(among) == secrets.count_references(count, 3) == 97
    for seed in range(5):
        drawn = secrets.references(seed, 90, mine)
        assert len(drawn) == secrets.count_references(90, 3) == 90
        assert not {*map(tuple, drawn.tolist())} & {*map(tuple, mine.tolist())}
        assert drawn.tolist() == sorted(drawn.tolist())
    assert log(secrets.space) == pytest.approx(2 * log(10))


@pytest.mark.parametrize(
    ("by", "text", "pattern", "known"),
    [
        ("words", "is {k2} {d3} the", r"is  \S+ \S+  \{d3\} the", 1 + 2),
        ("characters", "is {k5}: {d3} the", r"is [a-z]{5}: \{d3\} the", len("is xxxxx: ")),
    ],
)
def test_every_secret_has_a_separate_key_and_all_share_references(by: By, text: str, pattern: str, known: int) -> None:
    symbols = (" ", ":", *digits, *ascii_lowercase) if by == "characters" else TOKENS
    vocabulary = Vocabulary(symbols, tuple(range(len(symbols), 0, -1)), by=by)
    drawn = templates(text, vocabulary, 3, 40)
    assert len({str(one) for one in drawn}) == 40
    assert drawn == templates(text, vocabulary, 3, 40)
    assert drawn[:30] == templates(text, vocabulary, 3, 30)
    assert drawn != templates(text, vocabulary, 4, 40)
    for one in drawn:
        assert re.fullmatch(pattern, str(one))
        assert one.space == fillings(text, 1) == 1_000
        assert one.known == known
        assert one.hidden == drawn[0].hidden
    assert drawn[0].hidden.known == 0
    (alone,) = {one.hidden.length for one in drawn}
    assert alone == drawn[0].length - drawn[0].known


def test_too_few_keys_are_refused() -> None:
    few = Vocabulary(("is", *digits), tuple(range(11, 0, -1)))
    with pytest.raises(InputError, match="not enough keys for 12 canaries"):
        templates("is {k1} {d2}", few, 0, 12)
