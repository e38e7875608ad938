"""Local training of many users at once: their weights are stacked, and every product covers all users.

On an NVIDIA GPU with Triton each shape of step is one CUDA graph; otherwise it is plain PyTorch (`kernels`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsim.base.extensions import configured
from flsim.data.vocabulary import Layout
from flsim.models.language_model import Params, representative
from flsim.training.cohort.devices import Graphs, current, kernels_for, products
from flsim.training.cohort.kernels import Kernels, PositionKernels, Rule
from flsim.training.cohort.packing import EXACT, PackedGroup, Shape, narrowed, pack_users, units_of, widened
from flsim.training.cohort.stacked_model import PositionModel, StackedModel, widened_for
from flsim.training.cohort.steps import Participant
from flsim.training.hparams import LocalHParams
from flsim.training.optimizers import BETAS, optimizer_named

GRAPHS = Shape(users=16, times=4, rows=16, positions=32)  # coarse, for few different shapes
WAVES = 2  # users for each multiprocessor of a GPU
CPU_USERS = 8
SLACK = 0.9  # share of this process' memory; the rest is for libraries


class StackedTrainer:
    """A trainer of stacked users from the global parameters; a `flsim.training.cohort.engine.Trainer`.

    `like` has the names, shapes, dtype (float64: not with Triton) and device of parameters; at most `users` train
    together. Defaults: `kernels` of Triton on an NVIDIA GPU if available, otherwise of PyTorch; `graphs`, CUDA's, with
    Triton's. torch.OutOfMemoryError (RuntimeError on a CPU) if memory is too small, also in `train`.
    """

    def __init__(
        self,
        like: Params,
        hparams: LocalHParams,
        layout: Layout,
        users: int,
        kernels: Kernels | None = None,
        graphs: bool | None = None,
    ) -> None:
        self._hparams, self._like, self._layout = hparams, like, layout
        self._device, self._dtype = representative(like).device, representative(like).dtype
        self._kernels = kernels or kernels_for(like, hparams.precision)
        self._graphs = Graphs(self._device, self._kernels, graphs)
        self._rounding = GRAPHS if self._graphs.is_on else EXACT
        rows = hparams.batch_size
        self._largest = Shape(users, layout.record_words, rows, layout.record_words * rows)

        wide, self._rule = widened_for(self._kernels, like), _rule(hparams)
        self._start = {name: value.detach().clone() for name, value in wide.items()}
        model = _model_of(self._kernels)
        self._model = model(wide, users, hparams.precision, self._kernels, holds_gradients=not hparams.is_plain)
        self._moments = [self._model.stack(self._dtype) for _ in self._rule.optimizer.slots]
        self._losses = torch.zeros(users, dtype=torch.float64, device=self._device)
        self._given_rate = hparams.learning_rate
        self._rate = torch.tensor([hparams.learning_rate], dtype=torch.float64, device=self._device)
        self._betas = torch.tensor(BETAS, dtype=torch.float64, device=self._device)
        self._order = torch.arange(0)

    @staticmethod
    def users_that_fit(like: Params, hparams: LocalHParams, layout: Layout, memory_share: float = 1.0) -> int:
        """Return the number of users that fill the device and fit in the share of its memory, at least 1.

        It is independent of other programs, because a restart must not change the groups, and with them the last bits.
        """
        device = representative(like).device
        if device.type != "cuda":
            return CPU_USERS
        fixed, per_user = StackedTrainer.memory(like, hparams, layout)
        properties = torch.cuda.get_device_properties(device)
        fitting = int((properties.total_memory * memory_share * SLACK - fixed) // per_user)
        return max(1, min(fitting, WAVES * properties.multi_processor_count))

    @staticmethod
    def memory(like: Params, hparams: LocalHParams, layout: Layout, kernels: Kernels | None = None) -> tuple[int, int]:
        """Return bytes of the device's memory: the fixed part, and that of a user whose records are longest.

        Caller and trainer each hold first parameters of a round, and a sum of updates in float64, in addition to
        `like`.
        """
        kernels = kernels or kernels_for(like, hparams.precision)
        wide, rows = widened_for(kernels, like), hparams.examples(hparams.batch_size)
        sizes = _model_of(kernels).sizes_of(wide, hparams.precision)
        copies = [sizes.master] * (1 + len(_rule(hparams).optimizer.slots))
        copies += [sizes.low] * ((sizes.low != sizes.master) + (not hparams.is_plain))
        values = sum(value.numel() for value in wide.values())
        longest = Shape(1, layout.record_words, rows, layout.record_words * rows)
        per_user = values * sum(dtype.itemsize for dtype in copies) + sizes.bytes(longest)
        return values * (3 * sizes.master.itemsize + 2 * torch.float64.itemsize), per_user

    def pack(self, group: Sequence[Participant]) -> PackedGroup:
        on_gpu = self._device.type == "cuda"
        return pack_users(group, self._layout, self._hparams, self._rounding, self._largest, pin=on_gpu)

    @torch.no_grad()
    def train(self, start: Params, group: PackedGroup, rate: float | None = None) -> tuple[list[float], list[int]]:
        self._order = torch.from_numpy(group.order)
        for name, value in widened(start, units_of(self._start)).items():
            self._start[name].copy_(value)
        self._model.load(self._start)
        self._given_rate = self._hparams.learning_rate if rate is None else rate
        self._rate.fill_(self._given_rate)
        for values in (self._losses, *(value for moments in self._moments for value in moments.values())):
            values.zero_()
        buffers = self._model.buffers
        with products(self._hparams.precision, self._device):
            if buffers.reserve(group.shapes):
                self._graphs.forget()
            data = group.data.to(self._device, non_blocking=True)
            first = 0
            for shape in group.shapes:
                part = data[first : first + shape.values]
                self._graphs.run(self._step, shape, (buffers.data(shape),), (part,))
                first += shape.values
        return self._as_given(self._losses[: len(group)].cpu()).tolist(), group.tokens

    @torch.no_grad()
    def norms(self) -> list[float]:
        with current(self._device):
            squares = self._model.squares(len(self._order), self._start, 1.0, {})
        return self._as_given(squares.sqrt().cpu()).tolist()

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        own = torch.tensor(factors, dtype=torch.float64)[self._order].to(self._device)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._start.items()}
        with current(self._device):
            for name, value in self._model.weights.items():
                self._kernels.add_updates(value[: len(own)], self._start[name], own, sums[name])
        for name, value in narrowed(sums, self._like).items():
            into[name].add_(value)

    def _as_given(self, values: Tensor) -> Tensor:
        restored = torch.empty_like(values)
        restored[self._order] = values
        return restored

    def _step(self, shape: Shape, data: Tensor) -> None:
        parts = shape.parts(data)
        if self._hparams.is_plain:
            # A CUDA graph stores numbers at capture, and reads tensors at each replay.
            is_tensor = self._graphs.is_on and self._hparams.schedule != "constant"
            losses = self._model.descend(shape, parts, self._rate if is_tensor else self._given_rate)
        else:
            losses = self._model.gradient(shape, parts)
            scalars = torch.cat((self._rate, 1 - self._betas**parts.number))
            clip = self._hparams.gradient_clip
            self._model.optimize(self._start, self._moments, parts.counts, scalars, self._rule, clip)
        self._losses[: shape.users] += losses.sum(1, dtype=torch.float64)


def _model_of(kernels: Kernels) -> Any:
    """Return the class of the model, which takes the kernels."""
    return PositionModel if isinstance(kernels, PositionKernels) else StackedModel


def _rule(hparams: LocalHParams) -> Rule:
    return Rule(optimizer_named(configured(hparams, "optimizer")), hparams.momentum, hparams.proximal)
