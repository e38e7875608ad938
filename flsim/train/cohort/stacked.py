"""Local training of many users at once: their weights are stacked, and every product is one of all users.

On an NVIDIA GPU with Triton (`triton_kernels`), where each shape of step is one CUDA graph; plain PyTorch (`kernels`)
anywhere else. Shapes: u users, T times, B rows, N positions, D embedding, H units, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flsim.data.vocabulary import Layout
from flsim.model.cifg import Params
from flsim.train.cohort.activations import Buffers, Sizes
from flsim.train.cohort.devices import current, kernels_for, products
from flsim.train.cohort.kernels import BETAS, Kernels, TorchKernels
from flsim.train.cohort.packing import EXACT, PackedGroup, Shape, pack
from flsim.train.cohort.steps import Steps
from flsim.train.cohort.units import narrowed, units_of, widened
from flsim.train.hparams import LocalHParams

GRAPHS = Shape(users=16, times=4, rows=16, positions=32)  # so coarse that there are few different shapes
UNITS = 16  # H is rounded up to a multiple of it: rows of matrices then begin where wide loads can
WAVES = 2  # users for each multiprocessor of a GPU
CPU_USERS = 8
SLACK = 0.9  # of the memory that is free; the rest is for what libraries take


class Term(NamedTuple):
    """left' right is the gradient of a weight (of its transpose where `turned`), right's sum that of a bias."""

    weight: str
    left: Tensor
    right: Tensor
    bias: str | None = None
    turned: bool = False


class StackedTrainer:
    """Trains a micro-cohort from the global parameters; a `flsim.train.cohort.engine.Trainer`.

    Buffers for activations grow to the largest step that was met, and are used again.

    Args:
        like: parameters of the model, for names, shapes, dtype (float64: not with Triton) and device.
        hparams: local training.
        layout: the corpus' token layout.
        users: that can train at once.
        kernels: Triton's on an NVIDIA GPU that has it, else PyTorch's, if None.
        graphs: whether to use CUDA graphs; where Triton's kernels are used on a GPU if None.

    Raises:
        torch.OutOfMemoryError: also by `train` (RuntimeError on a CPU).
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
        self._hparams, self._users, self._like = hparams, users, like
        self._device, self._dtype = like["embedding"].device, like["embedding"].dtype
        self._kernels = kernels or kernels_for(like, hparams.precision)
        on_gpu = self._device.type == "cuda"
        self._use_graphs = graphs if graphs is not None else on_gpu and not isinstance(self._kernels, TorchKernels)
        self._rounding = GRAPHS if self._use_graphs else EXACT
        rows = hparams.batch_size
        self._largest = Shape(users, layout.record_words, rows, layout.record_words * rows)

        wide = widened(like, _units(like, self._kernels))
        self._start = {name: value.detach().clone() for name, value in wide.items()}
        self._weights = self._stack(self._dtype)
        self._low = self._stack(_low(hparams, self._dtype)) if hparams.precision == "bf16" else self._weights
        self._moments = [self._stack(self._dtype) for _ in range(_moments(hparams))]
        self._gradients = {} if _is_plain(hparams) else self._stack(_low(hparams, self._dtype))
        self._losses = torch.zeros(users, dtype=torch.float64, device=self._device)
        self._own = torch.arange(users, device=self._device)[:, None]
        self._betas = torch.tensor(BETAS, dtype=torch.float64, device=self._device)
        self._buffers = Buffers(_sizes(self._start, hparams), self._device)
        self._forget_graphs()
        self._order = torch.arange(0)

    @staticmethod
    def users_that_fit(like: Params, hparams: LocalHParams, layout: Layout, memory_share: float = 1.0) -> int:
        """As many as fill the device, and fit its free memory."""
        device = like["embedding"].device
        if device.type != "cuda":
            return CPU_USERS
        fixed, each = StackedTrainer.memory(like, hparams, layout)
        free, whole = torch.cuda.mem_get_info(device)
        fitting = int((min(free, whole * memory_share) * SLACK - fixed) // each)
        return max(1, min(fitting, WAVES * torch.cuda.get_device_properties(device).multi_processor_count))

    @staticmethod
    def memory(like: Params, hparams: LocalHParams, layout: Layout) -> tuple[int, int]:
        """Bytes of the device's memory: the fixed part, and what each user needs where its records are longest."""
        wide = widened(like, _units(like, kernels_for(like, hparams.precision)))
        sizes, rows = _sizes(wide, hparams), hparams.examples(hparams.batch_size)
        copies = [sizes.master] * (1 + _moments(hparams))
        copies += [sizes.low] * ((sizes.low != sizes.master) + (not _is_plain(hparams)))
        values = sum(value.numel() for value in wide.values())
        longest = Shape(1, layout.record_words, rows, layout.record_words * rows)
        each = values * sum(dtype.itemsize for dtype in copies) + sizes.bytes(longest)
        return values * (sizes.master.itemsize + torch.float64.itemsize), each

    def pack(self, group: Sequence[Steps]) -> PackedGroup:
        """What `train` takes; in pinned memory for a GPU."""
        return pack(group, self._rounding, self._largest, pin=self._device.type == "cuda")

    @torch.no_grad()
    def train(self, start: Params, group: PackedGroup) -> tuple[list[float], list[int]]:
        """All steps of at most `users` users, whose weights stay for `norms` and `add_updates`.

        Returns:
            Of each user, in the order that `pack` got them: the summed cross-entropy (nats) before each of its steps,
            and its number of positions.
        """
        self._order = torch.from_numpy(group.order)
        for name, value in widened(start, units_of(self._start)).items():
            self._start[name].copy_(value)
            self._weights[name].copy_(value.expand_as(self._weights[name]))
            if self._low is not self._weights:
                self._low[name].copy_(value.expand_as(self._low[name]))
        for values in (self._losses, *(value for moments in self._moments for value in moments.values())):
            values.zero_()
        with products(self._hparams.precision, self._device):
            if self._buffers.reserve(group.shapes):
                self._forget_graphs()
            data = group.data.to(self._device, non_blocking=True)
            first = 0
            for shape in group.shapes:
                self._run(shape, data[first : first + shape.values])
                first += shape.values
        return self._as_given(self._losses[: len(group)].cpu()).tolist(), group.tokens

    @torch.no_grad()
    def norms(self) -> list[float]:
        """The L2 norm of each user's whole update, in the order that `pack` got them."""
        with current(self._device):
            squares = self._sum_squares(len(self._order), 1.0, {})
        return self._as_given(squares.sqrt().cpu()).tolist()

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        """Add the sum over users of factor times update, which for a factor of 0 is 0.

        Args:
            factors: in the order that `pack` got the users.
            into: float64, on the device.
        """
        own = torch.tensor(factors, dtype=torch.float64)[self._order].to(self._device)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._start.items()}
        with current(self._device):
            for name, value in self._weights.items():
                self._kernels.add_updates(value[: len(own)], self._start[name], own, sums[name])
        for name, value in narrowed(sums, self._like).items():
            into[name].add_(value)

    def _stack(self, dtype: torch.dtype) -> Params:
        new = {name: (self._users, *value.shape) for name, value in self._start.items()}
        return {name: torch.zeros(shape, dtype=dtype, device=self._device) for name, shape in new.items()}

    def _as_given(self, values: Tensor) -> Tensor:
        given = torch.empty_like(values)
        given[self._order] = values
        return given

    def _forget_graphs(self) -> None:
        """They hold addresses of buffers. Their common pool of memory ends with the last of them."""
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None

    def _run(self, shape: Shape, data: Tensor) -> None:
        if not self._use_graphs:
            self._step(shape, data)
            return
        read = self._buffers.data(shape)
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._capture(shape, read)
        read.copy_(data)
        graph.replay()

    def _capture(self, shape: Shape, read: Tensor) -> torch.cuda.CUDAGraph:
        """A graph of the step; the run before it, which compiles kernels, is one without positions: it changes nothing.

        Other threads read and pack meanwhile, and may allocate pinned memory.
        """
        read.zero_()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step(shape, read)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            self._step(shape, read)
        return graph

    def _step(self, shape: Shape, data: Tensor) -> None:
        """One step of each user that has one."""
        parts, users, kernels, a = shape.parts(data), shape.users, self._kernels, self._buffers.views(shape)
        w, own = {name: value[:users] for name, value in self._low.items()}, self._own[:users]
        embedding, times = w["embedding"], shape.times
        tokens = (parts.tokens.flatten(1) + own * embedding.shape[1]).flatten()
        torch.index_select(embedding.flatten(0, 1), 0, tokens, out=a.read.flatten(0, 1))
        torch.bmm(a.read, w["input_weight"], out=a.gates.flatten(1, 2))
        kernels.recur(a.gates, w["gate_bias"], w["recurrent_weight"], w["projection"], a.outputs, a.cells, a.hidden)

        index = (parts.places + own * (times + 1) * shape.rows).flatten()
        torch.index_select(a.outputs.flatten(0, 2), 0, index, out=a.chosen.flatten(0, 1))
        torch.bmm(a.chosen, embedding.mT, out=a.logits)
        kernels.cross_entropy(a.logits, w["output_bias"], parts.targets, parts.counts, a.losses)
        self._losses[:users] += a.losses.sum(1, dtype=torch.float64)

        torch.bmm(a.logits, embedding, out=a.d_chosen)
        a.d_outputs.zero_().flatten(0, 2).index_copy_(0, index, a.d_chosen.flatten(0, 1))
        kernels.recur_back(a.gates, w["recurrent_weight"], w["projection"], a.d_outputs, a.cells)
        d_gates = a.gates.flatten(1, 2)
        torch.bmm(d_gates, w["input_weight"].mT, out=a.d_read)
        terms = (
            Term("embedding", a.chosen, a.logits, "output_bias", turned=True),
            Term("input_weight", a.read, d_gates, "gate_bias"),
            Term("recurrent_weight", a.outputs[:, :times].flatten(1, 2), d_gates),
            Term("projection", a.hidden.flatten(1, 2), a.d_outputs[:, 1:].flatten(1, 2)),
        )
        if _is_plain(self._hparams):
            self._descend(users, terms)
            low = w["embedding"] if self._low is not self._weights else None
            table, scale = self._weights["embedding"][:users], -self._hparams.learning_rate
            kernels.add_rows(table, low, a.d_read, parts, scale)
        else:
            gradients = {name: value[:users] for name, value in self._gradients.items()}
            for term in terms:
                out = gradients[term.weight].mT if term.turned else gradients[term.weight]
                torch.bmm(term.left.mT, term.right, out=out)
                if term.bias:
                    torch.sum(term.right, 1, out=gradients[term.bias])
            kernels.add_rows(gradients["embedding"], None, a.d_read, parts, 1.0)
            self._optimize(gradients, parts.counts, parts.number)

    def _descend(self, users: int, terms: Sequence[Term]) -> None:
        """Plain SGD, where gradients need not be held."""
        has_low = self._low is not self._weights

        def of(values: Params, name: str, turned: bool = False) -> Tensor:
            value = values[name][:users]
            return value.mT if turned else value

        for term in terms:
            weight, low = of(self._weights, term.weight, term.turned), of(self._low, term.weight, term.turned)
            bias = of(self._weights, term.bias) if term.bias else None
            low_bias = of(self._low, term.bias) if term.bias and has_low else None
            self._kernels.descend(
                weight, low if has_low else None, term.left, term.right, self._hparams.learning_rate, bias, low_bias
            )

    def _optimize(self, gradients: Params, counts: Tensor, number: Tensor) -> None:
        """FedProx, then the clip, then the optimizer."""
        users, hparams = len(counts), self._hparams
        scale = torch.ones(users, dtype=torch.float64, device=self._device)
        if hparams.gradient_clip is not None:
            squares = self._sum_squares(users, hparams.proximal, gradients)
            scale = (hparams.gradient_clip / squares.sqrt()).clamp(max=1)
        corrections = 1 - self._betas**number
        for name, gradient in gradients.items():
            low = self._low[name][:users] if self._low is not self._weights else None
            moments = [moment[name][:users] for moment in self._moments]
            self._kernels.optimize(
                self._weights[name][:users], low, gradient, self._start[name], moments,
                scale, counts, corrections, hparams,
            )  # fmt: skip

    def _sum_squares(self, users: int, mu: float, gradients: Params) -> Tensor:
        """Float64 [u], of mu (weights - start) + gradients, over all parameters."""
        total = torch.zeros(users, dtype=torch.float64, device=self._device)
        for name, value in self._weights.items():
            total += self._kernels.squares(value[:users], self._start[name], mu, gradients.get(name))
        return total


def _units(like: Params, kernels: Kernels) -> int:
    units = len(like["projection"])
    return units if isinstance(kernels, TorchKernels) else -(-units // UNITS) * UNITS


def _is_plain(hparams: LocalHParams) -> bool:
    return hparams.optimizer == "sgd" and hparams.gradient_clip is None and not hparams.proximal


def _moments(hparams: LocalHParams) -> int:
    return {"sgd": 0, "momentum": 1, "adam": 2}[hparams.optimizer]


def _low(hparams: LocalHParams, master: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if hparams.precision == "bf16" else master


def _sizes(wide: Params, hparams: LocalHParams) -> Sizes:
    (vocabulary, width), units = wide["embedding"].shape, units_of(wide)
    master = wide["embedding"].dtype
    return Sizes(width, units, vocabulary, _low(hparams, master), master)
