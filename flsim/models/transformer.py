"""A small causal transformer as a next-word model, from torch's own layers.

Vaswani et al., "Attention Is All You Need" (2017), the decoder without its attention to an encoder, and with the norm
before each part instead of after it (Xiong et al., 2020) and GELU (Hendrycks and Gimpel, 2016), as in GPT-2.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from flsim.base.errors import InputError
from flsim.models.language_model import ModelSettings, NextWordModel, State


class TransformerLanguageModel(NextWordModel):
    """One layer or more of causal self-attention with GELU, norms before each part, and tied embeddings.

    The layers read sqrt(D) E[w_t] + position t, and a norm follows them. Positions are sinusoids, so that there is no
    longest sequence. The state is (tokens,), int64 [B, tokens so far]. Each step reads them anew, since records are
    short.
    """

    label = "Transformer"

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        size = hparams.embedding
        self.embedding = nn.Parameter(torch.zeros(vocabulary_size, size))  # E [V, D]
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size, hparams.heads, hparams.units, 0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(hparams.layers)
        )
        self.norm = nn.LayerNorm(size)
        for weight in (*self.layers.parameters(), *self.norm.parameters()):
            nn.init.zeros_(weight)
        self.output_bias = nn.Parameter(torch.zeros(vocabulary_size))  # b [V]

    @classmethod
    def refuse_settings(cls, hparams: ModelSettings) -> None:
        super().refuse_settings(hparams)
        if hparams.embedding % hparams.heads:
            raise InputError(
                f"embedding must be a multiple of heads, found embedding = {hparams.embedding} and "
                f"heads = {hparams.heads}"
            )

    def outputs(self, embedded: Tensor) -> Tensor:
        length, size = embedded.shape[1:]
        values: Tensor = size**0.5 * embedded + sinusoids(length, size).to(embedded)
        causal = nn.Transformer.generate_square_subsequent_mask(length, embedded.device, embedded.dtype)
        for layer in self.layers:
            values = layer(values, src_mask=causal, is_causal=True)
        normed: Tensor = self.norm(values)
        return normed

    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        whole = tokens if state is None else torch.cat([state[0], tokens], dim=1)
        return self.outputs(embedding(whole, self.embedding))[:, -tokens.shape[1] :], (whole,)

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return self.start(torch.cat([state[0], tokens[:, None]], dim=1))


def sinusoids(length: int, size: int) -> Tensor:
    """Return sin and cos of t / 10,000^(2i / size), in turn, float64 [length, size]; Vaswani et al., section 3.5."""
    time = torch.arange(length, dtype=torch.float64)
    angles = time[:, None] / 10_000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :size]
