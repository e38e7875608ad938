"""Tests compare utility with a loop over records, and rows of evaluations with scores of all continuations."""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from helpers import MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import loud_network
from populations import InMemory

from flsim.base.errors import Diverged, InputError
from flsim.canaries.spec import Canary
from flsim.data.corpus import Split
from flsim.data.records import Layout
from flsim.measures import prediction as module
from flsim.measures.memorization.exposure import exposure
from flsim.measures.memorization.score import log_perplexity, references
from flsim.measures.prediction import Utility, utility
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.results.rows import Row
from flsim.runs.evaluate import EvaluationHParams, evaluate

LAYOUT = Layout(12, record_words=6)


def some_users(seed: int, users: int = 7) -> list[list[list[int]]]:
    """Return users with records of 0 to 6 words, including OOV."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(1, LAYOUT.oov, rng.integers(0, 7), endpoint=True).tolist() for _ in range(rng.integers(0, 9))]
        for _ in range(users)
    ]


def some_model(seed: int) -> CIFGLanguageModel:
    return CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(4, 6)).initialize(seed).double()


def naive(model: CIFGLanguageModel, users: list[list[list[int]]]) -> Utility:
    """Return utility computed one record and one target at a time."""
    loss, tokens, correct_tokens, words, correct_words = 0.0, 0, 0, 0, 0
    for record in (record for user in users for record in user):
        sequence = [LAYOUT.bos, *record] + [LAYOUT.eos] * (len(record) < LAYOUT.record_words)
        logits = model(torch.tensor([sequence]))[0].detach().numpy()
        for scores, target in zip(logits[:-1], sequence[1:], strict=True):
            loss += float(np.log(np.exp(scores).sum()) - scores[target])
            correct = int(np.argmax(scores) == target)
            tokens += 1
            correct_tokens += correct
            if target not in (LAYOUT.oov, LAYOUT.eos):
                words += 1
                correct_words += correct
    return Utility(loss, tokens, correct_tokens, words, correct_words)


@settings(max_examples=8, derandomize=True)
@given(seed=st.integers(0, 10**6), pool=st.sampled_from([1, 40, 10**6]), logits=st.sampled_from([1, 200, 10**6]))
def test_utility_equals_a_loop_over_records(seed: int, pool: int, logits: int) -> None:
    """Utility is equal in any batches of empty and full records, OOV, and users without records."""
    users, model = some_users(seed), some_model(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "POOL_WORDS", pool)
        patch.setattr(module, "LOGITS", logits)
        found, expected = utility(model, InMemory(LAYOUT, users)), naive(model, users)
    assert found.cross_entropy == pytest.approx(expected.cross_entropy, rel=1e-9)
    for name in ("tokens", "correct_tokens", "words", "correct_words"):
        assert getattr(found, name) == getattr(expected, name), name


def test_utility_of_chosen_users_reads_only_their_records() -> None:
    users, model = some_users(1), some_model(1)
    found, expected = utility(model, InMemory(LAYOUT, users), [4, 2]), naive(model, [users[2], users[4]])
    assert found.tokens == expected.tokens
    assert found.cross_entropy == pytest.approx(expected.cross_entropy)


def test_utility_of_a_model_that_always_predicts_word_1() -> None:
    """The model predicts 4 of 6 words and 4 of 10 tokens of the targets 1 1 2 EOS, 3 1 EOS and 1 OOV EOS."""
    model = CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(4, 6))
    with torch.no_grad():
        model.output_bias[1] = 1.0
    measured = utility(model, InMemory(LAYOUT, [[[1, 1, 2], [3, 1]], [[1, LAYOUT.oov]]]))
    assert (measured.accuracy, measured.accuracy_all_tokens) == (4 / 6, 4 / 10)
    # log-probabilities: 1 - log Z for word 1, -log Z for the other 11 tokens, with Z = e + 11
    assert measured.perplexity == pytest.approx((math.e + 11) / math.exp(4 / 10))


def test_short_records_are_not_padded_to_the_length_of_long_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of 60 positions, 200 records of one word and 2 of 6 words have at most 32 positions of padding."""
    monkeypatch.setattr(module, "LOGITS", 60 * LAYOUT.vocabulary_size)
    users = InMemory(LAYOUT, [[[1]] * 100 + [[1, 2, 3, 4, 5, 6]]] * 2)
    batches = list(module._batches(users, range(2)))
    assert max(part.inputs.size for part in batches) <= 60
    assert sum(int((part.targets == LAYOUT.pad).sum()) for part in batches) <= 32
    assert sum(int((part.targets != LAYOUT.pad).sum()) for part in batches) == 2 * (100 * 2 + 6)


def test_utility_without_records_is_nan() -> None:
    nothing = utility(some_model(0), InMemory(LAYOUT, []))
    assert nothing == Utility()
    assert all(math.isnan(value) for value in (nothing.accuracy, nothing.accuracy_all_tokens, nothing.perplexity))


def test_perplexity_beyond_float64_is_infinite() -> None:
    assert Utility(cross_entropy=1e6, tokens=1).perplexity == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    model = some_model(0)
    with torch.no_grad():
        model.output_bias[3] = value
    with pytest.raises(Diverged, match="cross-entropy is not finite"):
        utility(model, InMemory(LAYOUT, some_users(0)))


V, SEED = 12, 5
HPARAMS = EvaluationHParams(references=300, beam_width=5)
CANARIES = [
    Canary(f"c{index}", tokens, 0.1, 1.0)
    for index, tokens in enumerate([(1, 2, 3, 4), (8, 8, 1, 5), (2, 6, 7, 1), (3, 3, 3, 3)])
]
CANARY_METRICS = {"log_perplexity", "rank", "exposure", "rs", "bs"}
MODEL_METRICS = {"references", "accuracy", "accuracy_all_tokens", "perplexity"}


@pytest.fixture
def model() -> CIFGLanguageModel:
    return loud_network(V, 3)


@pytest.fixture
def population(make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]) -> Split:
    users = random_users(10, 6, 8)
    return make_corpus(train=users[:1], test=users, vocabulary_size=V).split("test")


def measure(
    model: CIFGLanguageModel,
    test: Split,
    canaries: Sequence[Canary] = CANARIES,
    hparams: EvaluationHParams = HPARAMS,
    run: str = "a",
    round_: int = 12,
) -> list[Row]:
    return evaluate(model, canaries, test, hparams, SEED, run, round_)


def by_key(rows: list[Row]) -> dict[tuple[str, str], float]:
    return {(row.metric, row.canary): row.value for row in rows}


def test_one_row_for_each_metric_of_each_canary_and_of_the_model(model: CIFGLanguageModel, population: Split) -> None:
    rows = measure(model, population)
    expected = {*product(CANARY_METRICS, ["c0", "c1", "c2", "c3"]), *product(MODEL_METRICS, [""])}
    assert len(rows) == len(expected)
    assert set(by_key(rows)) == expected
    assert {(row.run, row.round) for row in rows} == {("a", 12)}


def test_an_evaluation_of_only_utility_equals_a_complete_one(model: CIFGLanguageModel, population: Split) -> None:
    whole = measure(model, population)
    alone = measure(model, population, hparams=EvaluationHParams(300, utility_only=True))
    assert {row.metric for row in alone} == set(MODEL_METRICS)
    assert [row for row in alone if row.metric != "references"] == [
        row for row in whole if row.canary == "" and row.metric != "references"
    ]


@pytest.mark.parametrize("prefix", [1, 2, 3])
def test_values_follow_from_scores(model: CIFGLanguageModel, population: Split, prefix: int) -> None:
    """Expected values come from complete scores of R and of all continuations."""
    values = by_key(measure(model, population, hparams=EvaluationHParams(300, beam_width=8**3, prefix=prefix)))
    layout = population.layout
    among = references(SEED, 300, 4 - prefix, layout)
    everything = torch.tensor(list(product(range(1, 9), repeat=4 - prefix)))
    for canary in CANARIES:
        known = torch.tensor((layout.bos, *canary.tokens[:prefix]))
        own = log_perplexity(model, known, torch.tensor([canary.tokens[prefix:]]))
        rank = 1 + int((log_perplexity(model, known, among) <= own + 1e-9).sum())
        best = everything[log_perplexity(model, known, everything).argmin()]
        assert values["log_perplexity", canary.id] == pytest.approx(float(own), rel=1e-12)
        assert values["rank", canary.id] == rank
        assert values["exposure", canary.id] == exposure(rank, 300)
        assert values["rs", canary.id] == (rank == 1)
        assert values["bs", canary.id] == (tuple(best.tolist()) == canary.tokens[prefix:])
    assert values["references", ""] == 300
    assert values["perplexity", ""] == pytest.approx(utility(model, population).perplexity)


def test_the_order_of_canaries_does_not_matter(model: CIFGLanguageModel, population: Split) -> None:
    rows = measure(model, population)
    assert measure(model, population, canaries=CANARIES[::-1]) == rows
    alone = measure(model, population, canaries=CANARIES[2:3])
    assert alone == [row for row in rows if row.canary in ("c2", "")]


def test_values_are_equal_for_all_rounds_and_runs(model: CIFGLanguageModel, population: Split) -> None:
    """Each evaluation draws the same references, and no evaluation changes a parameter."""
    before = [parameter.clone() for parameter in model.parameters()]
    first, second = measure(model, population), measure(model, population, run="b", round_=13)
    assert by_key(first) == by_key(second)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert {(row.run, row.round) for row in second} == {("b", 13)}


def test_each_evaluation_draws_the_same_test_users(model: CIFGLanguageModel, population: Split) -> None:
    some, again, all_, more = (
        by_key(measure(model, population, canaries=[], hparams=EvaluationHParams(1, test_users=count)))
        for count in (3, 3, None, 1000)
    )
    assert some == again
    assert all_ == more
    assert some["perplexity", ""] != all_["perplexity", ""]


@pytest.mark.parametrize(("name", "value"), [("embedding", math.nan), ("gate_bias", -math.inf)])
def test_a_diverged_model_is_refused(model: CIFGLanguageModel, population: Split, name: str, value: float) -> None:
    """The model is refused even if no canary and no user reads the value, the embedding of the last token."""
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    with pytest.raises(Diverged, match=rf"^round 12: 1 of [0-9,]+ values of parameter {name} are not finite$"):
        measure(model, population)


def test_a_model_that_overflows_is_refused(model: CIFGLanguageModel, population: Split) -> None:
    """Parameters are finite, but the difference of two logits overflows float64."""
    with torch.no_grad():
        model.output_bias[1] = 1.5e308
        model.output_bias[2] = -1.5e308
    with pytest.raises(Diverged, match=r"^round 12: a log-probability is not finite"):
        measure(model, population)


def test_inputs_that_do_not_match_are_refused(
    model: CIFGLanguageModel, population: Split, make_corpus: MakeCorpus
) -> None:
    with pytest.raises(InputError, match="prefix of 4 covers all words of canary c0"):
        measure(model, population, hparams=EvaluationHParams(10, prefix=4))
    with pytest.raises(InputError, match="no test users"):
        measure(model, make_corpus(train=[[[1]]], vocabulary_size=V, name="empty").split("test"))
    with pytest.raises(InputError, match="has 12 tokens, but the test users' corpus has 13"):
        measure(model, make_corpus(train=[[[1]]], test=[[[1]]], vocabulary_size=13, name="other").split("test"))
