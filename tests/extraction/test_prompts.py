"""One-word prompts and near-verbatim text, against beam search, of width 1 where it is greedy, one string at a time."""

from functools import cache

import numpy as np
import pytest
import torch
from membership.before_model import LAYOUT, drawn, untrained

from flsim.attacks.extraction.extract import bleu, edit_distances, is_elicited, near_verbatim, one_word_continuations
from flsim.data.records import Records
from flsim.measures.memorization.score import Template
from flsim.measures.memorization.search import beam_search

CPU = torch.device("cpu")
LENGTH = 4


@pytest.mark.parametrize("architecture", ["cifg", "transformer", "hf"])
def test_every_word_is_tried_as_a_prompt(architecture: str) -> None:
    model = untrained(architecture, 1)
    continuations = one_word_continuations(model, LENGTH, LAYOUT, CPU)
    words = range(LAYOUT.first_word, LAYOUT.last_word + 1)
    prompts, template = [torch.tensor([LAYOUT.bos, word]) for word in words], Template.tokens(LAYOUT, LENGTH)
    written = [beam_search(model, prompt, template, 1)[0][0].tolist() for prompt in prompts]
    assert continuations.tolist() == written
    other = [(written[0][0] + 1) % LAYOUT.vocabulary_size, *written[0][1:]]
    strings = [[7, 8, *written[5]], [7, 8, *written[9][:2]], [7, 8, *other]]
    expected = [True, True, other in written]
    assert is_elicited(continuations, Records.from_lists(strings), 2).tolist() == expected


@pytest.mark.parametrize("width", [1, 3])
def test_near_verbatim_is_one_other_word_at_most(width: int) -> None:
    """Strings of all lengths: what a beam writes with none, one and two words changed, and random ones."""
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
    """The definition: the last tokens are equal, or one of them is inserted, deleted or replaced."""
    if not one or not other:
        return len(one) + len(other)
    replaced = slow_distance(one[:-1], other[:-1]) + (one[-1] != other[-1])
    return min(replaced, slow_distance(one[:-1], other) + 1, slow_distance(one, other[:-1]) + 1)


def test_edit_distances_of_texts_of_two_lengths() -> None:
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
def test_bleu_is_that_of_sacrebleu(written: str, wanted: str, score: float) -> None:
    """sacrebleu 2.6.0: sentence_bleu(..., smooth_method="none", tokenize="none", use_effective_order=True)."""
    assert bleu([*map(ord, written)], [*map(ord, wanted)]) == pytest.approx(score, abs=1e-6)
