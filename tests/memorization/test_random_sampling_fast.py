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
from flsim.measures.memorization.random_sampling import TIE, RandomSampler, references
from flsim.measures.memorization.score import log_perplexity
from flsim.models import cifg
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import ModelHParams
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


@settings(max_examples=30, derandomize=True)
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


@pytest.fixture(scope="module")
def full_size() -> Counting:
    return lively(Counting(10_000, ModelHParams()), Layout(10_000), seed=1, scale=5.0)  # type: ignore[return-value]


@pytest.mark.slow
def test_the_full_model_against_straightforward_scoring(full_size: Counting) -> None:
    """20,000 references; ranks from 1 to the last; the likely ones cost a fraction of the unlikely ones' states."""
    layout = Layout(10_000)
    prefix, among = torch.tensor([layout.bos, 4_321]), references(0, 20_000, 4, layout)
    scores = log_perplexity(full_size, prefix, among)
    order = scores.argsort()
    best = full_size.start(prefix[None])[1][0].argmax()
    likely = torch.stack([best, *among[order[0], 1:]])
    assert float(scores.std()) > 1
    work = {}
    for place in (0, 20, 3_000, 19_999):
        canary, own = among[order[place]], scores[order[place]]
        full_size.stepped = []
        found = RandomSampler(full_size, among).rank(prefix, canary)
        work[place] = sum(full_size.stepped)
        assert found.log_perplexity == pytest.approx(float(own), rel=1e-5)
        least, most = ((scores <= own + slack).sum() for slack in (-1e-4, 1e-4))
        assert 1 + least <= found.rank <= 1 + most
        assert most - least <= 20
        full_size.stepped = []
        assert not decide(full_size, prefix, canary, among)
        assert place == 0 or sum(full_size.stepped) <= 3 * 2**9
    assert work[0] < work[20] < work[3_000] < work[19_999]
    memorized = rank(full_size, prefix, likely, among) == 1
    assert memorized == bool((scores > log_perplexity(full_size, prefix, likely[None])).all())
    assert decide(full_size, prefix, likely, among) == memorized


def test_pieces_bound_what_is_held_at_once(full_size: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, states = Layout(10_000), 100
    prefix, among = torch.tensor([layout.bos]), references(0, 1_000, 3, layout)
    canary = among[500]
    whole = rank(full_size, prefix, canary, among)
    full_size.stepped = []
    monkeypatch.setattr(score, "CPU_FLOATS", states * full_size.projection.shape[0])
    monkeypatch.setattr(cifg, "CPU_GATES", 30 * full_size.gate_bias.numel())
    assert rank(full_size, prefix, canary, among) == whole
    assert max(full_size.stepped) == states
