"""A model that tells its output apart from its logits is ranked by bounds: the same ranks, for less work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memorization.oracle import decide, rank
from torch import Tensor

from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization.random_sampling import TIE, references
from flsim.measures.memorization.score import log_perplexity
from flsim.models import cifg
from flsim.models.architectures import ModelHParams
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.language_model import LanguageModel, State, Stepper


class Plain:
    """The same model, of which only the two methods are known."""

    def __init__(self, model: LanguageModel) -> None:
        self.start, self.step = model.start, model.step


class Counting(CIFGLanguageModel):
    """The model itself; says how many states it has stepped to, and how many at once."""

    def __init__(self, vocabulary_size: int, hparams: ModelHParams) -> None:
        super().__init__(vocabulary_size, hparams)
        self.stepped: list[int] = []

    def stepper(self) -> Stepper:
        step = super().stepper()

        def counted(state: State, rows: Tensor, tokens: Tensor) -> State:
            self.stepped.append(len(rows))
            return step(state, rows, tokens)

        return counted


def lively(model: CIFGLanguageModel, layout: Layout, seed: int, scale: float) -> CIFGLanguageModel:
    """Initialized, its output scaled up, with biases of a Zipf law: costs vary as those of a trained model do."""
    model.initialize(seed)
    rng = stream(seed, "test biases")
    with torch.no_grad():
        model.projection.mul_(scale)
        model.gate_bias.copy_(torch.from_numpy(rng.normal(size=tuple(model.gate_bias.shape))))
        model.output_bias[layout.first_word : layout.last_word + 1] = -torch.arange(1.0, layout.words + 1).log() / 2
    return model


@settings(max_examples=12, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 1.0, 5.0, 20.0]),
    words=st.integers(1, 5),
    prefix=st.lists(st.integers(1, 36), max_size=2),
    summed=st.sampled_from([2, 16, 40]),
    likely=st.sampled_from([(1, 3), (200, 201), ()]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_the_plain_path(
    seed: int,
    scale: float,
    words: int,
    prefix: list[int],
    summed: int,
    likely: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """For references of one to five words, canaries in R and out of it; `decide` whatever it looks at first."""
    layout = Layout(40)
    model = lively(CIFGLanguageModel(40, ModelHParams(4, 7)), layout, seed, scale).to(dtype)
    among = references(seed, 300, words, layout)
    scores = log_perplexity(model, p := torch.tensor([layout.bos, *prefix]), among)
    order = scores.argsort()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.measures.memorization.random_sampling.SUMMED", summed)
        patch.setattr("flsim.measures.memorization.random_sampling.LIKELY", likely)
        for place in (0, 1, 150, 299):
            canary, own = among[order[place]], scores[order[place]]
            near = 1e3 * TIE * torch.finfo(dtype).eps * (1 + own)  # closer, and rounding could decide
            others = among[((scores - own).abs() > near) | (among == canary).all(1)]
            for r in (others, others[(others != canary).any(1)]):
                found = rank(model, p, canary, r)
                assert found == rank(Plain(model), p, canary, r)
                assert decide(model, p, canary, r) == decide(Plain(model), p, canary, r) == (found == 1)


def test_pieces_bound_what_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, states, model = Layout(1_000), 100, Counting(1_000, ModelHParams(12, 16))
    lively(model, layout, seed=1, scale=5.0)
    prefix, among = torch.tensor([layout.bos]), references(0, 1_000, 3, layout)
    canary = among[500]
    whole = rank(model, prefix, canary, among)
    model.stepped = []
    monkeypatch.setattr(score, "CPU_FLOATS", states * model.projection.shape[0])
    monkeypatch.setattr(cifg, "CPU_GATES", 30 * model.gate_bias.numel())
    assert rank(model, prefix, canary, among) == whole
    assert max(model.stepped) == states
