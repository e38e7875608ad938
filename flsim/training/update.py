"""Local training: its settings, steps and state, and its result: a sum over users, never a single user's update."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy import int64
from numpy.typing import NDArray
from torch import Tensor

from flsim.base import extensions
from flsim.base.errors import Diverged, InputError
from flsim.base.rng import shared_generators, states_of_shared_generators
from flsim.base.settings import Count, Fraction, NotNegative, Options, Positive, check, settings
from flsim.data.records import Batch, Layout, Records, batch
from flsim.models.language_model import Params, TrainableModel
from flsim.privacy.ledger import Ledger, update_of
from flsim.training.optimizers import OPTIMIZERS, optimizer_named

# Learning rate schedules: each is a function (step or round, total) -> factor of the learning rate.
#  Central steps, local training and the server's step share them. A custom schedule, ``path/to/file.py:NAME``, is such
# a function, which can have options as further arguments. Steps and rounds count from 0, so the last one is total - 1.

Schedule = Callable[[int, int], float]


def steps(at: int, total: int, milestones: tuple[float, ...] = (), factor: float = 0.1) -> float:
    """Return `factor` to the power of passed milestones, counts or fractions of `total`, like torch's MultiStepLR."""
    return factor ** sum(at >= (round(one * total) if one < 1 else one) for one in milestones)


SAMPLES = 1_000  # number of learning rates from which their sum is estimated
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda _at, _total: 1.0,
    "linear": lambda at, total: 1 - at / total,  # would be 0 one step after the last
    # half a cosine (Loshchilov and Hutter, 2017, equation 5, without restarts)
    "cosine": lambda at, total: (1 + math.cos(math.pi * (at / total))) / 2,
    "steps": steps,
}


def label_of_steps(milestones: tuple[float, ...], factor: float, whose: str = "rate") -> str:
    """Return the part of a run's name for milestones, e.g. ``"rate x0.1 at 60%"``; empty without any."""
    times = ", ".join(f"{100 * one:g}%" if one < 1 else f"{one:g}" for one in milestones)
    return f"{whose} x{factor:g} at {times}" if milestones else ""


def _milestone(at: float) -> float:
    if not (0 < at < 1 or (at >= 1 and at.is_integer())):
        raise ValueError("must be fractions of training below 1, or integers of at least 1")
    return at


ScheduleName = Annotated[str, extensions.CustomName("schedule", SCHEDULES)]
Milestones = tuple[Annotated[float, check(_milestone)], ...]


def refuse_wrong_milestones(schedule: str, milestones: tuple[float, ...], prefix: str = "") -> None:
    """Raise InputError if milestones are set without schedule "steps", or missing with it; `prefix` is for names."""
    if (schedule == "steps") != bool(milestones):
        what = "needs" if schedule == "steps" else "has no"
        raise InputError(f'{prefix}schedule "{schedule}" {what} {prefix}milestones, found {list(milestones)}')


def rate_at(
    rate: float,
    schedule: str,
    at: int,
    total: int,
    warmup: int = 0,
    milestones: tuple[float, ...] = (),
    factor: float = 0.1,
) -> float:
    """Return the learning rate of a step or round `at`, from 0: `rate` times the factor of the schedule after `warmup`.

    Milestones count from the beginning. InputError if a custom schedule failed, or its factor is negative or infinite.
    """
    if at < warmup:
        return rate * (at + 1) / warmup
    if schedule == "steps":
        return rate * steps(at, total, milestones, factor)
    with extensions.custom_code_errors(InputError):
        factor = extensions.made(
            schedule, extensions.resolve(schedule, SCHEDULES, "schedule"), at - warmup, max(total - warmup, 1)
        )
    if extensions.is_custom(schedule) and not (isinstance(factor, int | float) and 0 <= factor < math.inf):
        raise InputError(
            f"{schedule}: returned the factor {factor!r} at {at:,} of {total:,}; return a finite number of at least 0"
        )
    return rate * factor


def total_rate(rate: Callable[[int], float], steps: int) -> float:
    """Return the sum of the learning rates of steps 0 to `steps` - 1; for many, an estimate from evenly spaced ones."""
    sampled = range(steps) if steps <= SAMPLES else np.linspace(0, steps - 1, SAMPLES).astype(int).tolist()
    return steps * float(np.mean([rate(step) for step in sampled]))


# The settings of local training, for all engines.

Precision = Literal["float32", "tf32", "bf16"]


@settings
class LocalHParams:
    """Settings of the local training of one user in one round.

    Each user begins with a fresh optimizer state in each round. A step's gradient is that of the mean cross-entropy
    (nats) over the batch's real positions. Then `proximal` adds its term, and `gradient_clip` bounds the sum.

    Attributes:
        epochs: Number of passes of a user over their records in a round. Unit: epochs.
        batch_size: Number of records in a step; the last batch of an epoch can be smaller. Unit: records.
        learning_rate: Learning rate of the optimizer at the highest value of `schedule`. Choose it by perplexity, e.g.
            with flsim tune. Unit: none.
        optimizer: Optimizer of the user. "momentum" adds `momentum` times the previous direction; "adam" and "rmsprop"
            have torch's defaults.
        momentum: Momentum of optimizer "momentum". Unit: none.
        gradient_clip: Bound on the L2 norm of the complete gradient of a step. When not set: no bound. Unit: L2 norm.
        proximal: Weight mu of FedProx's term mu / 2 ||w - w_global||^2 in the loss (Li et al., 2020, equation 2). Unit:
            none.
        max_records: Largest number of records that a user trains on in a round. Each round draws new records. When not
            set: all. Unit: records.
        precision: Precision of matrix products: "float32"; "tf32", on GPUs that support it; or "bf16", with weights in
            float32 and products in bfloat16, on GPUs also activations; on a CPU only large products, if the processor
            has instructions for bfloat16 (AMX, avx512_bf16), and float32 elsewhere. The last two need engine "cohort".
        schedule: Schedule of the learning rate over the rounds of the run: "constant"; "linear" or "cosine", which
            decrease towards 0; or "steps", which multiplies it by `milestone_factor` at each of the `milestones`.
        milestones: With schedule "steps": when the learning rate changes: a number of completed rounds, e.g. 120, or a
            fraction of training below 1, e.g. 0.6. Unit: rounds.
        milestone_factor: With schedule "steps": factor of the learning rate at each milestone. Unit: none.
        optimizer_options: Options of a custom optimizer, e.g. { beta = 0.99 }: keyword
            arguments, numbers or text. Unit: none.
        schedule_options: Options of a custom schedule, e.g. { floor = 0.1 }: keyword
            arguments, numbers or text. Unit: none.

    Examples:
        >>> flsim.LocalSGD(batch_size=4, learning_rate=1.0)                    # doctest: +SKIP
    """

    epochs: Count = 1
    batch_size: Count = 16
    learning_rate: Positive = 0.3
    optimizer: Annotated[str, extensions.CustomName("optimizer", OPTIMIZERS)] = "sgd"
    momentum: Fraction = 0.9
    gradient_clip: Positive | None = None
    proximal: NotNegative = 0.0
    max_records: Count | None = None
    precision: Precision = "float32"
    schedule: ScheduleName = "constant"
    milestones: Milestones = ()
    milestone_factor: Positive = 0.1
    optimizer_options: Options = field(default_factory=dict)
    schedule_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        extensions.refuse_wrong_options(self, "optimizer", "schedule")
        extensions.refuse_unused(self, "momentum", "optimizer", ("momentum",))
        refuse_wrong_milestones(self.schedule, self.milestones)

    @property
    def is_plain(self) -> bool:
        """Return whether a step only subtracts the gradient, times the learning rate, from the weights."""
        return self.optimizer == "sgd" and self.gradient_clip is None and not self.proximal

    def rate(self, round_: int, rounds: int | None) -> float:
        """Return the learning rate of a round, from 0; a constant schedule needs no number of rounds."""
        if self.schedule == "constant":
            return self.learning_rate
        if rounds is None:
            raise ValueError(f"schedule {self.schedule!r} needs the number of rounds")
        milestones, factor = self.milestones, self.milestone_factor
        schedule = extensions.configured(self, "schedule")
        return rate_at(self.learning_rate, schedule, round_, rounds, milestones=milestones, factor=factor)

    def optimizer_over(self, parameters: list[Tensor], rate: float | None = None) -> torch.optim.Optimizer:
        """Return a new torch optimizer over parameters; a `rate` of None means `learning_rate`."""
        rate = self.learning_rate if rate is None else rate
        return optimizer_named(extensions.configured(self, "optimizer")).over(parameters, rate, self.momentum, 0.0)

    def examples(self, records: int) -> int:
        """Return the number of records that a user with this number of records trains on in a round."""
        return records if self.max_records is None else min(records, self.max_records)


# The random numbers of a network during training, such as those of dropout.
#  torch's modules draw from generators that a process shares. Here these generators are seeded for each piece of
# training, so the numbers do not depend on the process or on previous training.


@contextmanager
def training_mode(model: TrainableModel, seed: int, *keys: int) -> Iterator[None]:
    """Set a model to training mode and seed its device's generators by round and user, or step, within the block."""
    with shared_generators(model.device, seed, *keys):
        model.train()
        try:
            yield
        finally:
            model.eval()


@torch.no_grad()
def draws(model: TrainableModel, tokens: Tensor) -> bool:
    """Return whether reading tokens int64 [B, T] in training mode uses a shared generator of the process."""
    with training_mode(model, 0):
        before = states_of_shared_generators()
        model(tokens)
        return before != states_of_shared_generators()


# The choice and order of the records that a user trains on, which is the same for every engine.


def epoch_orders(records: int, hparams: LocalHParams, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the records of each epoch in the order of training, int64 [examples] each, shuffled in each epoch.

    If they exceed `hparams.max_records`, this many are drawn once for all epochs. `rng` is of the user and the round.
    """
    examples = hparams.examples(records)
    chosen = np.arange(records) if examples == records else rng.choice(records, examples, replace=False)
    return [chosen[rng.permutation(examples)] for _ in range(hparams.epochs)]


def local_batches(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield the batches of a user's local training in a round, epoch after epoch; see `epoch_orders` for `rng`."""
    for order in epoch_orders(len(records), hparams, rng):
        for first in range(0, len(order), hparams.batch_size):
            yield batch(records, order[first : first + hparams.batch_size], layout)


def bound_norm(gradients: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """Return the gradients times min(1, bound / their norm as one vector)."""
    # torch's clip_grad_norm_ is not used, because it adds 1e-6 to the norm.
    norm = torch.nn.utils.get_total_norm(gradients)
    return tuple(gradient * (bound / norm).clamp(max=1) for gradient in gradients)


def take_step(
    optimizer: torch.optim.Optimizer, weights: Iterable[Tensor], gradients: Sequence[Tensor], bound: float | None
) -> None:
    """Take a step of torch's optimizer of these weights along their gradients, after a clip of the norm if bounded."""
    for weight, gradient in zip(weights, gradients if bound is None else bound_norm(gradients, bound), strict=True):
        weight.grad = gradient
    optimizer.step()


@torch.no_grad()
def restored(model: TrainableModel, start: Params) -> Params:
    """Return parameters - start, in float64 on the model's device, and set the parameters back to `start`."""
    update = {}
    for name, parameter in model.trainable.items():
        update[name] = (parameter - start[name]).to(torch.float64)
        parameter.copy_(start[name])
    return update


# The number of threads of torch in this process.


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch compute with `number` threads in the block; a second one would wait in small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Items that are computed in a separate thread while earlier items are used.

Item = TypeVar("Item")


def prefetched(items: Iterable[Item], depth: int = 2) -> Generator[Item]:
    """Yield the same items in order, and compute up to `depth` in advance, in a thread; errors come at their items."""
    iterator, end = iter(items), object()
    pool = ThreadPoolExecutor(1, "ahead")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth + 1))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)


# The state of training, for any algorithm; a checkpoint contains only the state.

Moments = dict[str, Params]


@dataclass(frozen=True)
class State:
    """Everything that the next round of training needs; central training counts steps as rounds.

    Checkpoints, messages and digests contain nothing else of an algorithm.

    Attributes:
        round: number of completed rounds.
        params: the model's parameters by name.
        moments: other named tensors, such as an optimizer's: slot -> parameter -> tensor.
        values: numbers by name, such as the "clip" of the next round.
        ledger: the ledger of the completed rounds.

    Examples:
        >>> state = flsim.open_run("runs/iid").latest_state()                  # doctest: +SKIP
        >>> state.round, sorted(state.params)                                  # doctest: +SKIP
    """

    round: int
    params: Params = field(repr=False)  # a notebook would print every value
    moments: Moments = field(default_factory=dict, repr=False)
    values: Mapping[str, float] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def clip(self) -> float | None:
        """Return the bound on the norm of users' updates in the next round; None if there is no clip."""
        return self.values.get("clip")


def flat(slots: Mapping[str, Params]) -> Params:
    """Return named tensors in the form of messages and sums: "slot/parameter" -> tensor."""
    return {f"{slot}/{name}": value for slot, tensors in slots.items() for name, value in tensors.items()}


def by_slot(tensors: Params) -> Moments:
    """Return tensors by slot and parameter, from keys of `flat`."""
    slots: Moments = {}
    for key, value in tensors.items():
        slot, _, name = key.rpartition("/")
        slots.setdefault(slot, {})[name] = value
    return slots


def transposed(by_name: Mapping[str, Params]) -> Moments:
    """Return tensors by slot and parameter, from tensors by parameter and slot."""
    return by_slot({f"{slot}/{name}": value for name, slots in by_name.items() for slot, value in slots.items()})


# The check of the training loss that finds diverged models whose values are all finite.
#  Such a model memorizes nothing, and would look private.

ABSURD = 10  # multiple of the loss of uniform guessing


def refuse_absurd_loss(when: str, loss: float, tokens: int, vocabulary_size: int, culprit: str) -> None:
    """Raise Diverged if the mean of a summed loss (nats) exceeds `ABSURD` times that of uniform guessing.

    `when` and `culprit`, the setting that is most likely too high, are for the message. No positions never diverge.
    """
    guessing = math.log(vocabulary_size)
    if tokens and loss > ABSURD * guessing * tokens:
        raise Diverged(
            f"{when}: the training loss is {loss / tokens:.3g} nats per word, and guessing gives "
            f"{guessing:.3g}; most likely {culprit} is too high"
        )


# The interface of training for callers, for all algorithms.


class Training(Protocol):
    """The settings of training and its users, without a state."""

    def first_state(self) -> State:
        """Return the state before the first round."""

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = ...) -> Iterator[State]:
        """Train in this process to a round or step, and yield the last state and wanted ones; raises Diverged."""


# The clip of one user's update, by the L2 norm over all of its tensors.
#
# Thakkar et al. (2020), Algorithm 1, UserUpdate: "return update Delta_k = Delta min(1, S / ||Delta||)".


def global_norm(update: Params) -> float:
    """Return the L2 norm of all tensors as one vector; float64 keeps it finite for every finite float32 update."""
    squares = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in update.values()]
    return float(torch.linalg.vector_norm(torch.stack(squares)))


def clip_factor(norm: float, bound: float) -> float:
    """Return min(1, bound / norm), 1 for a norm of 0; ValueError if it is not finite: no factor removes a NaN."""
    if not math.isfinite(norm):
        raise ValueError(f"an update of norm {norm} cannot be clipped")
    return 1.0 if norm <= bound else bound / norm


@dataclass(frozen=True)
class Counts:
    """The counts of users' local training; they add, and `Counts()` is the identity."""

    weight: float = 0.0  # sum of the users' weights: numbers of local examples, or 1 per user if updates are clipped
    users: int = 0  # number of users, including users without records
    loss: float = 0.0  # summed training cross-entropy in nats, over all local steps
    tokens: int = 0  # number of positions in `loss`
    norms: float = 0.0  # sum of the finite norms of users' updates, before the clip
    clipped: int = 0  # number of users whose norm exceeded the clip
    # number of users whose update is not finite. Such updates are excluded from the sum, and a number above 0 fails the
    # round in `flsim.algorithms.fedavg.step`.
    non_finite: int = 0
    examples: int = 0  # number of local examples
    left_out: int = 0  # number of records beyond the users' `max_records`, which were not trained on

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def within(self) -> int:
        """Return the number of users whose update's norm is at most the clip, including users without records."""
        return self.users - self.clipped - self.non_finite

    @classmethod
    def of_user(
        cls,
        norm: float,
        examples: int,
        loss: float,
        tokens: int,
        *,
        clip: float | None = None,
        left_out: int = 0,
        weight: float | None = None,
    ) -> tuple["Counts", float]:
        """Return the counts of one user, and the factor of its update in a sum: its weight, or that of the clip.

        The `norm` is that before the clip; if it is not finite, the factor is 0. The weight is `examples` by default.
        """
        counts = cls(users=1, loss=loss, tokens=tokens, examples=examples, left_out=left_out)
        if not math.isfinite(norm):
            return replace(counts, non_finite=1), 0.0
        if clip is None:
            factor = float(examples if weight is None else weight)
            return replace(counts, weight=factor, norms=norm), factor
        return replace(counts, weight=1.0, norms=norm, clipped=int(norm > clip)), clip_factor(norm, clip)


@dataclass(frozen=True)
class UpdateSum:
    """A sum over users of weight x (local model - global model), or of clipped updates, with counts; sums merge."""

    delta: Params  # the sum, in float64, so the order and grouping of users change it by only about 1e-15 of its size
    counts: Counts = field(default_factory=Counts)  # the counts of the same users

    @classmethod
    def zero(cls, like: Params) -> "UpdateSum":
        return cls({name: torch.zeros_like(value, dtype=torch.float64, device="cpu") for name, value in like.items()})

    @classmethod
    def of_user(
        cls,
        update: Params,
        examples: int,
        loss: float,
        tokens: int,
        *,
        clip: float | None = None,
        left_out: int = 0,
        weight: float | None = None,
    ) -> "UpdateSum":
        """Return one user's part of a sum, see `Counts.of_user`; an update that is not finite is only counted."""
        counts, factor = Counts.of_user(
            global_norm(update), examples, loss, tokens, clip=clip, left_out=left_out, weight=weight
        )
        if counts.non_finite:
            return cls(cls.zero(update).delta, counts)
        return cls({name: (value * factor).cpu() for name, value in update.items()}, counts)

    def merge(self, other: "UpdateSum", in_place: bool = False) -> "UpdateSum":
        """Return the sum of both; with `in_place` the memory of this sum is reused, and this sum becomes invalid."""
        add = torch.Tensor.add_ if in_place else torch.Tensor.add
        delta = {name: add(value, other.delta[name]) for name, value in self.delta.items()}
        return UpdateSum(delta, self.counts + other.counts)

    def refuse_divergence(self, when: str, vocabulary_size: int, culprit: str = "local.learning_rate") -> None:
        """Raise Diverged, with `when` and `culprit`, if a value is not finite or the loss is implausibly large."""
        counts = self.counts
        if not self.is_finite:
            of_users = f" with {counts.non_finite:,} of {counts.users:,} users" if counts.non_finite else ""
            raise Diverged(
                f"{when}: local training produced values that are not finite{of_users}; most likely "
                f"{culprit} is too high"
            )
        refuse_absurd_loss(when, counts.loss, counts.tokens, vocabulary_size, culprit)

    @property
    def is_finite(self) -> bool:
        return (
            not self.counts.non_finite
            and math.isfinite(self.counts.loss)
            and all(bool(torch.isfinite(value).all()) for value in self.delta.values())
        )


# Updates of canary users in a sum: each passes through the clip that real users' updates pass through.


def with_canaries(total: Params, users: NDArray[int64], seed: int, clip: float) -> Params:
    """Return a sum of clipped updates, float64 by parameter, with those of canary users, int64 [n], of the round.

    A user that is drawn twice counts twice. `clip` is S of the round. The argument does not change.
    """
    if not len(users):
        return total
    total = {name: value.clone() for name, value in total.items()}
    for canary in users.tolist():
        sent = UpdateSum.of_user(update_of(canary, seed, clip, total), 0, 0.0, 0, clip=clip)
        for name, value in sent.delta.items():
            total[name].add_(value)
    return total
