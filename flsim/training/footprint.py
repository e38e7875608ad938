"""The memory and operations of training a Hugging Face model, by arithmetic on shapes and settings."""

from dataclasses import dataclass
from typing import cast

import torch

from flsim.base.extensions import configured
from flsim.data.vocabulary import Layout
from flsim.models.architectures import ModelHParams, without_values
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import TrainableModel
from flsim.training.central.hparams import CentralHParams
from flsim.training.hparams import LocalHParams
from flsim.training.optimizers import optimizer_named

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
