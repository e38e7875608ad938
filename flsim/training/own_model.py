"""The check of a custom network before training, and the memory that a Hugging Face model needs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from flsim.base.errors import InputError, in_one_line
from flsim.base.extensions import configured, custom_code_errors, is_custom
from flsim.base.machine import refuse_beyond_memory
from flsim.base.rng import stream
from flsim.data.corpus import Corpus
from flsim.data.records import Layout
from flsim.data.tokenizer import FILE, TABLE, Tokenizer
from flsim.models.architectures import ModelHParams, build, weights_of, without_values
from flsim.models.hf import HuggingFaceModel, files_digest
from flsim.models.language_model import TrainableModel, digest_of, loss_sum
from flsim.training.central.hparams import CentralHParams
from flsim.training.optimizers import optimizer_named
from flsim.training.update import LocalHParams, training_mode

# The memory and operations of training a Hugging Face model, by arithmetic on shapes and settings.


# Measured: docs/benchmarks.md, "LoRA adapters". On a CPU more positions per step or fewer users are not faster.
POSITIONS_ON_CPU = 400
FEWEST_ON_CPU, MOST_ON_CPU, MOST_ON_GPU = 4, 16, 64
SLACK = 0.7  # of a GPU's memory
H100 = 80e9  # bytes of the GPU that a plan assumes if the machine has none
OPERATIONS = 350e12  # a second, of large products in bfloat16 on that GPU, whose peak is 989e12


@dataclass(frozen=True)
class Footprint:
    """What a process that trains a model needs."""

    weights: int  # weights, trained: numbers of all weights, and of trained ones
    trained: int
    base: int  # bytes of the frozen weights
    user: int  # bytes of each user that trains at the same time; of a batch in central training
    at_once: int  # number of users that train at the same time
    gpu: float | None = None  # bytes of the process's share of a GPU; None for a CPU

    @property
    def memory(self) -> int:
        return self.base + self.at_once * self.user

    @property
    def operations(self) -> int:
        """Return the floating-point operations of a token, without attention (Kaplan et al., 2020, section 2.1)."""
        return 4 * self.weights + 2 * self.trained


def gpu_memory(share: float | None) -> float | None:
    """Return the bytes of a share (None: all) of this machine's GPU, or of an H100 if there is none; None for a CPU."""
    is_here = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if is_here else H100
    return memory * (is_here if share is None else share) or None


def footprint_of(
    model: ModelHParams,
    layout: Layout,
    hparams: LocalHParams | CentralHParams,
    gpu: float | None = None,
    gradients: int | None = None,
    at_once: int | None = None,
) -> Footprint:
    """Return the footprint of a process that trains a model of architecture "hf", whose weights are not made.

    `gpu` is the process's bytes of a GPU, None for a CPU; `gradients` the number of records with separate gradients.
    """
    network = cast(HuggingFaceModel, without_values(layout.vocabulary_size, model))
    trained = sum(value.numel() for value in network.trainable.values())
    weights = sum(value.numel() for value in network.parameters())
    fastest = users_within(network, hparams, layout, gpu) if isinstance(hparams, LocalHParams) else 1
    users = at_once if at_once is not None and fastest > 1 else fastest
    user = bytes_of_user(network, hparams, layout, gradients)
    return Footprint(weights, trained, bytes_of_base(network), user, users, gpu)


def users_at_once(model: TrainableModel, hparams: LocalHParams, layout: Layout, memory_share: float = 1.0) -> int:
    """Return the number of users that train fastest at once; 1 if blocks cannot train the model, or are not faster.

    On a CPU it depends only on the settings, so that a resumed run has the same groups.
    """
    gpu = None
    if model.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(model.device).total_memory * memory_share
    return users_within(model, hparams, layout, gpu)


def users_within(model: TrainableModel, hparams: LocalHParams, layout: Layout, gpu: float | None) -> int:
    """Return the number of users that train fastest at once within the bytes of a GPU, or on a CPU if `gpu` is None."""
    lora, optimizer = model.hparams.lora, optimizer_named(configured(hparams, "optimizer"))
    if not isinstance(model, HuggingFaceModel) or lora is None or lora.dropout or not optimizer.direction:
        return 1
    if gpu is None:
        positions = hparams.batch_size * max(1, layout.record_words // 2)
        fitting = min(POSITIONS_ON_CPU // positions, MOST_ON_CPU)
        return fitting if fitting >= FEWEST_ON_CPU else 1
    free = gpu * SLACK - bytes_of_base(model)
    return max(1, min(int(free // bytes_of_user(model, hparams, layout)), MOST_ON_GPU))


def bytes_of_base(model: HuggingFaceModel) -> int:
    return _width(model) * sum(value.numel() for value in model.parameters() if not value.requires_grad)


def bytes_of_user(
    model: HuggingFaceModel, hparams: LocalHParams | CentralHParams, layout: Layout, gradients: int | None = None
) -> int:
    """Return an estimate of the memory of a step over a batch of the longest records: weights, activations and logits.

    A layer saves about 20 values of the hidden size for each position in the type of the base, and 10 in float32. The
    loss needs four values of the vocabulary's size. Trained weights are in float32: the weights, those of the start,
    the gradient and the optimizer's moments, before and after a step; and two sums of updates in float64. Of
    `gradients` single records (None: one gradient of the batch), there are two while they are stacked.
    """
    text = model.config.get_text_config(decoder=True)
    trained = sum(value.numel() for value in model.trainable.values())
    positions = layout.record_words * (hparams.batch_size if gradients is None else 1)
    activations: int = (20 * _width(model) + 40) * text.hidden_size * text.num_hidden_layers
    copies = 3 + 2 * len(optimizer_named(configured(hparams, "optimizer")).slots) + 2 * (gradients or 0)
    return (4 * copies + 16) * trained + positions * (activations + 16 * model.vocabulary_size)


def _width(model: TrainableModel) -> int:
    return 2 if model.hparams.dtype == "bfloat16" else 4


# The check of a custom network: the requirements of training, attacks and resuming.

TOLERANCE = 1e-4  # absolute and relative tolerance of log-probabilities in float32
NOT_DETERMINISTIC = (
    "{}: the logits of forward differ between two calls in evaluation mode; use random numbers only if "
    "self.training is set, like nn.Dropout"
)


def refuse_unfit(model: ModelHParams, layout: Layout, seed: int, is_new: bool = True) -> None:
    """Try a custom network on a few tokens and on the longest record; for a built-in network, check only the size.

    Raises InputError, with the file and line of custom code, if the network exceeds the memory or violates
    `TrainableModel`. A resumed run, not `is_new`, already has its first weights.
    """
    if not is_custom(model.architecture):
        refuse_too_large(model, layout)
        if model.architecture == "hf":
            network = build(layout.vocabulary_size, model).initialize(seed)
            longest = getattr(network.config, "max_position_embeddings", None)
            if longest is not None and layout.record_words > longest:
                raise InputError(
                    f"{model.label}: reads {longest:,} tokens at most, and records of the corpus have up to "
                    f"{layout.record_words:,}; import the corpus with --words-per-record {longest}"
                )
            _refuse_logits(model.label, network, layout)
        return
    try:
        with custom_code_errors(InputError):
            _try(model, layout, seed, is_new)
    except InputError:
        raise
    except Exception as error:  # such as a call of a constructor that takes other arguments
        raise InputError(f"{model.label}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def refuse_too_large(model: ModelHParams, layout: Layout) -> None:
    """Raise InputError if a built-in network exceeds the memory of this machine; no custom code is executed."""
    if is_custom(model.architecture):
        return
    number, frozen = weights_of(layout.vocabulary_size, model), 0
    update = 8  # bytes of a weight in a sum of updates, which is in float64
    remedy = "set a smaller model.embedding or model.units"
    if model.architecture == "hf":
        frozen = weights_of(layout.vocabulary_size, model, is_trained=False) * (2 if model.dtype == "bfloat16" else 4)
        remedy = "name a smaller base, or set model.lora"
    refuse_beyond_memory((4 + update) * number + frozen, f"a model of {number:,} trained weights", remedy)


def _try(model: ModelHParams, layout: Layout, seed: int, is_new: bool) -> None:
    one, other = (build(layout.vocabulary_size, model) for _ in range(2))
    untouched = one.frozen_digest
    if is_new:
        _refuse_overwritten(model.label, one, other)
    one, other = one.initialize(seed), other.initialize(seed)
    if not one.trainable:
        raise InputError(f"{model.label}: no parameter requires a gradient, so training would change nothing")
    for parameter, value in one.trainable.items():
        if value.dtype != torch.float32 or "/" in parameter:
            raise InputError(f"{model.label}: parameter {parameter} must be float32, and have no / in its name")
    if digest_of(one.trainable) != digest_of(other.trainable):
        raise InputError(
            f"{model.label}: the values of initialize differ between two calls; draw them with flsim.base.rng.stream"
        )
    if not one.frozen_digest == other.frozen_digest == untouched:
        raise InputError(
            f"{model.label}: its buffers or frozen parameters differ between two constructions; the constructor must "
            "make them from its arguments only, e.g. with flsim.base.rng.stream"
        )
    _refuse_logits(model.label, one, layout)
    words = layout.record_words
    record = torch.tensor([[layout.bos] + [layout.first_word] * (words - 1)])
    try:
        with torch.no_grad(), custom_code_errors(InputError):
            one(record)
    except InputError as error:
        raise InputError(
            f"{in_one_line(error)} ({model.label} was tried on {words:,} tokens, the longest record of the corpus)"
        ) from error
    with training_mode(one, seed):
        tokens, parameters = _tokens(layout), one.trainable
        loss, _ = loss_sum(one, tokens[:, :-1], tokens[:, 1:], layout.pad)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    if unused := [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]:
        raise InputError(f"{model.label}: the loss does not depend on parameter {unused[0]}; freeze or remove it")
    _refuse_unseeded(model.label, one, layout, seed)
    if one.frozen_digest != untouched:
        raise InputError(f"{model.label}: reading changes its buffers or frozen parameters, which must not change")


def frozen_digest(vocabulary_size: int, model: ModelHParams) -> str:
    """Return the digest of the frozen values of a custom network or a base model; empty for other networks."""
    has_frozen = is_custom(model.architecture) or model.architecture == "hf"
    return build(vocabulary_size, model).frozen_digest if has_frozen else ""


def settled(model: ModelHParams, corpus: Corpus) -> ModelHParams:
    """Return a base model's settings with what its files and the corpus decide; InputError for another tokenizer."""
    if model.architecture != "hf":
        return model
    tokens = corpus.path / TABLE
    model = replace(model, tokens=str(tokens.resolve()) if tokens.is_file() else None)
    if model.path is None:
        return model
    base = Path(model.path).resolve()
    of_corpus = corpus.token_map
    if of_corpus and (base / FILE).is_file() and not of_corpus.tokenizer.has_tokens_of(Tokenizer(base)):
        raise InputError(f"{base}: its tokenizer is not that of the corpus; import the corpus with --tokenizer {base}")
    return replace(model, path=str(base), digest=files_digest(model.path))


def _refuse_overwritten(name: str, one: TrainableModel, other: TrainableModel) -> None:
    """Raise InputError if the inherited `initialize` would replace weights that the constructor sets.

    A matrix that is equal in two models was loaded, or set; only if all are zeros, `initialize` should draw them.
    """
    matrices = {key: value for key, value in one.trainable.items() if value.dim() > 1}
    is_set = [key for key, value in matrices.items() if torch.equal(value, other.trainable[key])]
    is_inherited = type(one).initialize is TrainableModel.initialize
    if not (is_inherited and is_set and any(bool(value.any()) for value in matrices.values())):
        return
    more = f" and {len(is_set) - 1:,} more" * (len(is_set) > 1)
    raise InputError(
        f"{name}: the inherited initialize would replace {is_set[0]}{more}, which the constructor "
        f"sets to the same values each time; override initialize, e.g. return self"
    )


@torch.no_grad()
def _refuse_logits(name: str, model: TrainableModel, layout: Layout) -> None:
    tokens = _tokens(layout)
    logits = model(tokens)
    expected = (*tokens.shape, layout.vocabulary_size)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        shape = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise InputError(f"{name}: forward returns {shape}, not logits {list(expected)} for tokens [2, 4]")
    if not logits.isfinite().all():
        raise InputError(f"{name}: forward returns logits that are not finite")
    if not torch.equal(model(tokens), logits):
        raise InputError(NOT_DETERMINISTIC.format(name))
    if not _near(model(tokens[:, :2]), logits[:, :2]):
        raise InputError(f"{name}: positions of forward depend on later tokens, or on the number of tokens")
    state, stepped = model.start(tokens[:, :2])
    again, after = model.step(tuple(part[[1, 0, 1]] for part in state), tokens[[1, 0, 1], 2])
    _, last = model.step(again, tokens[[1, 0, 1], 3])
    scores = logits.log_softmax(-1)
    if not (_near(stepped, scores[:, 1]) and _near(after, scores[[1, 0, 1], 2]) and _near(last, scores[[1, 0, 1], 3])):
        raise InputError(f"{name}: start and step give different log-probabilities from forward for the same tokens")


def _refuse_unseeded(name: str, model: TrainableModel, layout: Layout, seed: int) -> None:
    """Raise InputError for random numbers outside training, or from generators that are not shared."""
    tokens = _tokens(layout)
    with torch.no_grad():
        for parameter, value in model.trainable.items():  # zeros, such as LoRA's B, hide random numbers
            value.add_(torch.from_numpy(stream(seed, "trial", parameter).normal(0, 0.01, value.shape)).to(value))
        if not torch.equal(model(tokens), model(tokens)):
            raise InputError(NOT_DETERMINISTIC.format(name))
        logits = []
        for _ in range(2):
            with training_mode(model, seed):
                logits.append(model(tokens))
    if not torch.equal(*logits):
        raise InputError(
            f"{name}: the logits of forward differ between two calls in training mode with the same seeds; use "
            "only torch's default generator, Python's random or np.random"
        )


def _tokens(layout: Layout) -> Tensor:
    bos, first, last = layout.bos, layout.first_word, layout.last_word
    return torch.tensor([[bos, first, last, first], [bos, last, last, first]])


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
