"""Tests check that foreign models are measured like models of flsim, and refused if their outputs are inconsistent."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers import MakeCorpus
from networks import loud_network
from torch import Tensor, nn
from torch.nn.functional import one_hot

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.spec import Canary
from flsim.data.records import Layout
from flsim.measures.memorization.exposure import draw, space_exposure
from flsim.measures.memorization.score import RandomSampler, Template, references
from flsim.measures.memorization.search import Enumeration, beam_searches, enumerate_space, shortest_path
from flsim.models.architectures import CIFGLanguageModel
from flsim.models.language_model import LanguageModel, State
from flsim.runs.evaluate import Checked, EvaluationHParams, audit, evaluate, from_forward, refuse_inconsistent

V, SEED = 12, 5
LAYOUT = Layout(V)
HPARAMS = EvaluationHParams(references=300)
CANARIES = [
    Canary(f"c{index}", tokens, 0.1, 1.0)
    for index, tokens in enumerate([(1, 2, 3, 4), (8, 8, 1, 5), (2, 6, 7, 1, 4), (3, 3, 3)])
]


@pytest.fixture
def ours() -> CIFGLanguageModel:
    return loud_network(V, 3)


class Means(nn.Module):
    """A causal model without recurrence: logits add the mean row of all tokens so far and the last token's row."""

    def __init__(self, size: int = V) -> None:
        super().__init__()
        draw = stream(0, "test model").normal(0, 3, (2, size, V))
        self.of_all, self.of_last = (nn.Parameter(torch.from_numpy(part)) for part in draw)

    def forward(self, tokens: Tensor) -> Tensor:
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.of_all[tokens].cumsum(1) / counts + self.of_last[tokens]


def test_audit_and_evaluate_give_equal_rows_for_models_of_flsim(
    ours: CIFGLanguageModel, make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]
) -> None:
    """The rows of `audit` equal those of `evaluate`, for the model and for only its forward, with utility by token."""
    test = make_corpus(train=[[[1]]], test=random_users(10, 6, 8), vocabulary_size=V).split("test")
    expected = {(row.metric, row.canary): row.value for row in evaluate(ours, CANARIES, test, HPARAMS, SEED, "a", 0)}
    for model in (ours, from_forward(ours, context=30)):
        rows = audit(model, CANARIES, LAYOUT, HPARAMS, SEED, "a", test=test)
        assert {(row.run, row.round) for row in rows} == {("a", 0)}
        assert {(row.metric, row.canary): row.value for row in rows} == pytest.approx(expected, rel=1e-12)
        assert list(expected) == [(row.metric, row.canary) for row in rows]


def test_without_test_users_there_is_no_utility(ours: CIFGLanguageModel) -> None:
    metrics = {row.metric for row in audit(ours, CANARIES, LAYOUT, HPARAMS)}
    assert metrics == {"log_perplexity", "rank", "exposure", "rs", "bs", "references"}


def test_a_module_is_read_in_evaluation_mode_and_without_gradients() -> None:
    module = nn.Sequential(Means(), nn.Dropout(0.5))
    first, second = (audit(from_forward(module.train(), 9), CANARIES, LAYOUT, HPARAMS) for _ in range(2))
    assert first == second
    _, log_probs = Checked(from_forward(module, 9), LAYOUT, "m").start(torch.tensor([[1]]))
    assert not log_probs.requires_grad


def test_steps_of_from_forward_equal_forward_of_the_complete_sequence() -> None:
    """Expected values are a softmax of the module's last logits, also for sequences longer than the context."""
    module = Means()
    tokens = torch.from_numpy(stream(1, "test").integers(0, V, (5, 7)))
    for context in (1, 2, 4, 7, 20):
        model = from_forward(module, context)
        state, found = model.start(tokens[:, :3])
        for read in range(3, 8):
            expected = module(tokens[:, max(0, read - context) : read])[:, -1].softmax(-1).log()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            if read < 7:
                state, found = model.step(state, tokens[:, read])


class ByHead:
    """A model of flsim whose state has further axes, like a KV cache."""

    def __init__(self, model: CIFGLanguageModel) -> None:
        self.model = model

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        (output, memory), log_probs = self.model.start(tokens)
        return (output[:, None], memory[:, :, None]), log_probs

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        (output, memory), log_probs = self.model.step((state[0][:, 0], state[1][:, :, 0]), tokens)
        return (output[:, None], memory[:, :, None]), log_probs


PREFIX, CONTINUATION = torch.tensor([LAYOUT.bos, 1]), torch.tensor([2, 3, 4])
AMONG, WORDS = references(SEED, 300, 3, LAYOUT), Template.words(LAYOUT, 3)
WHOLE = Enumeration(338, 512)  # of `enumerate_space`, which tests/memorization compare with brute force
ATTACKS: dict[str, Callable[[LanguageModel], object]] = {
    "random sampling": lambda model: RandomSampler(model, AMONG).rank(PREFIX, CONTINUATION),
    "decision": lambda model: [
        RandomSampler(model, AMONG[:count]).decide(PREFIX, CONTINUATION) for count in (1, 2, 300)
    ],
    "beam search": lambda model: beam_searches(model, PREFIX[None], WORDS, 5)[0].tolist(),
    "shortest path": lambda model: shortest_path(model, PREFIX, WORDS).tokens,
    "generation": lambda model: draw(model, PREFIX, WORDS, {1.0: 1.0}, 200, stream(SEED, "test")).words.tolist(),
    "importance sampling": lambda model: (
        space_exposure(model, PREFIX, CONTINUATION, WORDS, 20_000, SEED).bits == pytest.approx(WHOLE.exposure, abs=0.13)
    ),
    "enumeration": lambda model: enumerate_space(model, PREFIX, CONTINUATION, WORDS),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_gives_equal_results_for_any_form_of_state(ours: CIFGLanguageModel, attack: str) -> None:
    forward, by_head = Checked(from_forward(ours, 9), LAYOUT, "forward"), Checked(ByHead(ours), LAYOUT, "by head")
    models: list[LanguageModel] = [ours, forward, by_head]
    found = [ATTACKS[attack](model) for model in models]
    assert found[0] == found[1] == found[2]
    if attack == "enumeration":
        assert found[0] == WHOLE
    if attack == "importance sampling":
        assert found[0]


class Says:
    """A stateless model that returns the same given log-probabilities for every sequence."""

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        return (tokens[:, -1],), self.log_probs.expand(len(tokens), -1)

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return (tokens,), self.log_probs.expand(len(tokens), -1)


UNIFORM = torch.full((V,), -math.log(V), dtype=torch.float64)
WITHOUT_PAD = torch.cat([torch.tensor([-math.inf]), torch.full((V - 1,), -math.log(V - 1))])


def test_a_special_token_may_have_the_probability_zero() -> None:
    rows = {(row.metric, row.canary): row.value for row in audit(Says(WITHOUT_PAD), CANARIES[:1], LAYOUT, HPARAMS)}
    assert rows["log_perplexity", "c0"] == pytest.approx(3 * math.log(V - 1), rel=1e-6)
    assert rows["rank", "c0"] == 301  # all 300 references tie


def changed(index: int, value: float) -> Tensor:
    return UNIFORM.where(torch.arange(V) != index, torch.tensor(value, dtype=torch.float64))


@pytest.mark.parametrize(
    ("log_probs", "message"),
    [
        (changed(0, math.nan), "start returned log-probs that are NaN"),
        (UNIFORM + 0.01, r"sum to 1.01005, not to 1; logits need a log_softmax"),
        (torch.zeros(V).long(), "must return log-probs, a tensor of floats"),
        (UNIFORM[:-1], r"log-probs \[2, 11\], but the vocabulary requires \[2, 12\]"),
        (WITHOUT_PAD.roll(1), "gave a word the probability 0"),
    ],
)
def test_invalid_log_probs_are_refused(log_probs: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=f"^mine: .*{message}"):
        audit(Says(log_probs), CANARIES, LAYOUT, HPARAMS, name="mine")


def test_rounding_of_half_precision_is_accepted() -> None:
    """bfloat16 rounds -log 12 to -2.484375, with the sum 1.0005. The sum 1.016 of -2.46875 in float32 is refused."""
    refuse_inconsistent(Checked(Says(UNIFORM.bfloat16()), LAYOUT, "half"))
    with pytest.raises(InputError, match="not to 1"):
        refuse_inconsistent(Checked(Says(torch.full((V,), -2.46875)), LAYOUT, "single"))


class Cached:
    """A correct model whose state is the sum of all tokens; subclasses add errors."""

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        state = (tokens.sum(1),)
        return state, self.say(state)

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        state = (state[0] + tokens,)
        return state, self.say(state)

    def say(self, state: State) -> Tensor:
        return (4.0 * one_hot(state[0] % V, V)).log_softmax(-1)


def test_a_model_with_a_consistent_state_is_accepted() -> None:
    refuse_inconsistent(Checked(Cached(), LAYOUT, "sound"))


class InTheModel(Cached):
    """A model with its cache in the model: the cache does not follow the rows of the state."""

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        self.kept = super().start(tokens)[0]
        return (tokens[:, 0],), self.say(self.kept)

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        self.kept = (self.kept[0] + tokens,)
        return state, self.say(self.kept)


class Forgets(Cached):
    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return super().step((state[0] * 0,), tokens)


class Rolls(Cached):
    """A model whose output differs at each call, as with dropout."""

    calls = 0

    def say(self, state: State) -> Tensor:
        self.calls += 1
        return super().say((state[0] + self.calls,))


class Raises(Cached):
    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        raise RuntimeError("no memory\nfor this")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (InTheModel(), "step and start give different outputs"),
        (Forgets(), "step and start give different outputs"),
        (Rolls(), "differs between two calls with the same input; switch off dropout"),
        (Raises(), "step failed with RuntimeError: no memory"),
        (from_forward(nn.Identity(), 3), r"forward must map tokens \[B, T\] to logits \[B, T, V\]; for \[2, 3\]"),
        (from_forward(Means(5), 3), "start failed with IndexError"),
        (Means(), r"returned a Means, which has no method start; .*from_forward\(module, context\)"),
    ],
)
def test_models_that_violate_the_protocol_are_refused(model: Cached, message: str) -> None:
    with pytest.raises(InputError, match=f"^mine: .*{message}"):
        audit(model, CANARIES, LAYOUT, HPARAMS, name="mine")


def test_a_context_without_tokens_and_a_canary_within_the_prefix_are_refused() -> None:
    with pytest.raises(InputError, match="context must be at least 1 token, found 0"):
        from_forward(Means(), 0)
    with pytest.raises(InputError, match="prefix of 3 covers all words of canary c3"):
        audit(Cached(), CANARIES, LAYOUT, EvaluationHParams(10, prefix=3))
