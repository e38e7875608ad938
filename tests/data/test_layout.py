"""The three published token layouts, each on the whole path from words to what is measured.

The expected ids are the layouts' own rules, with W words: tff PAD 0, words 1 to W, OOV W + 1, BOS W + 2, EOS W + 3;
FedJAX PAD 0, BOS 1, EOS 2, words 3 to W + 2, OOV W + 3; FedML PAD 0, words 1 to W, BOS W + 1, EOS W + 2, OOV W + 3.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from populations import InMemory

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.planting import draw_canaries
from flsim.canaries.spec import CanaryHParams, draw_phrase
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.data.vocabulary import LAYOUTS, Layout, Vocabulary
from flsim.measures.memorization.beam_search import beam_search
from flsim.measures.memorization.random_sampling import references
from flsim.measures.memorization.score import log_perplexity
from flsim.measures.memorization.template import Template
from flsim.measures.prediction import utility
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams

# Of 5 words: first and last word, OOV, BOS, EOS.
IDS = {"tff": (1, 5, 6, 7, 8), "fedjax": (3, 7, 8, 1, 2), "fedml": (1, 5, 8, 6, 7)}
EVERY = pytest.mark.parametrize("name", LAYOUTS)


def layout_of(name: str) -> Layout:
    return Layout(9, record_words=4, name=name)


def model_of(layout: Layout) -> CIFGLanguageModel:
    """Normal weights; special tokens are far likelier than words."""
    model = CIFGLanguageModel(layout.vocabulary_size, ModelHParams(3, 5)).double()
    rng = stream(0, "model of a layout")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=tuple(parameter.shape))))
        model.output_bias[[layout.pad, layout.oov, layout.bos, layout.eos]] += 3.0
    return model


@EVERY
def test_where_everything_is(name: str) -> None:
    layout = layout_of(name)
    assert (layout.first_word, layout.last_word, layout.oov, layout.bos, layout.eos) == IDS[name]
    assert (layout.pad, layout.words) == (0, 5)
    words = range(layout.first_word, layout.last_word + 1)
    assert sorted([layout.pad, *words, layout.oov, layout.bos, layout.eos]) == list(range(9))


def test_layouts_that_nobody_published_are_refused() -> None:
    with pytest.raises(InputError, match="layout must be one of tff, fedjax, fedml, found 'pfl'"):
        Layout(9, name="pfl")


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
    """Ids that stand for words, and all of them; a draw that means the same word whatever the layout."""
    layout, tff = layout_of(name), layout_of("tff")
    shift = layout.first_word - tff.first_word
    phrases = [draw_phrase(0, index, 0, 5, layout) for index in range(50)]
    assert {word for phrase in phrases for word in phrase} == set(range(layout.first_word, layout.last_word + 1))
    assert phrases == [tuple(word + shift for word in draw_phrase(0, index, 0, 5, tff)) for index in range(50)]
    assert torch.equal(references(0, 200, 4, layout), references(0, 200, 4, tff) + shift)
    assert set(references(0, 200, 4, layout).flatten().tolist()) == set(range(layout.first_word, layout.last_word + 1))


@EVERY
def test_beam_search_enumerates_words_and_nothing_else(name: str) -> None:
    layout = layout_of(name)
    model, bos = model_of(layout), torch.tensor([layout.bos])
    phrases = torch.tensor(list(product(range(layout.first_word, layout.last_word + 1), repeat=3)))
    scores, best = log_perplexity(model, bos, phrases).sort()
    assert float(scores.diff().min()) > 1e-9
    found, found_scores = beam_search(model, bos, Template.words(layout, 3), 5**3)
    assert torch.equal(found, phrases[best])
    torch.testing.assert_close(found_scores, scores)


@EVERY
def test_utility_counts_words_and_not_special_tokens(name: str) -> None:
    """9 targets: 6 words, an OOV and two EOS, of a model that always says its second word, which is right twice."""
    first, last, oov, _, _ = IDS[name]
    layout = layout_of(name)
    model = model_of(layout)
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
        train = corpus.split("train")
        counts = np.bincount(train.tokens, minlength=100)
        assert counts.nonzero()[0].min() >= corpus.layout.first_word
        assert counts.nonzero()[0].max() <= corpus.layout.last_word
        assert counts[corpus.layout.first_word : corpus.layout.last_word + 1].tolist() == list(corpus.vocabulary.counts)
        texts.append(corpus.vocabulary.decode(train.tokens.tolist()))
        drawn = draw_canaries(corpus, CanaryHParams(p_u=(0.5,), p_e=(0.5,)), 0)
        canaries.append([corpus.vocabulary.decode(canary.tokens) for canary in drawn])
    assert texts[0] == texts[1] == texts[2]
    assert canaries[0] == canaries[1] == canaries[2]
