"""Data parallel training: the processes of one `torch.distributed` group take every step together.

Each process holds the whole model and reads its share of each batch; DistributedDataParallel (Li et al., 2020) averages
gradients. A step equals that of the whole batch in one process, but for rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flsim.base.errors import InputError
from flsim.data.records import batch
from flsim.models.architectures import declared
from flsim.models.language_model import Params, TrainableModel, loss_sum, representative
from flsim.privacy.mechanism import Mechanism
from flsim.training.central.shares import dealt, tokens_of
from flsim.training.central.state import load_moments, moments_of
from flsim.training.central.task import CentralTask, Chunk
from flsim.training.cohort.gradient import PackedBatch, PackedModel, packed_batches
from flsim.training.cohort.packed_models import packed_model
from flsim.training.cohort.products import products_for
from flsim.training.cohort.steps import lay_out
from flsim.training.dropout import factors
from flsim.training.hparams import Precision
from flsim.training.local import bound_norm
from flsim.training.state import Moments, State


@dataclass(frozen=True)
class Share:
    """One process' share of a step's batch.

    Attributes:
        step: the step, from 0.
        tokens: number of positions of the whole batch, over all shares.
        read: arguments of the model's loss.
    """

    step: int
    tokens: int
    read: tuple[Any, ...]


def refuse_what_trains_alone(mechanism: Mechanism, precision: Precision, architecture: str = "cifg") -> None:
    """Raise InputError for settings that train in one process only.

    These are DP-SGD, which clips each record's gradient; low precision, which only kernels have; and models that
    declare no written-out gradient, such as a user's own.
    """
    able = declared(architecture)
    if able is None or not able.written_out:
        raise InputError(f'architecture "{architecture}" trains in one process; set system.workers = 1')
    if mechanism != "none":
        raise InputError("DP-SGD trains in one process; set system.workers = 1")
    if precision != "float32":
        raise InputError(f'training.precision "{precision}" is of one process; set system.workers = 1, or "float32"')


class Group:
    """The processes of the default group, which end together.

    Args:
        is_asked: whether training shall end; only the first process of the group calls it, once a chunk.

    Attributes:
        rank, workers: the number of this process, from 0, and how many there are.
        ends: whether the first process was asked to end in the last chunk; the same in every process.
    """

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked, self.ends = is_asked, False
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()

    def summed(self, losses: Tensor) -> list[float]:
        """Return the losses of a chunk's steps, float64 [steps], summed over the processes.

        The request to end travels with them: processes that asked for themselves would end after different chunks, and
        a sum over all processes would wait for those that ended.
        """
        is_asked = self.rank == 0 and self._is_asked()
        summed = torch.cat([losses, losses.new_tensor([is_asked])])
        dist.all_reduce(summed)
        *sums, asked = summed.tolist()
        self.ends = asked > 0
        return sums


class DistributedEngine:
    """Data parallel training; a `flsim.training.central.engines.Engine` in each process of the default group.

    The engines of all processes begin with the same state, and read the shares of `dealt`. Every process returns the
    same losses, parameters and moments, bit for bit. With engine "fused" on a CPU the gradient is the written-out one,
    else it is autograd's.

    Args:
        training: settings and records of training.
        state: the state to continue from; it is not changed.
        is_asked: as for `Group`.

    Raises:
        InputError: see `refuse_what_trains_alone`.
    """

    def __init__(self, training: CentralTask, state: State, is_asked: Callable[[], bool] = lambda: False) -> None:
        refuse_what_trains_alone(training.privacy.mechanism, training.hparams.precision, training.architecture)
        self._training, self._layout = training, training.records.layout
        self._group = Group(is_asked)
        model = training.model_with(state.params).train()  # cuDNN has no gradient of a recurrence in evaluation mode
        self._params: Params = dict(model.trainable)
        self._width = model.hparams.embedding
        self._optimizer = training.hparams.optimizer_over(self._params.values())
        load_moments(self._optimizer, self._params, state.moments)
        self._is_written_out = training.engine == "fused" and training.device == "cpu"
        self._loss = DistributedDataParallel(
            WrittenOutLoss(model) if self._is_written_out else PlainLoss(model, self._layout.pad),
            device_ids=None if training.device == "cpu" else [torch.cuda.current_device()],
        )
        self._settle_buckets()

    def pack(self, chunk: Chunk) -> list[Share]:
        record, step = dealt(chunk, self._layout, self._group.rank, self._group.workers)
        mine = np.split(record, np.cumsum(np.bincount(step, minlength=len(chunk)))[:-1])
        shares = []
        for index, tokens in enumerate(tokens_of(chunk, self._layout).tolist()):
            kept = self._kept(chunk.first + index, int(chunk.counts[index]))
            shares.append(Share(chunk.first + index, tokens, self._read(chunk, mine[index], kept)))
        return shares

    def train(self, packed: list[Share]) -> tuple[Sequence[float], Sequence[int]]:
        losses = torch.stack([self._step(share) for share in packed]).double()
        return self._group.summed(losses), [share.tokens for share in packed]

    def ends(self) -> bool:
        """Return whether the first process was asked to end in the last chunk; the same in every process."""
        return self._group.ends

    def params(self) -> Params:
        return {name: value.detach().cpu().clone() for name, value in self._params.items()}

    def moments(self) -> Moments:
        return moments_of(self._optimizer, self._params)

    def _step(self, share: Share) -> Tensor:
        """Take one step in place; return this share's summed loss (nats) before the step."""
        hparams = self._training.hparams
        loss = self._gradients(share)
        if hparams.gradient_clip is not None:
            gradients = [value.grad for value in self._params.values() if value.grad is not None]
            for value, bounded in zip(self._params.values(), bound_norm(gradients, hparams.gradient_clip), strict=True):
                value.grad = bounded
        for group in self._optimizer.param_groups:
            group["lr"] = self._training.rate(share.step)
        self._optimizer.step()
        return loss

    def _gradients(self, share: Share) -> Tensor:
        """Leave the gradient of the whole batch's mean loss in the parameters; return this share's summed loss."""
        self._optimizer.zero_grad()
        device = self._training.device
        loss: Tensor = self._loss(*(part.to(device) if isinstance(part, Tensor) else part for part in share.read))
        torch.autograd.backward(loss * (self._group.workers / share.tokens))
        return loss.detach()

    def _settle_buckets(self) -> None:
        """Run one backward pass over nothing, so that a resumed run sums gradients in the order of one that went on.

        After its first backward pass DDP regroups the gradients that it sums, and with them the order of sums.
        """
        nothing = Chunk(0, self._training.records.records_at(np.arange(1)), np.ones(1, np.int64))
        self._gradients(Share(0, 1, self._read(nothing, np.empty(0, np.int64), self._kept(0, 1))))

    def _kept(self, step: int, rows: int) -> Tensor | None:
        """Return dropout's factors, [2, rows of the share, times, D]; None without dropout.

        Factors are drawn for the whole batch, longest record first, so that they do not depend on the workers.
        """
        probability, width = self._training.hparams.dropout, self._width
        if not probability:
            return None
        drawn = factors(probability, self._training.seed, step, rows, self._layout.record_words, width)
        return torch.from_numpy(drawn[:, self._group.rank :: self._group.workers].copy()).to(
            representative(self._params).dtype
        )

    def _read(self, chunk: Chunk, mine: NDArray[np.int64], kept: Tensor | None) -> tuple[Any, ...]:
        """Return the arguments of the loss for the records at positions `mine` of the chunk, longest first."""
        if not self._is_written_out:
            read = batch(chunk.records, mine, self._layout)
            times = read.inputs.shape[1]
            return (
                torch.from_numpy(read.inputs),
                torch.from_numpy(read.targets),
                None if kept is None else kept[:, :, :times],
            )
        if not len(mine):
            nothing = torch.empty(0, dtype=torch.int64)
            return (PackedBatch(nothing, nothing, []),)
        steps = lay_out(chunk.records, self._layout, mine, np.zeros(len(mine), np.int64), 1)
        (packed,) = packed_batches(steps)
        if kept is not None:
            read_kept, predicted_kept = kept[:, steps.row, steps.time]
            packed = replace(packed, kept=(read_kept, predicted_kept))
        return (packed,)


def shared(state: State | None) -> State:
    """Return the first process' state in every process of the default group."""
    states = [state]
    dist.broadcast_object_list(states)
    if states[0] is None:
        raise RuntimeError("the first process of the group has no state to share")
    return states[0]


class PlainLoss(nn.Module):
    """The module form of `loss_sum`, which DDP takes."""

    def __init__(self, model: TrainableModel, pad: int) -> None:
        super().__init__()
        self.model, self._pad = model, pad

    def forward(self, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> Tensor:
        return loss_sum(self.model, inputs, targets, self._pad, kept)[0]


class WrittenOutLoss(nn.Module):
    """The summed cross-entropy (nats) of a packed batch, with the cohort engine's written-out gradient."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self.model = model
        weights = {name: value.detach() for name, value in model.trainable.items()}
        self._packed = packed_model(weights, products_for("float32", weights))
        self._packed.weights.update(weights)  # the parameters' own memory, which the optimizer changes

    def forward(self, packed: PackedBatch) -> Tensor:
        loss: Tensor = _WrittenOut.apply(self._packed, packed, *self.model.trainable.values())  # type: ignore[no-untyped-call]
        return loss


class _WrittenOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: PackedModel, packed: PackedBatch, *weights: Tensor) -> Tensor:
        count = len(packed.inputs)
        loss, of_mean = model.gradient(packed) if count else (0.0, {})
        ctx.gradients = [gradient * count for gradient in of_mean.values()] or [torch.zeros_like(w) for w in weights]
        return weights[0].new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return None, None, *(gradient.mul_(scale) for gradient in ctx.gradients)
