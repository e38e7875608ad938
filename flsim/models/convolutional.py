"""A causal convolutional network as a next-word model, from torch's own layers.

Causal convolutions whose dilation doubles from layer to layer: van den Oord et al., "WaveNet" (2016), section 2.1.
ReLU and residual connections: Bai, Kolter and Koltun, "An Empirical Evaluation of Generic Convolutional and Recurrent
Networks for Sequence Modeling" (2018), section 3. The Secret Sharer (Carlini et al., 2019, table 1) compares such
networks with recurrent ones, but does not state the width of their filters.
"""

from torch import Tensor, cat, nn, zeros
from torch.nn.functional import embedding, pad

from flsim.base.errors import InputError
from flsim.models.language_model import ModelSettings, NextWordModel, State

MOST = 2**16  # tokens of a reach; layers double it, and each pads a sequence by half of it


class ConvolutionalLanguageModel(NextWordModel):
    """One layer or more of causal dilated convolutions with ReLU, residual connections, and tied embeddings.

    h_1 = relu(f_1 * x), and h_l = h_{l-1} + relu(f_l * h_{l-1}) for l > 1. Filters f_l read positions t, t - 2^(l-1),
    t - 2 * 2^(l-1) and so on, `filter_width` of them; before a sequence are zeros. r_t = h_t P of the last layer, and
    h_t itself where H = D. The state is the last (tokens,) that an output depends on, int64 [B, at most `reach_of`].
    """

    label = "CNN"

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        size, units = hparams.embedding, hparams.units
        self.embedding = nn.Parameter(zeros(vocabulary_size, size))  # E [V, D]
        self.filters = nn.ModuleList(
            nn.Conv1d(units if layer else size, units, hparams.filter_width, dilation=2**layer)
            for layer in range(hparams.layers)
        )
        for weight in self.filters.parameters():
            nn.init.zeros_(weight)
        self.projection = None if units == size else nn.Parameter(zeros(units, size))  # P [H, D]
        self.output_bias = nn.Parameter(zeros(vocabulary_size))  # b [V]

    @classmethod
    def refuse_settings(cls, hparams: ModelSettings) -> None:
        super().refuse_settings(hparams)
        if (reach := reach_of(hparams)) > MOST:
            raise InputError(f"filters would reach over {reach:,} tokens, of at most {MOST:,}; set fewer layers")

    def outputs(self, embedded: Tensor) -> Tensor:
        values = embedded.transpose(1, 2)  # [B, D, T]
        for layer, filters in enumerate(self.filters):
            before = (self.hparams.filter_width - 1) * 2**layer
            read: Tensor = filters(pad(values, (before, 0))).relu()
            values = values + read if layer else read
        hidden = values.transpose(1, 2)  # [B, T, H]
        return hidden if self.projection is None else hidden @ self.projection

    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        whole = tokens if state is None else cat([state[0], tokens], dim=1)
        return self.outputs(embedding(whole, self.embedding))[:, -tokens.shape[1] :], (
            whole[:, -reach_of(self.hparams) :],
        )

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return self.start(cat([state[0], tokens[:, None]], dim=1))


def reach_of(hparams: ModelSettings) -> int:
    """Return the number of tokens that an output depends on: 1 + (filter_width - 1) (2^layers - 1)."""
    reach: int = 1 + (hparams.filter_width - 1) * (2**hparams.layers - 1)
    return reach
