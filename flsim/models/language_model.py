"""What a language model is: to an attacker, and to training and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from flsim.base.rng import stream
from flsim.models.hparams import ModelHParams

Params = dict[str, Tensor]
State = tuple[Tensor, ...]
Stepper = Callable[[State, Tensor, Tensor], State]
FLOATS = 2**26  # that reading beginnings holds in a layer at once, about: 256 MB


class LanguageModel(Protocol):
    """What an attacker needs of a model; every tensor of a state has one row per sequence."""

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        """Read int64 [N, L >= 1] tokens from an empty state; the state and the next token's log-probs [N, V]."""
        ...

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        """Read one more token, int64 [N], each; the new state and the next token's log-probs [N, V]."""
        ...


@runtime_checkable
class LogitModel(LanguageModel, Protocol):
    """A model whose logits are linear in an output: r E' + b. Optional: attacks are faster where they know r alone.

    The first tensor of its states is r [N, D].
    """

    def output_layer(self) -> tuple[Tensor, Tensor]:
        """E [V, D] and b [V]."""
        ...

    def stepper(self) -> Stepper:
        """A function (state, rows, tokens) -> state that reads tokens [M], each after one row of the state.

        It does without logits, and is made once for many steps of a model that stays as it is. Equal `rows`, int64
        [M], that are neighbors share work.
        """
        ...


class NextWordModel(nn.Module, ABC):
    """One of our models, all zeros at first: of outputs r over embeddings of E, logits r E' + b.

    Shapes: B batch, T time, D embedding, H units, V vocabulary. Every architecture has, among its parameters, E [V, D]
    as `embedding` and b [V] as `output_bias`. Position t of the outputs depends on the tokens up to t alone.
    """

    embedding: nn.Parameter
    output_bias: nn.Parameter

    def __init__(self, hparams: ModelHParams) -> None:
        super().__init__()
        self.hparams = hparams

    @abstractmethod
    def outputs(self, embedded: Tensor) -> Tensor:
        """R [B, T, D] over embeddings [B, T, D], from an empty state."""

    @abstractmethod
    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """R [B, T, D] over tokens int64 [B, T >= 1] that follow the state (None: the empty one), and the new state."""

    def initialize(self, seed: int) -> Self:
        """Glorot-uniform weights, embeddings of unit expected norm, gains 1, biases 0: a function of the seed alone."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(float(name.endswith("weight")))  # a LayerNorm's, which scales
                    continue
                one, other = parameter.shape
                bound = (3 / other) ** 0.5 if name == "embedding" else (6 / (one + other)) ** 0.5
                values = stream(seed, "model", name).uniform(-bound, bound, parameter.shape)
                parameter.copy_(torch.from_numpy(values))
        return self

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return outputs @ self.embedding.T + self.output_bias

    def output_layer(self) -> tuple[Tensor, Tensor]:
        """See `LogitModel`, which a model is that has a stepper too."""
        return self.embedding.detach(), self.output_bias.detach()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of the token that follows each of tokens int64 [B, T]."""
        return self.logits(self.outputs(embedding(tokens, self.embedding)))

    @torch.no_grad()
    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        """See `LanguageModel`; sequences are read in pieces that bound memory."""
        rows = max(1, FLOATS // (tokens.shape[1] * 4 * max(self.hparams.units, self.hparams.embedding)))
        pieces = [self.read(piece) for piece in torch.split(tokens, rows)]
        last = torch.cat([outputs[:, -1] for outputs, _ in pieces])
        state = tuple(torch.cat(parts) for parts in zip(*(state for _, state in pieces), strict=True))
        return state, self.logits(last).log_softmax(-1)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        """See `LanguageModel`."""
        outputs, state = self.read(tokens[:, None], state)
        return state, self.logits(outputs[:, -1]).log_softmax(-1)
