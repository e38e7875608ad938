"""Tests of the three published token layouts, from words to measured values.

The expected ids follow the layouts' rules with W words: tff PAD 0, words 1 to W, OOV W + 1, BOS W + 2, EOS W + 3;
FedJAX PAD 0, BOS 1, EOS 2, words 3 to W + 2, OOV W + 3; FedML PAD 0, words 1 to W, BOS W + 1, EOS W + 2, OOV W + 3.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from populations import InMemory

from flsim.base.errors import InputError
from flsim.canaries.planting import draw_canaries
from flsim.canaries.spec import CanaryHParams, draw_phrase
from flsim.data.records import LAYOUTS, TOKENIZER, Layout, Vocabulary
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.data.tokenizer import FILE, FOLDER, TABLE, TokenMap
from flsim.measures.memorization.score import Template, references
from flsim.measures.prediction import utility
from flsim.models.architectures import CIFGLanguageModel, ModelHParams

# Expected ids for 5 words: first and last word, OOV, BOS, EOS.
IDS = {"tff": (1, 5, 6, 7, 8), "fedjax": (3, 7, 8, 1, 2), "fedml": (1, 5, 8, 6, 7)}
EVERY = pytest.mark.parametrize("name", LAYOUTS)


def layout_of(name: str) -> Layout:
    return Layout(9, record_words=4, name=name)


@EVERY
def test_every_token_has_the_id_of_its_layout(name: str) -> None:
    layout = layout_of(name)
    assert (layout.first_word, layout.last_word, layout.oov, layout.bos, layout.eos) == IDS[name]
    assert (layout.pad, layout.words) == (0, 5)


@EVERY
def test_words_to_ids_and_back(name: str, tmp_path: Path) -> None:
    first, _, oov, bos, eos = IDS[name]
    vocabulary = Vocabulary.most_frequent({"b": 9, "a": 9, "c": 7, "d": 3, "e": 2, "f": 1}, 9, name)
    vocabulary.write(tmp_path / "vocabulary.tsv")
    assert Vocabulary.read(tmp_path / "vocabulary.tsv", name) == vocabulary
    assert vocabulary.encode(["e", "nowhere", "a", "b"]) == [first + 4, oov, first, first + 1]
    assert vocabulary.decode([0, first + 2, oov, bos, eos]) == ["<pad>", "c", "<oov>", "<bos>", "<eos>"]


@EVERY
def test_canaries_and_references_are_the_same_words_in_every_layout(name: str) -> None:
    """Draws use all ids of words and no other ids, and a draw means the same words in every layout."""
    layout, tff, (first, last, *_) = layout_of(name), layout_of("tff"), IDS[name]
    shift = layout.first_word - tff.first_word
    phrases = [draw_phrase(0, index, 0, 5, layout) for index in range(50)]
    assert {word for phrase in phrases for word in phrase} == set(range(first, last + 1))
    assert phrases == [tuple(word + shift for word in draw_phrase(0, index, 0, 5, tff)) for index in range(50)]
    assert Template.words(layout, 3).allowed == (tuple(range(first, last + 1)),) * 3
    assert torch.equal(references(0, 200, 4, layout), references(0, 200, 4, tff) + shift)
    assert set(references(0, 200, 4, layout).flatten().tolist()) == set(range(first, last + 1))


@EVERY
def test_utility_counts_words_and_not_special_tokens(name: str) -> None:
    """The 9 targets are 6 words, an OOV and two EOS; the model always predicts the second word, and is right twice."""
    first, last, oov, _, _ = IDS[name]
    layout = layout_of(name)
    model = CIFGLanguageModel(layout.vocabulary_size, ModelHParams(3, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.output_bias[first + 1] = 50.0
    measured = utility(model, InMemory(layout, [[[first, first + 1, oov], [first + 1, last, last, first]], [[]]]))
    assert (measured.tokens, measured.words) == (9, 6)
    assert (measured.correct_tokens, measured.correct_words) == (2, 2)


def test_a_synthetic_corpus_is_the_same_text_in_every_layout(tmp_path: Path) -> None:
    texts, canaries = [], []
    for name in LAYOUTS:
        hparams = SyntheticHParams(users=30, test_users=2, heldout_users=2, vocabulary_size=100, layout=name)
        corpus = make_synthetic(tmp_path / name, hparams, seed=0)
        assert corpus.layout == corpus.split("test").layout == Layout(100, name=name)
        train, layout = corpus.split("train"), corpus.layout
        counts = np.bincount(train.tokens, minlength=100)
        assert counts[layout.first_word : layout.last_word + 1].tolist() == list(corpus.vocabulary.counts)
        assert counts.sum() == sum(corpus.vocabulary.counts)
        texts.append(corpus.vocabulary.decode(train.tokens.tolist()))
        drawn = draw_canaries(corpus, CanaryHParams(p_u=(0.5,), p_e=(0.5,)), 0)
        canaries.append([corpus.vocabulary.decode(canary.tokens) for canary in drawn])
    assert texts[0] == texts[1] == texts[2]
    assert canaries[0] == canaries[1] == canaries[2]


# Token ids of corpora with a tokenizer, and ids of their models.


# PAD 0; words 1, 2, 3; pieces 4, 5; OOV 6; BOS 7; EOS 8.
LAYOUT = Layout(9, name=TOKENIZER, pieces=2)


def opened(folder: Path, ids: list[int], layout: Layout = LAYOUT) -> TokenMap | None:
    np.array(ids, "<i8").tofile(folder / TABLE)
    (folder / FOLDER).mkdir()
    (folder / FOLDER / FILE).write_text("{}")
    return TokenMap.open(folder, layout)


def test_words_come_before_pieces() -> None:
    assert (LAYOUT.words, LAYOUT.first_word, LAYOUT.last_word) == (3, 1, 3)
    assert (LAYOUT.pad, LAYOUT.oov, LAYOUT.bos, LAYOUT.eos) == (0, 6, 7, 8)


@pytest.mark.parametrize(
    "arguments", [{"name": "tff", "pieces": 1}, {"name": TOKENIZER, "pieces": 5}, {"name": TOKENIZER, "pieces": -1}]
)
def test_impossible_pieces_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError, match="cannot have"):
        Layout(9, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "rows", "from_model"),
    [
        ([5, 2, 0, 4, 1, 3, 5, 5, 5], 6, [2, 4, 1, 5, 3, LAYOUT.oov]),  # one id for all, as in GPT-2
        ([0, 4, 5, 6, 7, 8, 1, 2, 3], 9, [0, 6, 7, 8, 1, 2, 3, 4, 5]),  # a separate id for each
    ],
)
def test_special_tokens(tmp_path: Path, ids: list[int], rows: int, from_model: list[int]) -> None:
    assert TokenMap.open(tmp_path, Layout(9)) is None, "of a corpus without a tokenizer"
    with pytest.raises(InputError, match=r"tokens\.i64: cannot be read"):
        TokenMap.open(tmp_path, LAYOUT)
    tokens = opened(tmp_path, ids)
    assert tokens is not None
    assert (tokens.rows, tokens.from_model.tolist()) == (rows, from_model)


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 9], [-1, 0, 1, 2, 3, 4, 5, 6, 7]])
def test_a_damaged_table_is_refused(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(InputError, match=r"tokens\.i64: not an id"):
        opened(tmp_path, ids)
