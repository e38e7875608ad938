"""The architectures of networks with their settings, and the paper's CIFG-LSTM."""

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, cat, nn, zeros
from torch.nn.functional import embedding, pad

from flsim.base.errors import InputError, first_line
from flsim.base.extensions import CustomName, is_custom, refuse_options, resolve_class, short_name
from flsim.base.settings import settings
from flsim.models import language_model
from flsim.models.hf import OF_BASE, RECORDED, HuggingFaceModel

# The paper's next-word model: one layer of CIFG-LSTM with a recurrent projection and tied embeddings.
#
# Coupled input and forget gates: Greff et al., "LSTM: A Search Space Odyssey" (2017). Recurrent projection: Sak, Senior
# and Beaufays, "Long Short-Term Memory Based Recurrent Neural Network Architectures for Large Vocabulary Speech
# Recognition" (2014), section 2. Sizes: Hard et al. (2018), as used by Thakkar et al. (2020), section 4.1.


CPU_GATES, GPU_GATES = 2**20, 2**27  # largest number of gate values that a stepper computes at once, 0.5 GB


class CIFGLanguageModel(language_model.NextWordModel):
    """The paper's network: one layer of CIFG-LSTM with a recurrent projection and tied embeddings.

    x_t = E[w_t];  f, o, g = gates of [x_t, r_{t-1}];  c_t = f c_{t-1} + (1 - f) g;  r_t = (o tanh c_t) P. The state is
    (r_t [B, D], c_t [B, H]). The model is a `flsim.models.language_model.LogitModel`.
    """

    label = ""  # tables name only architectures that differ from the paper's
    capabilities = language_model.Capabilities(written_out=True, stacked=True, low_precision=True, vectorized=True)

    def __init__(self, vocabulary_size: int, hparams: language_model.ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        size, embedding, units = vocabulary_size, hparams.embedding, hparams.units
        self.embedding = nn.Parameter(torch.zeros(size, embedding))  # E [V, D]
        self.input_weight = nn.Parameter(torch.zeros(embedding, 3 * units))  # [D, 3H]: f, o, g
        self.recurrent_weight = nn.Parameter(torch.zeros(embedding, 3 * units))  # [D, 3H]
        self.gate_bias = nn.Parameter(torch.zeros(3 * units))  # [3H]
        self.projection = nn.Parameter(torch.zeros(units, embedding))  # P [H, D]
        self.output_bias = nn.Parameter(torch.zeros(size))  # b [V]

    @classmethod
    def from_params(cls, params: language_model.Params) -> Self:
        """Return a model with a copy of these parameters, in their dtype and on their device."""
        (size, width), (units, _) = params["embedding"].shape, params["projection"].shape
        return cls(size, language_model.ModelSettings(width, units)).to(params["embedding"]).load(params)

    @classmethod
    def refuse_settings(cls, hparams: language_model.ModelSettings) -> None:
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

    def read(self, tokens: Tensor, state: language_model.State | None = None) -> tuple[Tensor, language_model.State]:
        return self.recur(embedding(tokens, self.embedding), state)

    def recur(self, embedded: Tensor, state: language_model.State | None = None) -> tuple[Tensor, language_model.State]:
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
    def stepper(self) -> language_model.Stepper:
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
        def step(state: language_model.State, rows: Tensor, tokens: Tensor) -> language_model.State:
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


# The other built-in architectures, and the construction of networks by their names.


class TransformerLanguageModel(language_model.NextWordModel):
    """One or more layers of causal self-attention with GELU, norms before each part, and tied embeddings.

    Vaswani et al., "Attention Is All You Need" (2017), the decoder without attention to an encoder. As in GPT-2, the
    norm is before each part (Xiong et al., 2020), with GELU (Hendrycks and Gimpel, 2016). The input is sqrt(D) E[w_t] +
    position t, and a norm follows the last layer. Positions are sinusoids, so sequences can have any length. The state
    is (tokens,), int64 [B, tokens so far]. Each step reads all tokens again, because records are short.
    """

    label = "Transformer"

    def __init__(self, vocabulary_size: int, hparams: language_model.ModelSettings) -> None:
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
    def refuse_settings(cls, hparams: language_model.ModelSettings) -> None:
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

    def read(self, tokens: Tensor, state: language_model.State | None = None) -> tuple[Tensor, language_model.State]:
        whole = tokens if state is None else torch.cat([state[0], tokens], dim=1)
        return self.outputs(embedding(whole, self.embedding))[:, -tokens.shape[1] :], (whole,)

    step = language_model.TrainableModel.step


def sinusoids(length: int, size: int) -> Tensor:
    """Return sin and cos of t / 10,000^(2i / size) in turn, float64 [length, size]; Vaswani et al., section 3.5."""
    time = torch.arange(length, dtype=torch.float64)
    angles = time[:, None] / 10_000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :size]


class RecurrentLanguageModel(language_model.NextWordModel):
    """Torch's recurrent cells with tied embeddings.

    LSTM: Hochreiter and Schmidhuber (1997), with forget gates. GRU: Cho et al. (2014). The Secret Sharer (Carlini et
    al., 2019) compares these cells. r_t = h_t P for h_t of the last layer, or r_t = h_t if H = D. The state is (r [B,
    D], h, c), for a GRU (r, h), with h and c [B, layers x H]. The model is a `flsim.models.language_model.LogitModel`.
    """

    cell: ClassVar[type[nn.LSTM | nn.GRU]]

    def __init__(self, vocabulary_size: int, hparams: language_model.ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        # Gradients of cuDNN's recurrences repeat their bits only with this (torch's page on nn.LSTM). On an H100 that
        # other processes used at the same time, they did not repeat without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
        size, units = hparams.embedding, hparams.units
        self.embedding = nn.Parameter(torch.zeros(vocabulary_size, size))  # E [V, D]
        self.cells: nn.RNNBase = self.cell(size, units, hparams.layers, batch_first=True)
        for weight in self.cells.parameters():
            nn.init.zeros_(weight)
        self.projection = None if units == size else nn.Parameter(torch.zeros(units, size))  # P [H, D]
        self.output_bias = nn.Parameter(torch.zeros(vocabulary_size))  # b [V]

    def outputs(self, embedded: Tensor) -> Tensor:
        return self.recur(embedded)[0]

    def read(self, tokens: Tensor, state: language_model.State | None = None) -> tuple[Tensor, language_model.State]:
        return self.recur(embedding(tokens, self.embedding), state)

    def recur(self, embedded: Tensor, state: language_model.State | None = None) -> tuple[Tensor, language_model.State]:
        """Read embeddings [B, T, D] in place of tokens; state and result are as in `read`."""
        past, is_gru = None, isinstance(self.cells, nn.GRU)
        if state is not None:
            layered = (len(state[0]), self.hparams.layers, self.hparams.units)
            past = tuple(part.reshape(layered).transpose(0, 1).contiguous() for part in state[1:])
        hidden, new = self.cells(embedded, past[0] if past and is_gru else past)
        outputs: Tensor = hidden if self.projection is None else hidden @ self.projection
        return outputs, (outputs[:, -1], *(part.transpose(0, 1).flatten(1) for part in ((new,) if is_gru else new)))

    def stepper(self) -> language_model.Stepper:

        @torch.no_grad()
        def step(state: language_model.State, rows: Tensor, tokens: Tensor) -> language_model.State:
            return self.read(tokens[:, None], tuple(part[rows] for part in state))[1]

        return step


class LSTMLanguageModel(RecurrentLanguageModel):
    """One or more layers of torch's LSTM, tied embeddings, and a projection if units and embedding differ."""

    label, cell = "LSTM", nn.LSTM
    capabilities = language_model.Capabilities(written_out=True)


class GRULanguageModel(RecurrentLanguageModel):
    """One or more layers of torch's GRU, tied embeddings, and a projection if units and embedding differ."""

    label, cell = "GRU", nn.GRU
    capabilities = language_model.Capabilities(written_out=True)


MOST = 2**16  # tokens; each layer doubles the receptive field and pads sequences by half of it


class ConvolutionalLanguageModel(language_model.NextWordModel):
    """One or more layers of causal dilated convolutions with ReLU, residual connections, and tied embeddings.

    Van den Oord et al., "WaveNet" (2016), section 2.1; ReLU and residual connections: Bai, Kolter and Koltun, "An
    Empirical Evaluation of Generic Convolutional and Recurrent Networks for Sequence Modeling" (2018), section 3. h_1 =
    relu(f_1 * x), and h_l = h_{l-1} + relu(f_l * h_{l-1}) for l > 1. Filter f_l reads `filter_width` positions t, t -
    2^(l-1), t - 2 * 2^(l-1) and so on; positions before the sequence are zero. r_t = h_t P of the last layer, or r_t =
    h_t if H = D. The state is (tokens,), the tokens that the next output needs, int64 [B, at most `reach_of`].
    """

    label = "CNN"

    def __init__(self, vocabulary_size: int, hparams: language_model.ModelSettings) -> None:
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
    def refuse_settings(cls, hparams: language_model.ModelSettings) -> None:
        super().refuse_settings(hparams)
        if (reach := reach_of(hparams)) > MOST:
            raise InputError(f"the receptive field has {reach:,} tokens, more than {MOST:,}; set fewer layers")

    def outputs(self, embedded: Tensor) -> Tensor:
        values = embedded.transpose(1, 2)  # [B, D, T]
        for layer, filters in enumerate(self.filters):
            before = (self.hparams.filter_width - 1) * 2**layer
            read: Tensor = filters(pad(values, (before, 0))).relu()
            values = values + read if layer else read
        hidden = values.transpose(1, 2)  # [B, T, H]
        return hidden if self.projection is None else hidden @ self.projection

    def read(self, tokens: Tensor, state: language_model.State | None = None) -> tuple[Tensor, language_model.State]:
        whole = tokens if state is None else cat([state[0], tokens], dim=1)
        return self.outputs(embedding(whole, self.embedding))[:, -tokens.shape[1] :], (
            whole[:, -reach_of(self.hparams) :],
        )

    step = language_model.TrainableModel.step


def reach_of(hparams: language_model.ModelSettings) -> int:
    """Return the number of tokens that an output depends on: 1 + (filter_width - 1) (2^layers - 1)."""
    reach: int = 1 + (hparams.filter_width - 1) * (2**hparams.layers - 1)
    return reach


BUILT_IN: Mapping[str, type[language_model.TrainableModel]] = {
    "cifg": CIFGLanguageModel,
    "lstm": LSTMLanguageModel,
    "gru": GRULanguageModel,
    "transformer": TransformerLanguageModel,
    "convolutional": ConvolutionalLanguageModel,
    "hf": HuggingFaceModel,
}


def class_of(architecture: str) -> type[language_model.TrainableModel]:
    """Return the class of a built-in architecture, or of a custom architecture, whose file is executed."""
    return resolve_class(architecture, BUILT_IN, "architecture", language_model.TrainableModel)  # type: ignore[type-abstract]


def declared(architecture: str) -> language_model.Capabilities | None:
    """Return the capabilities of a built-in architecture; None for a custom one, because no code is executed."""
    return None if is_custom(architecture) else class_of(architecture).capabilities


def with_low_precision() -> str:
    """Return the names of the built-in architectures that train in low precision, as text."""
    return " or ".join(f'"{name}"' for name, kind in BUILT_IN.items() if kind.capabilities.low_precision)


def build(vocabulary_size: int, hparams: language_model.ModelSettings) -> language_model.TrainableModel:
    """Return a model of these settings in evaluation mode, before `initialize`; built-in models are all zeros.

    This function also sets cuDNN to float32 and to deterministic algorithms in this process. By default, torch allows
    cuDNN to round factors to TF32, which changes training and ranks.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    return class_of(hparams.architecture)(vocabulary_size, hparams).eval()


def without_values(vocabulary_size: int, hparams: language_model.ModelSettings) -> language_model.TrainableModel:
    """Return a model whose tensors have shapes and need no memory; a custom one has values, which its code may read."""
    with torch.device("cpu" if is_custom(hparams.architecture) else "meta"):
        return build(vocabulary_size, hparams)


def weights_of(vocabulary_size: int, hparams: language_model.ModelSettings, is_trained: bool = True) -> int:
    """Return the number of trained weights, or of frozen ones; InputError if a tensor is too large to be addressed."""
    try:
        weights = without_values(vocabulary_size, hparams).parameters()
        return sum(value.numel() for value in weights if value.requires_grad == is_trained)
    except (RuntimeError, TypeError) as error:  # an overflow of 64 bits
        raise InputError(f"model: a tensor is too large ({first_line(error)}); set smaller sizes") from error


def restore(
    params: language_model.Params, hparams: language_model.ModelSettings, vocabulary_size: int
) -> language_model.TrainableModel:
    """Return a model of these settings with a copy of the trained parameters, in their dtype and on their device."""
    model, like = build(vocabulary_size, hparams), language_model.representative(params)
    is_of_its_dtype = language_model.representative(model.trainable).dtype == like.dtype
    model = model.to(like.device) if is_of_its_dtype else model.to(like.device, like.dtype)
    return model.load(params)


# The settings of the network: architecture and sizes.


@settings
class ModelHParams(language_model.ModelSettings):
    """Architecture and sizes of the network; see `flsim.models.architectures`.

    Attributes:
        embedding: Size D of the word embeddings, which are also the weights of the output layer. Unit: values.
        units: Number H of cells in each layer. For a transformer, the number of hidden units in each feed-forward part;
            for a convolutional network, the number of filters. Unit: cells.
        architecture: Network: the paper's "cifg", another built-in network, or a custom subclass of
            `flsim.models.language_model.TrainableModel`.
        layers: Number of layers; must be 1 for "cifg". Unit: layers.
        heads: Number of attention heads of a transformer; must divide `embedding`. Unit: heads.
        filter_width: Number of tokens that a filter of a convolutional network reads, e.g. 5. Unit: tokens.
        options: Options of a custom architecture, numbers or text, e.g. { scale = 2.5 }. Unit: none.
        path: Of architecture "hf": folder of the base model, with config.json and .safetensors files, relative to the
            configuration file.
        digest: Of architecture "hf": sha256 of the files in `path`, which the run folder records; changed files are
            refused.
        tokens: Of architecture "hf": file of the base's token id for each token id of the corpus, which the run folder
            records.
        config: Of architecture "hf", in place of `path`: settings of a base with random weights, by transformers'
            names, e.g. { model_type = "gpt2", n_layer = 2 }. Unit: none.
        dtype: Of architecture "hf" with `lora`: type of the base's values.
        lora: Of architecture "hf": train low-rank adapters on the frozen base. When not set: all weights are trained.

    Examples:
        >>> flsim.Model(embedding=32, units=64)                                # doctest: +SKIP
    """

    architecture: Annotated[str, CustomName("architecture", BUILT_IN)] = "cifg"

    def __post_init__(self) -> None:
        if not is_custom(self.architecture):
            BUILT_IN[self.architecture].refuse_settings(self)
        refuse_options(self.architecture, self.options, "options")
        for name in () if self.architecture == "hf" else (*OF_BASE, *RECORDED):
            if getattr(self, name) != getattr(language_model.ModelSettings(), name):
                raise InputError(f'{name} is for architecture "hf", found "{self.architecture}"; remove it')

    @property
    def label(self) -> str:
        """Return the architecture's name in a row of a table; empty for "cifg"."""
        if is_custom(self.architecture):  # naming a row must not execute code
            return short_name(self.architecture)
        return BUILT_IN[self.architecture].label_of(self)
