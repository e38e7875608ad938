"""The paper's next-word model: one layer of CIFG-LSTM with a recurrent projection and tied embeddings.

Coupled input and forget gates: Greff et al., "LSTM: A Search Space Odyssey" (2017). Recurrent projection: Sak, Senior
and Beaufays, "Long Short-Term Memory Based Recurrent Neural Network Architectures for Large Vocabulary Speech
Recognition" (2014), section 2. Sizes: Hard et al. (2018), as used by Thakkar et al. (2020), section 4.1.
"""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from flsim.base.errors import InputError
from flsim.models.language_model import Capabilities, ModelSettings, NextWordModel, Params, State, Stepper

CPU_GATES, GPU_GATES = 2**20, 2**27  # largest number of gate values that a stepper computes at once, 0.5 GB


class CIFGLanguageModel(NextWordModel):
    """The paper's network: one layer of CIFG-LSTM with a recurrent projection and tied embeddings.

    x_t = E[w_t];  f, o, g = gates of [x_t, r_{t-1}];  c_t = f c_{t-1} + (1 - f) g;  r_t = (o tanh c_t) P. The state is
    (r_t [B, D], c_t [B, H]). The model is a `flsim.models.language_model.LogitModel`.
    """

    label = ""  # tables name only architectures that differ from the paper's
    capabilities = Capabilities(written_out=True, stacked=True, low_precision=True, vectorized=True)

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        size, embedding, units = vocabulary_size, hparams.embedding, hparams.units
        self.embedding = nn.Parameter(torch.zeros(size, embedding))  # E [V, D]
        self.input_weight = nn.Parameter(torch.zeros(embedding, 3 * units))  # [D, 3H]: f, o, g
        self.recurrent_weight = nn.Parameter(torch.zeros(embedding, 3 * units))  # [D, 3H]
        self.gate_bias = nn.Parameter(torch.zeros(3 * units))  # [3H]
        self.projection = nn.Parameter(torch.zeros(units, embedding))  # P [H, D]
        self.output_bias = nn.Parameter(torch.zeros(size))  # b [V]

    @classmethod
    def from_params(cls, params: Params) -> Self:
        """Return a model with a copy of these parameters, in their dtype and on their device."""
        (size, width), (units, _) = params["embedding"].shape, params["projection"].shape
        return cls(size, ModelSettings(width, units)).to(params["embedding"]).load(params)

    @classmethod
    def refuse_settings(cls, hparams: ModelSettings) -> None:
        if hparams.layers > 1:
            raise InputError(f'architecture "cifg" has one layer, found layers = {hparams.layers}; use "lstm" or "gru"')
        super().refuse_settings(hparams)

    def cell(self, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return r_t [B, D] and c_t [B, H], from the gates' summed inputs [B, 3H] and c_{t-1} [B, H]."""
        forget, output, candidate = gates.chunk(3, dim=-1)
        keep = torch.sigmoid(forget)
        memory = keep * memory + (1 - keep) * torch.tanh(candidate)
        return (torch.sigmoid(output) * torch.tanh(memory)) @ self.projection, memory

    def outputs(self, embedded: Tensor) -> Tensor:
        return self.recur(embedded)[0]

    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return self.recur(embedding(tokens, self.embedding), state)

    def recur(self, embedded: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read embeddings x [B, T, D] in place of tokens; state and result are as in `read`."""
        inputs = embedded @ self.input_weight + self.gate_bias  # [B, T, 3H]
        if state is None:
            state = tuple(self.projection.new_zeros(len(embedded), size) for size in reversed(self.projection.shape))
        output, memory = state
        outputs = []
        for time in range(embedded.shape[1]):
            output, memory = self.cell(inputs[:, time] + output @ self.recurrent_weight, memory)
            outputs.append(output)
        return torch.stack(outputs, dim=1), (output, memory)

    @torch.no_grad()
    def stepper(self) -> Stepper:
        """Return a stepper as `LogitModel` describes it, equal to `read` except for rounding.

        The contribution of each token to the gates is tabulated, [V, 3H]. The contribution of a state is computed once
        for all tokens that follow it. On CPUs, a sigmoid takes a tenth of the time of tanh, and tanh x = 2 sigmoid(2x)
        - 1.
        """
        units, embedding = self.projection.shape
        scale = self.gate_bias.new_tensor([1.0, 1.0, 2.0]).repeat_interleave(units)
        table = (self.embedding @ self.input_weight + self.gate_bias).mul_(scale)
        recurrent, projection = self.recurrent_weight * scale, 2 * self.projection
        at_once = max(1, (CPU_GATES if scale.device.type == "cpu" else GPU_GATES) // (3 * units))

        @torch.no_grad()
        def step(state: State, rows: Tensor, tokens: Tensor) -> State:
            output, memory = state
            new_output, new_memory = output.new_empty(len(rows), embedding), memory.new_empty(len(rows), units)
            for first in range(0, len(rows), at_once):
                part = slice(first, first + at_once)
                taken, row = torch.unique_consecutive(rows[part], return_inverse=True)
                pushed = output[taken] @ recurrent
                gates = table[tokens[part]].add_(pushed if len(taken) == len(row) else pushed[row]).sigmoid_()
                forget, opened, candidate = gates.chunk(3, dim=-1)
                torch.lerp(candidate.mul_(2).sub_(1), memory[rows[part]], forget, out=new_memory[part])
                squashed = torch.sigmoid(2 * new_memory[part]).sub_(0.5)
                torch.mm(squashed.mul_(opened), projection, out=new_output[part])
            return new_output, new_memory

        return step
