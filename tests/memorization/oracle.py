"""This module computes the model's equations in numpy, one token and gate at a time, and attacks by enumeration."""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.data.records import Layout
from flsim.measures.memorization.score import RandomSampler
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import LanguageModel, NextWordModel, State

D, H = 3, 5
LAYOUT = Layout(8)  # four words
WORDS = range(1, LAYOUT.words + 1)
Phrase = tuple[int, ...]


def rank(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> int:
    return RandomSampler(model, references).rank(prefix, continuation).rank


def decide(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> bool:
    return RandomSampler(model, references).decide(prefix, continuation)


def random_model(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> CIFGLanguageModel:
    """Return a model with weights and biases from a normal distribution with this standard deviation."""
    model = CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(D, H)).to(dtype)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=tuple(parameter.shape))))
    return model


@dataclass
class Noisy:
    """A model that adds other noise to its log-probabilities at each call, and counts the sequences that it reads."""

    model: CIFGLanguageModel
    noise: float = 0.0
    read: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        return self.shake(self.model.start(tokens))

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        self.read += len(tokens)
        return self.shake(self.model.step(state, tokens))

    def shake(self, answer: tuple[State, Tensor]) -> tuple[State, Tensor]:
        state, log_probs = answer
        return state, log_probs * torch.from_numpy(1 + self.noise * self.rng.random(tuple(log_probs.shape)))


def all_phrases(length: int) -> list[Phrase]:
    return list(product(WORDS, repeat=length))


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return (1 + np.tanh(x / 2)) / 2


class Oracle:
    """Scores computed only from the equations: P(s|p) = sum of -log Pr(s_i | p, s_<i)."""

    def __init__(self, model: NextWordModel) -> None:
        self.p = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
        self.costs = cache(self._costs)

    def _costs(self, tokens: Phrase) -> NDArray[np.float64]:
        """Return -log Pr of each token after the given tokens, [V]."""
        p, c, r = self.p, np.zeros(H), np.zeros(D)
        for token in tokens:
            x = p["embedding"][token]
            f_in, o_in, g_in = (
                x @ p["input_weight"][:, k * H : (k + 1) * H]
                + r @ p["recurrent_weight"][:, k * H : (k + 1) * H]
                + p["gate_bias"][k * H : (k + 1) * H]
                for k in range(3)
            )
            f, o, g = sigmoid(f_in), sigmoid(o_in), np.tanh(g_in)
            c = f * c + (1 - f) * g
            r = (o * np.tanh(c)) @ p["projection"]
        logits = p["embedding"] @ r + p["output_bias"]
        return np.asarray(logits.max() + np.log(np.exp(logits - logits.max()).sum()) - logits)

    def score(self, prefix: Phrase, phrase: Phrase) -> float:
        return float(sum(self.costs(prefix + phrase[:i])[word] for i, word in enumerate(phrase)))

    def scores(self, prefix: Phrase, phrases: list[Phrase]) -> NDArray[np.float64]:
        return np.array([self.score(prefix, phrase) for phrase in phrases])

    def beam(self, prefix: Phrase, length: int, width: int) -> tuple[list[Phrase], list[float], float]:
        """Return phrases and scores, best first, and the smallest difference of scores that decided an order."""
        beams: list[tuple[float, Phrase]] = [(0.0, ())]
        closest = np.inf
        for _ in range(length):
            longer = [(score + self._costs(prefix + s)[word], (*s, word)) for score, s in beams for word in WORDS]
            longer.sort(key=lambda scored: scored[0])
            closest = min([closest, *(b[0] - a[0] for a, b in pairwise(longer[: width + 1]))])
            beams = longer[:width]
        return [s for _, s in beams], [float(score) for score, _ in beams], float(closest)
