"""The interfaces of language models: for attacks, training and evaluation, and with LoRA adapters."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from flsim.base.errors import InputError, RunFailed
from flsim.base.rng import stream
from flsim.base.settings import Count, Flag, Fraction, Options, Positive, settings

# LoRA: the settings of low-rank adapters, and the layers of many users that train on one base at once.
#
# Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022), section 4.1: h = W x + (alpha / r) B A x, with
# W frozen, A drawn at random and B zeros at first, so that training begins with the base.

Dtype = Literal["float32", "bfloat16"]


@settings
class LoraHParams:
    """Settings of the adapters that are trained in place of all weights.

    Attributes:
        rank: Rank r of the adapters. Unit: dimensions.
        alpha: The adapters' output is multiplied by alpha / rank. Unit: none.
        targets: Layers with adapters, by the last parts of their names, such as ["c_attn"] or ["q_proj", "v_proj"];
            "all-linear" is every linear layer but the output layer.
        freeze_a: Train only B, as in FFA-LoRA (Sun et al., 2024). The matrices A are then part of the frozen base.
        dropout: Probability to drop a value of an adapter's input in training. Above 0, engine "local" trains. Unit:
            probability.

    Examples:
        >>> flsim.Lora(rank=16, alpha=32, targets=("c_attn",))                 # doctest: +SKIP
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ("all-linear",)
    freeze_a: Flag = False
    dropout: Fraction = 0.0


class LoraBlocks(nn.Module):
    """A linear layer with an adapter for each of K users, who have equal numbers of rows in a batch, one after another.

    Users share the frozen `base`; `scale` is alpha / r. A is [K, r, inputs], or `frozen_a` [1, r, inputs] if only B,
    [K, outputs, r], is trained; `name_of_a` and `name_of_b` are their names among the model's parameters.
    """

    A: Tensor
    B: Tensor

    def __init__(self, base: nn.Module, scale: float, name_of_a: str, name_of_b: str, frozen_a: Tensor) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.name_of_a, self.name_of_b, self.frozen_a = name_of_a, name_of_b, frozen_a

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) + scale B A x, [K rows, T, outputs], of x [K rows, T, inputs]; adapters compute in float32."""
        y: Tensor = self.base(x)
        rows = x.to(self.B.dtype).reshape(len(self.B), -1, x.shape[-1])
        low = torch.bmm(torch.bmm(rows, self.A.expand(len(self.B), -1, -1).mT), self.B.mT)
        return torch.add(y, low.view(y.shape), alpha=self.scale).to(y.dtype)


Params = dict[str, Tensor]
State = tuple[Tensor, ...]
Stepper = Callable[[State, Tensor, Tensor], State]
SIZES = ("embedding", "units", "layers", "heads", "filter_width")  # settings of built-in networks
SIZES_OF_ONE = {"heads": "transformer", "filter_width": "convolutional"}  # settings of a single architecture
FLOATS_OF_NUMPY = (torch.float16, torch.float32, torch.float64)
FLOATS = 2**26  # values of a layer that `start` computes at once: 256 MB


@dataclass(frozen=True)
class ModelSettings:
    """Architecture and sizes of a network, which only `flsim.models.architectures.ModelHParams` validates."""

    embedding: Count = 96
    units: Count = 670
    architecture: str = "cifg"
    layers: Count = 1
    heads: Count = 4
    filter_width: Count = 3
    options: Options = field(default_factory=dict)
    path: str | None = None
    digest: str | None = None
    tokens: str | None = None
    config: Options = field(default_factory=dict)
    dtype: Dtype = "float32"
    lora: LoraHParams | None = None


@dataclass(frozen=True)
class Capabilities:
    """The operations of engines that a model supports; plain PyTorch trains any model."""

    written_out: bool = False  # `flsim.training.cohort.gradient` has its written-out gradient, which is used on CPUs
    stacked: bool = False  # kernels of `flsim.training.cohort.stacked_model` train many users at once, on GPUs
    low_precision: bool = False  # those kernels may multiply in TF32 and bfloat16
    vectorized: bool = False  # torch.func.vmap supports the model, so gradients of records are computed together
    blocks: bool = False  # `flsim.training.cohort.engine` trains its adapters, many users at once on one frozen base


class LanguageModel(Protocol):
    """The interface of a model that can be attacked; every tensor of a state has one row per sequence."""

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        """Read tokens int64 [N, L >= 1] from an empty state; return the state and the next token's log-probs [N, V]."""

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        """Read one more token per row, int64 [N]; return the new state and the next token's log-probs [N, V]."""


@runtime_checkable
class LogitModel(LanguageModel, Protocol):
    """A model whose logits are r E' + b for an output r.

    Attacks are faster on such models, because they compute only r.

    The first tensor of its states is r [N, D].
    """

    def output_layer(self) -> tuple[Tensor, Tensor]:
        """Return E [V, D] and b [V]."""

    def stepper(self) -> Stepper:
        """Return a function (state, rows, tokens) -> state that reads tokens [M], each after one row of the state.

        The function computes no logits. Create it once for many steps while the model does not change. Adjacent tokens
        with equal `rows`, int64 [M], share work.
        """


class TrainableModel(nn.Module, ABC):
    """A next-word model that flsim trains, attacks and evaluates: any network from tokens to logits.

    A custom model is a subclass with a constructor of the same arguments and a `forward`:

        class MyModel(TrainableModel):
            def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None: ...
            def forward(self, tokens: Tensor) -> Tensor: ...        # int64 [B, T] -> logits [B, T, V]

    The parameters that require a gradient travel between server and clients, and are clipped, noised and saved; tied
    ones count once. The constructor creates frozen parameters and buffers as a function of its arguments, and training
    does not change them. `forward` uses random numbers only in training mode, from a shared generator, like nn.Dropout.
    flsim sets training mode while it trains, and seeds the generator; otherwise models are in evaluation mode. Position
    t of the logits depends on no token after t.

    Shapes: B batch, T time, V vocabulary.

    Attributes:
        vocabulary_size: V.
        hparams: the model's settings.
        capabilities: what engines may do with the model. Subclasses do not inherit them, because their equations can
            differ.
        label: the architecture's name in tables.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    label: ClassVar[str]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "capabilities" not in vars(cls):
            cls.capabilities = Capabilities()

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.hparams = hparams

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of the next token after each position of tokens int64 [B, T]."""

    @classmethod
    def refuse_settings(cls, hparams: ModelSettings) -> None:
        """Raise InputError if the architecture cannot have these settings."""

    @classmethod
    def label_of(cls, hparams: ModelSettings) -> str:
        """Return the architecture's name in a table, with the number of its layers if there are several."""
        return cls.label + (f" {hparams.layers} layers" if hparams.layers > 1 else "")

    @property
    def device(self) -> torch.device:
        return representative(self.trainable).device

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name; tied ones appear once, under their first name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    @property
    def frozen_digest(self) -> str:
        """Return the sha256, in hexadecimal, of frozen parameters and buffers; empty if there are none."""
        frozen = {name: value for name, value in self.named_parameters() if not value.requires_grad}
        stays = frozen | dict(self.named_buffers())
        return digest_of(stays) if stays else ""

    @torch.no_grad()
    def load(self, params: Params) -> Self:
        """Give the trained parameters these values; raise InputError if names or shapes differ."""
        mine = self.trainable
        if {name: value.shape for name, value in mine.items()} != {name: v.shape for name, v in params.items()}:
            raise InputError("these parameters belong to another model; pass the settings that they were trained with")
        for name, parameter in mine.items():
            parameter.copy_(params[name])
        return self

    def initialize(self, seed: int) -> Self:
        """Draw the trained parameters as a function of the seed only.

        Matrices are Glorot-uniform. In tensors of more dimensions, all dimensions except the first count as one.
        Vectors are 0, or 1 if their name ends in "weight", such as the scale of a norm.
        """
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                if parameter.dim() < 2:
                    parameter.fill_(float(name.endswith("weight")))  # 1 for scales of a LayerNorm, else 0
                    continue
                bound = self._bound(name, parameter)
                values = stream(seed, "model", name).uniform(-bound, bound, parameter.shape)
                parameter.copy_(torch.from_numpy(values))
        return self

    def _bound(self, name: str, parameter: Tensor) -> float:  # noqa: ARG002 (subclasses ask for it)
        """Return the bound of a parameter's uniform first values (Glorot and Bengio, 2010, equation 16)."""
        one, other = parameter.shape[0], parameter[0].numel()
        return float((6 / (one + other)) ** 0.5)

    def rows_of_tokens(self, tensors: Params) -> tuple[Tensor | None, Tensor | None]:  # noqa: ARG002 (for subclasses)
        """Return the parts of trained tensors, or of their update, that have a row for each token id.

        These are the output bias [V], and the input embedding [V, D]; None for a part that is not trained or not named.
        """
        return None, None

    def logits_at(self, inputs: Tensor, real: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
        """Return logits [n, V] at the n positions of tokens int64 [B, T] at which `real`, bool [B, T], is set.

        Raises InputError if the model does not support the factors of dropout, see `NextWordModel.logits_at`.
        """
        if dropout_mask is not None:
            raise InputError(
                f"dropout needs a model with tied embeddings, which {type(self).__name__} does not have; set "
                "dropout to 0"
            )
        logits: Tensor = self(inputs)
        return logits[real]

    @torch.no_grad()
    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        """Read sequences as `LanguageModel` describes it; the state is (tokens,). Override it and `step` for speed."""
        rows = max(1, FLOATS // (tokens.shape[1] * self.vocabulary_size))
        last = [self(piece)[:, -1] for piece in torch.split(tokens, rows)]
        return (tokens,), torch.cat(last).log_softmax(-1)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return self.start(torch.cat([state[0], tokens[:, None]], dim=1))


class NextWordModel(TrainableModel):
    """A model with tied embeddings: outputs r are functions of embeddings from E, and logits are r E' + b.

    All parameters are zero at first.

    Shapes: B batch, T time, D embedding, H units, V vocabulary. Every architecture has, among its parameters, E [V, D]
    as `embedding` and b [V] as `output_bias`. Position t of the outputs depends on no token after t.
    """

    embedding: nn.Parameter
    output_bias: nn.Parameter

    @classmethod
    def refuse_settings(cls, hparams: ModelSettings) -> None:
        for name, architecture in SIZES_OF_ONE.items():
            if hparams.architecture != architecture and getattr(hparams, name) != getattr(ModelSettings, name):
                raise InputError(
                    f'{name} is for architecture "{architecture}", found "{hparams.architecture}"; remove it'
                )

    @abstractmethod
    def outputs(self, embedded: Tensor) -> Tensor:
        """Return r [B, T, D] over embeddings [B, T, D], from an empty state."""

    @abstractmethod
    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return r [B, T, D] over tokens int64 [B, T >= 1] that follow a state (None: empty), and the new state."""

    def _bound(self, name: str, parameter: Tensor) -> float:
        """Return the bound of `TrainableModel`; for embeddings, the bound with unit expected norm."""
        return float((3 / parameter.shape[1]) ** 0.5) if name == "embedding" else super()._bound(name, parameter)

    def rows_of_tokens(self, tensors: Params) -> tuple[Tensor | None, Tensor | None]:
        return tensors["output_bias"], tensors["embedding"]

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [..., V] of outputs [..., D]."""
        return outputs @ self.embedding.T + self.output_bias

    def output_layer(self) -> tuple[Tensor, Tensor]:
        """Return E and b as `LogitModel` describes them; with a `stepper`, a model is a `LogitModel`."""
        return self.embedding.detach(), self.output_bias.detach()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.outputs(embedding(tokens, self.embedding)))

    def logits_at(self, inputs: Tensor, real: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
        """Return logits as `TrainableModel.logits_at`, computed only there; `dropout_mask` is [2, B, T, D]."""
        embedded = embedding(inputs, self.embedding)
        outputs = self.outputs(embedded if dropout_mask is None else embedded * dropout_mask[0])
        return self.logits((outputs if dropout_mask is None else outputs * dropout_mask[1])[real])

    @torch.no_grad()
    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        rows = max(1, FLOATS // (tokens.shape[1] * 4 * max(self.hparams.units, self.hparams.embedding)))
        pieces = [self.read(piece) for piece in torch.split(tokens, rows)]
        last = torch.cat([outputs[:, -1] for outputs, _ in pieces])
        state = tuple(torch.cat(parts) for parts in zip(*(state for _, state in pieces), strict=True))
        return state, self.logits(last).log_softmax(-1)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        outputs, state = self.read(tokens[:, None], state)
        return state, self.logits(outputs[:, -1]).log_softmax(-1)


def representative(params: Mapping[str, Tensor]) -> Tensor:
    """Return a parameter of the model; its device and dtype are those of all parameters."""
    return next(iter(params.values()))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256, in hexadecimal, of tensors with their names, types and shapes."""
    whole = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        tensor = value.detach().cpu().contiguous()
        if tensor.is_floating_point() and tensor.dtype not in FLOATS_OF_NUMPY:  # such as bfloat16
            kind, data = str(tensor.dtype), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            kind, data = tensor.numpy().dtype.str, tensor.numpy().tobytes()
        whole.update(f"{name} {kind} {tuple(tensor.shape)} ".encode() + data)
    return whole.hexdigest()


# The next-word loss and predictions, over real positions only; losses merge as (sum, count).


def loss_sum(
    model: TrainableModel, inputs: Tensor, targets: Tensor, pad: int = 0, dropout_mask: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the summed cross-entropy in nats over int64 [B, T] targets that are not `pad`, and their number."""
    real = targets != pad
    return cross_entropy(model.logits_at(inputs, real, dropout_mask), targets[real], reduction="sum"), int(real.sum())


@torch.no_grad()
def predictions(model: TrainableModel, inputs: Tensor, targets: Tensor, pad: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return, at the n real positions, the targets [n], their cross-entropy in nats [n], and most likely words [n]."""
    real = targets != pad
    logits = model.logits_at(inputs, real)
    return targets[real], cross_entropy(logits, targets[real], reduction="none"), logits.argmax(-1)


# The check that custom code does not change a model, so that later results belong to the trained model.


@contextmanager
def refusing_changes(name: str, models: Sequence[object], inputs: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Raise RunFailed if the block, a call of user's code `name`, changes torch modules or other inputs."""

    def values() -> dict[str, Tensor]:
        listed = dict(inputs or {})
        modules = [model for model in models if isinstance(model, nn.Module)]
        for number, module in enumerate(modules):
            tensors = [*module.named_parameters(), *module.named_buffers()]
            listed |= {f"model {number}/{key}": value.detach() for key, value in tensors}
        return listed

    before = {key: value.clone() for key, value in values().items()}
    yield
    after = values()
    if changed := next((key for key in {**before, **after} if _differ(before.get(key), after.get(key))), None):
        what = f"the model's {changed.partition('/')[2]}" if "/" in changed else changed
        raise RunFailed(f"{name}: the code changes {what}, which later results need; change a copy made with .clone()")


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return True
    # Digests compare NaN as equal, and values on different devices; `torch.equal` is faster, and usually sufficient.
    if one.device == other.device and one.dtype == other.dtype and torch.equal(one, other):
        return False
    return digest_of({"": one}) != digest_of({"": other})


# Quantization of weights, to test whether a smaller model still memorizes a secret (The Secret Sharer).


FEWEST, MOST = 2, 16
Model = TypeVar("Model", bound=TrainableModel)


@torch.no_grad()
def quantized(model: Model, bits: int) -> Model:
    """Return a copy whose tensors have at most 2^bits different, evenly spaced values; buffers are not changed.

    Carlini et al. (2019), appendix D.3: 256 values for the weights of a trained network. The value 0 does not change.
    Frozen parameters are quantized too.
    """
    copy = deepcopy(model)
    levels = 2**bits - 1
    for value in copy.parameters():
        low, high = value.min().clamp(max=0), value.max().clamp(min=0)
        scale = float(high - low) / levels
        if scale:
            zero = round(-float(low) / scale)
            value.copy_(torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, levels))
    return copy
