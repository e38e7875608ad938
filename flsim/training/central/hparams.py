"""The settings of a step of central training, the records that each step reads, and DP-SGD over records."""

import math
from collections.abc import Iterable
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName, configured, refuse_unused, refuse_wrong_options
from flsim.base.rng import stream
from flsim.base.settings import Count, Fraction, Natural, NotNegative, Options, Positive, settings
from flsim.models.language_model import TrainableModel
from flsim.training.cohort.gradient import packed_batch, packed_model
from flsim.training.optimizers import OPTIMIZERS, optimizer_named
from flsim.training.update import Milestones, Precision, ScheduleName, rate_at, refuse_wrong_milestones

# The records that a step of central training reads, and its dropout, as functions of the step.

Order = Literal["iid", "sequence"]


def steps_per_epoch(records: int, batch_size: int) -> int:
    return -(-records // batch_size)


def positions_at(step: int, records: int, batch_size: int, order: Order, seed: int) -> NDArray[np.int64]:
    """Return the positions of the records that a step, from 0, reads, int64 [n]; the last of an epoch can be smaller.

    Order "iid" permutes all records in each epoch; "sequence" uses the order of users: Thakkar et al. (2020), section
    4.2, "sequentially through the user-grouped variant of the dataset in each epoch".
    """
    epoch, index = divmod(step, steps_per_epoch(records, batch_size))
    first, last = index * batch_size, min((index + 1) * batch_size, records)
    if order == "sequence":
        return np.arange(first, last)
    return _permutation(seed, epoch, records)[first:last].astype(np.int64)


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, records: int) -> NDArray[np.integer[Any]]:
    """Return the permutation of an epoch, with 4 bytes per record if that is enough."""
    order: NDArray[np.integer[Any]] = np.arange(records, dtype=np.uint32 if records <= 2**32 else np.int64)
    stream(seed, "record order", epoch).shuffle(order)
    order.flags.writeable = False
    return order


def poisson_lot(step: int, records: int, expected: int, seed: int) -> NDArray[np.int64]:
    """Draw the positions of a lot, int64 [n], ascending: each record independently with probability expected / records.

    The lot may be empty (Abadi et al., 2016, section 3.1). InputError if `expected` exceeds `records`.
    """
    if not 1 <= expected <= records:
        raise InputError(f"batch_size must be between 1 and the {records:,} training records, found {expected:,}")
    rng = stream(seed, "lot", step)
    return np.sort(rng.choice(records, rng.binomial(records, expected / records), replace=False, shuffle=False))


def factors(probability: float, seed: int, step: int, rows: int, times: int, width: int) -> NDArray[np.float32]:
    """Return dropout factors, float32 [2, rows, times, width]: 0 for dropped values, otherwise 1 / (1 - probability).

    Index 0 is for the inputs of cells, 1 for those of the output layer. Row 0 belongs to the longest record; records of
    equal length keep the order of the batch. Srivastava et al. (2014), section 10, the "inverted" form.
    """
    uniform = stream(seed, "dropout", step).random((2, rows, times, width), np.float32)
    return (uniform >= probability).astype(np.float32) / np.float32(1 - probability)


@settings
class CentralHParams:
    """Settings of training over minibatches of records.

    A step's gradient is that of the mean cross-entropy (nats) over the batch's real positions. `gradient_clip` bounds
    it, and then `weight_decay` adds its part, as in torch's optimizers.

    Attributes:
        epochs: Number of passes over all records. With DP-SGD, the steps of each epoch are rounded up. Unit: epochs.
        steps: In place of `epochs`: number of steps. Unit: steps.
        words: In place of `epochs`: number of training words to read. Training ends with the step that reaches this
            number if all steps have equally many words. Unit: words.
        batch_size: Number of records in a step; with DP-SGD, the expected number. Unit: records.
        optimizer: Optimizer, with torch's defaults except for the settings of this section.
        learning_rate: Learning rate of the optimizer at the highest value of `schedule`. Choose it by perplexity, e.g.
            with flsim tune. Unit: none.
        tuned_at: Batch size for which `learning_rate` was tuned. For another batch size, the learning rate is
            multiplied by sqrt(batch_size / tuned_at), the rule of Thakkar et al. (2020), Table 4. When not set: no
            multiplication. Unit: records.
        schedule: Schedule of the learning rate after `warmup`: "constant"; "linear" or "cosine", which decrease towards
            0; or "steps", which multiplies it by `milestone_factor` at each of the `milestones`.
        milestones: With schedule "steps": when the learning rate changes: a number of completed steps, e.g. 12000, or a
            fraction of training below 1, e.g. 0.6. Unit: steps.
        milestone_factor: With schedule "steps": factor of the learning rate at each milestone. Unit: none.
        warmup: Number of steps in which the learning rate increases linearly. Unit: steps.
        momentum: Momentum of optimizer "momentum". Unit: none.
        gradient_clip: Bound on the L2 norm of the complete gradient of a step. When not set: no bound. Unit: L2 norm.
        weight_decay: Weight lambda of the penalty lambda / 2 ||w||^2 (Krogh and Hertz, 1992). Unit: none.
        dropout: Probability to drop each value of the cell's input and of the output layer's input. Recurrent
            connections have no dropout (Zaremba et al., 2014). Unit: probability.
        precision: Precision of matrix products, as in `flsim.training.update.LocalHParams`. "tf32" and "bf16" need
            engine "fused", and exclude DP-SGD.
        optimizer_options: Options of a custom optimizer, e.g. { beta = 0.99 }: keyword
            arguments, numbers or text. Unit: none.
        schedule_options: Options of a custom schedule, e.g. { floor = 0.1 }: keyword
            arguments, numbers or text. Unit: none.

    Examples:
        >>> flsim.CentralSGD(batch_size=256, learning_rate=0.5)                # doctest: +SKIP
    """

    epochs: Positive = 1.0
    steps: Count | None = None
    words: Count | None = None
    batch_size: Count = 32
    optimizer: Annotated[str, CustomName("optimizer", OPTIMIZERS)] = "sgd"
    learning_rate: Positive = 0.005
    tuned_at: Count | None = None
    schedule: ScheduleName = "constant"
    milestones: Milestones = ()
    milestone_factor: Positive = 0.1
    warmup: Natural = 0
    momentum: Fraction = 0.9
    gradient_clip: Positive | None = None
    weight_decay: NotNegative = 0.0
    dropout: Fraction = 0.0
    precision: Precision = "float32"
    optimizer_options: Options = field(default_factory=dict)
    schedule_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_wrong_options(self, "optimizer", "schedule")
        refuse_unused(self, "momentum", "optimizer", ("momentum",))
        refuse_wrong_milestones(self.schedule, self.milestones)
        if self.steps is not None and self.words is not None:
            raise InputError("steps and words both set how long to train; set only one of them")

    def steps_over(self, records: int, words: int | None = None) -> int:
        """Return the number of steps over `records`, and `words` if that setting is set (InputError without them)."""
        if self.steps is not None:
            return self.steps
        epochs = self.epochs
        if self.words is not None:
            if not words:
                raise InputError("training.words needs records with words; set epochs or steps instead")
            epochs = self.words / words
        return max(1, math.ceil(round(epochs * steps_per_epoch(records, self.batch_size), 6)))

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0, of a training of `steps` steps."""
        rate = self.learning_rate
        if self.tuned_at is not None:
            rate *= math.sqrt(self.batch_size / self.tuned_at)
        schedule = configured(self, "schedule")
        return rate_at(rate, schedule, step, steps, self.warmup, self.milestones, self.milestone_factor)

    @property
    def is_plain(self) -> bool:
        """Return whether a step only subtracts the gradient, times the learning rate, from the weights."""
        return self.optimizer == "sgd" and self.gradient_clip is None and not self.weight_decay

    def optimizer_over(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return a new torch optimizer over parameters, whose learning rate the caller sets before each step."""
        optimizer = optimizer_named(configured(self, "optimizer"))
        return optimizer.over(parameters, self.learning_rate, self.momentum, self.weight_decay)


# DP-SGD over records: Poisson-sampled lots, clipped gradients of records, and Gaussian noise once per step.
#
# Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm 1, with opacus' optimizer for clip, sum,
# noise and scale (Yousefpour et al., 2021); any torch optimizer can follow, such as RMSProp in Carlini et al. (2019),
# section 8.3. The mechanism bounds the addition or removal of one record: a phrase that occurs k times is k records.


def record_gradients(
    model: TrainableModel, inputs: Tensor, targets: Tensor, pad: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Return each record's gradient by name, [B, ...] over the parameter's own shape, and summed loss in nats [B].

    `inputs` are int64 [B >= 1, T]; `targets` have `pad` after the end of a record and in its prompt. A record's loss is
    the mean over its real positions, 0 if it has none. Gradients are computed together with the written-out gradient on
    a CPU, or with vmap, if the model declares them; otherwise one after another.
    """

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, parameters, (inputs[None],))[0]
        total = cross_entropy(logits, targets, ignore_index=pad, reduction="sum")
        return total / (targets != pad).sum().clamp(min=1), total

    parameters = {name: value.detach() for name, value in model.trainable.items()}
    has_prompts = bool(((inputs != pad) & (targets == pad)).any())
    if model.capabilities.written_out and inputs.device.type == "cpu" and not has_prompts:
        written_out = packed_model(parameters)
        written_out.weights.update(parameters)
        return written_out.record_gradients(*packed_batch(inputs, targets, pad), len(inputs))
    of_record = grad(loss, has_aux=True)
    if model.capabilities.vectorized:
        gradients, losses = vmap(of_record, in_dims=(None, 0, 0))(parameters, inputs, targets)
        return gradients, losses
    results = [of_record(parameters, *record) for record in zip(inputs, targets, strict=True)]
    stacked = {name: torch.stack([gradients[name] for gradients, _ in results]) for name in parameters}
    return stacked, torch.stack([total for _, total in results])


def private_step(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip: float,
    noise_multiplier: float,
    expected: int,
    seed: int,
    step: int,
    physical_batch: int = 8,
    pad: int = 0,
) -> tuple[float, int]:
    """Take one step, in place, along (sum of clipped gradients + noise) / expected; for an empty lot, only noise.

    `inputs` and `targets`, int64 [n, T], are the lot, and `expected` is L, its expected size. `clip` is C; the noise on
    the sum has the standard deviation z C for the `noise_multiplier` z, and is a function of seed and step.
    `physical_batch` records have gradients in memory at a time. Return the summed loss (nats) before the step, and its
    number of positions, which have no noise, and must not be released.
    """
    from opacus.optimizers import DPOptimizer  # takes a second

    def add_noise() -> None:
        """Set p.grad to the summed clipped gradients + N(0, (z C)^2), equal on every device and in a resumed run."""
        for index, parameter in enumerate(private.params):
            parameter.grad = parameter.summed_grad
            if noise_multiplier:
                rng = stream(seed, "record noise", step, index)
                noise = rng.normal(0.0, noise_multiplier * clip, parameter.shape)
                parameter.grad = parameter.grad + torch.from_numpy(noise).to(parameter)

    scales = {"noise_multiplier": noise_multiplier, "max_grad_norm": clip, "expected_batch_size": expected}
    private = DPOptimizer(optimizer, **scales)
    private.add_noise = add_noise
    real = targets != pad
    lengths = (real * torch.arange(1, targets.shape[1] + 1, device=real.device)).amax(1)  # prompts have no targets
    order = lengths.argsort(stable=True)  # records of similar length are grouped, which reduces padding
    batches = torch.split(order, physical_batch)
    total = 0.0
    for index, rows in enumerate(batches):
        longest = int(lengths[rows].max()) if len(rows) else 0
        if longest:
            gradients, losses = record_gradients(model, inputs[rows, :longest], targets[rows, :longest], pad)
            total += float(losses.sum())
        else:
            gradients = {name: value.new_zeros(0, *value.shape) for name, value in model.trainable.items()}
        for name, parameter in model.trainable.items():
            parameter.grad_sample = gradients[name]  # type: ignore[attr-defined]
        del gradients
        private.signal_skip_step(index + 1 < len(batches))
        private.step()
        private.zero_grad(set_to_none=True)
    return total, int(real.sum())
