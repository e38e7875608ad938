"""LSTM and GRU next-word models, of one layer or more, from torch's own cells.

LSTM: Hochreiter and Schmidhuber (1997), with forget gates. GRU: Cho et al. (2014). The Secret Sharer (Carlini et al.,
2019) compares them with others, and one layer with two.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from flsim.models.language_model import Capabilities, ModelSettings, NextWordModel, State, Stepper


class RecurrentLanguageModel(NextWordModel):
    """Torch's recurrent cells with tied embeddings.

    r_t = h_t P of the last layer's h_t, and h_t itself where H = D.

    The state is (r [B, D], h, c), for a GRU (r, h), with h and c [B, layers x H]. The model is a
    `flsim.models.language_model.LogitModel`.
    """

    cell: ClassVar[type[nn.LSTM | nn.GRU]]

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        size, units = hparams.embedding, hparams.units
        self.embedding = nn.Parameter(torch.zeros(vocabulary_size, size))  # E [V, D]
        self.cells: nn.RNNBase = self.cell(size, units, hparams.layers, batch_first=True)
        for weight in self.cells.parameters():
            nn.init.zeros_(weight)
        self.projection = None if units == size else nn.Parameter(torch.zeros(units, size))  # P [H, D]
        self.output_bias = nn.Parameter(torch.zeros(vocabulary_size))  # b [V]

    def outputs(self, embedded: Tensor) -> Tensor:
        return self.recur(embedded)[0]

    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return self.recur(embedding(tokens, self.embedding), state)

    def recur(self, embedded: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read embeddings [B, T, D] in the place of tokens; state and result are those of `read`."""
        past, is_gru = None, isinstance(self.cells, nn.GRU)
        if state is not None:
            layered = (len(state[0]), self.hparams.layers, self.hparams.units)
            past = tuple(part.reshape(layered).transpose(0, 1).contiguous() for part in state[1:])
        hidden, new = self.cells(embedded, past[0] if past and is_gru else past)
        outputs: Tensor = hidden if self.projection is None else hidden @ self.projection
        return outputs, (outputs[:, -1], *(part.transpose(0, 1).flatten(1) for part in ((new,) if is_gru else new)))

    def stepper(self) -> Stepper:
        """Return a stepper as `flsim.models.language_model.LogitModel` describes it."""

        @torch.no_grad()
        def step(state: State, rows: Tensor, tokens: Tensor) -> State:
            return self.read(tokens[:, None], tuple(part[rows] for part in state))[1]

        return step


class LSTMLanguageModel(RecurrentLanguageModel):
    """One layer or more of torch's LSTM, tied embeddings, and a projection where units and embedding differ."""

    label, cell = "LSTM", nn.LSTM
    capabilities = Capabilities(written_out=True)


class GRULanguageModel(RecurrentLanguageModel):
    """One layer or more of torch's GRU, tied embeddings, and a projection where units and embedding differ."""

    label, cell = "GRU", nn.GRU
    capabilities = Capabilities(written_out=True)
