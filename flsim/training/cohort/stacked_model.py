"""The written-out gradient of stacked users' models, and plain SGD by it; every product covers all users.

Shapes: u users, T times, B rows, N positions, D embedding, H units, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flsim.models.language_model import Params
from flsim.training.cohort.activations import Activations, Buffers, Sizes
from flsim.training.cohort.kernels import Kernels, TorchKernels
from flsim.training.cohort.packing import Parts, Shape
from flsim.training.cohort.padding import units_of, widened
from flsim.training.hparams import Precision

UNITS = 16  # H is rounded up to a multiple of it: rows of matrices then begin where wide loads can


class Dropped(NamedTuple):
    """Dropout of a step, 1 for values that stay and 0 for others.

    Attributes:
        read: uint8 [u, T B, D], for what the cell reads.
        predicted: uint8 [u, N, D], for what words are predicted from.
        factor: multiplier of the values that stay.
    """

    read: Tensor
    predicted: Tensor
    factor: float


class Term(NamedTuple):
    """A gradient as a product: left' right is that of a weight (`turned`: of its transpose), right's sum of a bias."""

    weight: str
    left: Tensor
    right: Tensor
    bias: str | None = None
    turned: bool = False


class StackedWeights:
    """The weights of models of the same sizes, with memory for a step.

    Buffers for activations grow to the largest step so far, and are used again.

    Args:
        wide: parameters of a model as `widened_for` returns them, for names, shapes, dtype and device.
        users: number of models.
        precision: precision of matrix products.
        holds_gradients: whether `gradient` is called; `descend` needs no memory for gradients.

    Attributes:
        weights: [u, ...], all 0 at first.
        low: the weights in the dtype of products; the same tensors where that is the weights' own.
        gradients: [u, ...], in the dtype of products; empty without `holds_gradients`.
        buffers: memory of activations.
    """

    sizes: type[Sizes] = Sizes

    def __init__(self, wide: Params, users: int, precision: Precision, holds_gradients: bool) -> None:
        sizes = self.sizes_of(wide, precision)
        self._device = wide["embedding"].device
        self._shapes = {name: (users, *value.shape) for name, value in wide.items()}
        self.weights = self.stack(sizes.master)
        self.low = self.stack(sizes.low) if precision == "bf16" else self.weights
        self.gradients = self.stack(sizes.low) if holds_gradients else {}
        self.buffers = Buffers(sizes, self._device)
        self._own = torch.arange(users, device=self._device)[:, None]

    @classmethod
    def sizes_of(cls, wide: Params, precision: Precision) -> Sizes:
        (vocabulary, width), master = wide["embedding"].shape, wide["embedding"].dtype
        return cls.sizes(width, units_of(wide), vocabulary, torch.bfloat16 if precision == "bf16" else master, master)

    def stack(self, dtype: torch.dtype) -> Params:
        """Return zeros in the shapes of the weights."""
        return {name: torch.zeros(shape, dtype=dtype, device=self._device) for name, shape in self._shapes.items()}

    def load(self, wide: Params) -> None:
        """Give every user these weights."""
        for name, value in wide.items():
            self.weights[name].copy_(value.expand_as(self.weights[name]))
            if self.low is not self.weights:
                self.low[name].copy_(value.expand_as(self.low[name]))

    def _flat_places(self, index: Tensor, per_user: int) -> Tensor:
        """Return indices within each user [u, n] as flat indices among all users, each of which has `per_user`."""
        return (index + self._own[: len(index)] * per_user).flatten()


class StackedModel(StackedWeights):
    """The gradient of each model's mean cross-entropy by its own weights.

    Args:
        wide, users, precision, holds_gradients: as for `StackedWeights`.
        kernels: the parts of a step that are no plain products.
        is_single: whether all steps are of a single user; products are then those of plain matrices, for which
            libraries have more algorithms.
    """

    def __init__(
        self,
        wide: Params,
        users: int,
        precision: Precision,
        kernels: Kernels,
        holds_gradients: bool,
        is_single: bool = False,
    ) -> None:
        super().__init__(wide, users, precision, holds_gradients)
        self._kernels, self._is_single = kernels, is_single

    def descend(self, shape: Shape, parts: Parts, rate: float | Tensor, dropped: Dropped | None = None) -> Tensor:
        """Take a step of plain SGD, which needs no gradients in memory.

        Args:
            shape, parts: the step of the first u users.
            rate: learning rate. A tensor, float64 [1], may change under a CUDA graph; it is then a factor of the
                gradient by the logits.
            dropped: dropout of the step; None for none.

        Returns:
            [u, N], the cross-entropy in nats before the step, 0 beyond a user's positions.
        """
        varying, factor = (rate, 1.0) if isinstance(rate, Tensor) else (None, rate)
        terms, a = self._differentiate(shape, parts, varying, dropped)
        has_low = self.low is not self.weights

        def first_users(values: Params, name: str, turned: bool = False) -> Tensor:
            value = values[name][: shape.users]
            return value.mT if turned else value

        for term in terms:
            weight = first_users(self.weights, term.weight, term.turned)
            low = first_users(self.low, term.weight, term.turned)
            bias = first_users(self.weights, term.bias) if term.bias else None
            low_bias = first_users(self.low, term.bias) if term.bias and has_low else None
            self._kernels.descend(weight, low if has_low else None, term.left, term.right, factor, bias, low_bias)
        low_table = first_users(self.low, "embedding") if has_low else None
        self._kernels.add_rows(first_users(self.weights, "embedding"), low_table, a.d_read, parts, -factor)
        return a.losses

    def gradient(self, shape: Shape, parts: Parts, dropped: Dropped | None = None) -> Tensor:
        """Compute the first u users' `gradients`; arguments and result are those of `descend`."""
        terms, a = self._differentiate(shape, parts, None, dropped)
        gradients = {name: value[: shape.users] for name, value in self.gradients.items()}
        for term in terms:
            out = gradients[term.weight].mT if term.turned else gradients[term.weight]
            self._product(term.left.mT, term.right, out)
            if term.bias:
                torch.sum(term.right, 1, out=gradients[term.bias])
        self._kernels.add_rows(gradients["embedding"], None, a.d_read, parts, 1.0)
        return a.losses

    def _differentiate(
        self, shape: Shape, parts: Parts, rate: Tensor | None, dropped: Dropped | None
    ) -> tuple[tuple[Term, ...], Activations]:
        """Return the weights' gradients as terms, and activations, whose `d_read` is the gradient by the inputs."""
        kernels, a, times = self._kernels, Activations(*self.buffers.views(shape)), shape.times
        w = {name: value[: shape.users] for name, value in self.low.items()}
        embedding = w["embedding"]
        tokens = self._among_all(parts.tokens.flatten(1), embedding.shape[1])
        torch.index_select(embedding.flatten(0, 1), 0, tokens, out=a.read.flatten(0, 1))
        if dropped:
            a.read.mul_(dropped.read).mul_(dropped.factor)
        self._product(a.read, w["input_weight"], a.gates.flatten(1, 2))
        kernels.recur(a.gates, w["gate_bias"], w["recurrent_weight"], w["projection"], a.outputs, a.cells, a.hidden)

        index = self._among_all(parts.places, (times + 1) * shape.rows).long()
        torch.index_select(a.outputs.flatten(0, 2), 0, index, out=a.chosen.flatten(0, 1))
        if dropped:
            a.chosen.mul_(dropped.predicted).mul_(dropped.factor)
        self._product(a.chosen, embedding.mT, a.logits)
        kernels.cross_entropy(a.logits, w["output_bias"], parts.targets, parts.counts, a.losses, rate)

        self._product(a.logits, embedding, a.d_chosen)
        if dropped:
            a.d_chosen.mul_(dropped.predicted).mul_(dropped.factor)
        a.d_outputs.zero_().flatten(0, 2).index_copy_(0, index, a.d_chosen.flatten(0, 1))
        kernels.recur_back(a.gates, w["recurrent_weight"], w["projection"], a.d_outputs, a.cells)
        d_gates = a.gates.flatten(1, 2)
        self._product(d_gates, w["input_weight"].mT, a.d_read)
        if dropped:
            a.d_read.mul_(dropped.read).mul_(dropped.factor)
        return (
            Term("embedding", a.chosen, a.logits, "output_bias", turned=True),
            Term("input_weight", a.read, d_gates, "gate_bias"),
            Term("recurrent_weight", a.outputs[:, :times].flatten(1, 2), d_gates),
            Term("projection", a.hidden.flatten(1, 2), a.d_outputs[:, 1:].flatten(1, 2)),
        ), a

    def _among_all(self, index: Tensor, per_user: int) -> Tensor:
        return index.flatten() if self._is_single else self._flat_places(index, per_user)

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if self._is_single:
            torch.mm(left[0], right[0], out=out[0])
        else:
            torch.bmm(left, right, out=out)


def widened_for(kernels: Kernels, like: Params) -> Params:
    """Return parameters with the number of units that the kernels are fastest at."""
    units = units_of(like)
    return like if isinstance(kernels, TorchKernels) else widened(like, -(-units // UNITS) * UNITS)
