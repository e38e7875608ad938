"""The operations of a stacked step whose activations are by position, in PyTorch: the reference for Triton's kernels.

Positions are in the order of time, then row. Logits are not stored: the first pass stores the log-sum-exp of each
position, and the second recomputes the logits while it updates the weights. Shapes and dtypes are as in `kernels`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flsim.training.cohort.kernels import Kernels, TorchKernels


class Target(NamedTuple):
    """A weight that takes a step, or the memory of its gradient."""

    value: Tensor  # the weight in its own dtype, or the gradient
    # copy of the weight in the dtype of products; None if the weight has that dtype, and for gradients
    low: Tensor | None = None


class Prediction(NamedTuple):
    """The operands of the output layer."""

    chosen: Tensor  # [u, N, D], r at each position
    embedding: Tensor  # [u, V, D]; rounded to the dtype of `chosen` before it is multiplied
    bias: Tensor  # [u, V]
    targets: Tensor  # int32 [u, N]; 0, which is padding and not a word, after the positions of a user
    counts: Tensor  # int32 [u], number of positions of each user, which are the first ones
    # [u, N], log-sum-exp of the logits (nats), infinite after the positions of a user; written by `predict`
    log_sums: Tensor
    factor: Tensor | None = None  # float64 [1], factor of all gradients; 1 if None


class PositionKernels(Kernels, Protocol):
    """The operations of a step by position; methods write to their arguments, but only within the positions of a user.

    Gradients are of each user's mean loss. If `rate` is None, a method writes gradients to its targets; otherwise it
    subtracts rate times the gradient from them. Targets of users without positions do not change.
    """

    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        """Run the cells over time, as in `flsim.models.cifg`.

        `gates` [u, N, 3H] have the contribution of inputs to the sums of gates, and become f, o, g; `bias` [u, 3H],
        `recurrent` [u, D, 3H], `projection` [u, H, D]. `before` [u, N, D] becomes r of the previous time of each
        position, 0 at the first time; `outputs` [u, N, D], `cells` [u, N, H] and `hidden` [u, N, H] become r, c and o
        tanh c. `starts`, int32 [u, T + 1], has the first position of each time, then the number of positions; `rows` is
        the largest number of rows at a time.
        """

    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        """Run the cells backwards over time; see `recur_positions`. The values of `cells` are lost.

        `gates`, f, o, g, become the gradient by the gates' sums; `d_outputs` [u, N, D] the complete gradient by r.
        """

    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        """Compute the cross-entropy, and its gradient by `chosen`; log-sum-exps of the prediction are written.

        `losses` [u, N], nats, and `d_chosen` [u, N, D] become 0 after a user's positions.
        """

    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        """Compute the gradients by the embedding [u, V, D] and by the bias [u, V], and store or apply them."""

    def descend_positions(
        self, weights: Sequence[Target], lefts: Sequence[Tensor], right: Tensor, bias: Target | None, counts: Tensor,
        rate: float | None,
    ) -> None:  # fmt: skip
        """Compute the gradients left' right of one or two weights, and right's sum for a bias; store or apply them.

        `weights` are targets [u, m, n], each with a left [u, N, m]; `right` is [u, N, n], `bias` a target [u, n] or
        None, and `counts`, int32 [u], the number of positions of each user.
        """


class TorchPositionKernels(TorchKernels):
    """The `PositionKernels` in plain PyTorch, on any device; sums and products have the dtype of the master weights."""

    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        low, exact = gates.dtype, cells.dtype
        bias, recurrent, projection = (value.to(exact) for value in (bias, recurrent, projection))
        output = recurrent.new_zeros(len(gates), rows, outputs.shape[2])
        cell = recurrent.new_zeros(len(gates), rows, cells.shape[2])
        for time in range(starts.shape[1] - 1):
            user, row, place = _live(starts, time, rows)
            before[user, place] = output[user, row].to(low)
            sums = torch.baddbmm(bias[:, None], output, recurrent)
            sums[user, row] += gates[user, place].to(exact)
            forget, open_, candidate = sums.chunk(3, dim=-1)
            f, o, g = forget.sigmoid(), open_.sigmoid(), candidate.tanh()
            cell = f * cell + (1 - f) * g
            m = (o * cell.tanh()).to(low)
            output = torch.bmm(m.to(exact), projection).to(low).to(exact)
            gates[user, place] = torch.cat((f, o, g), dim=-1)[user, row].to(low)
            cells[user, place], hidden[user, place] = cell[user, row], m[user, row]
            outputs[user, place] = output[user, row].to(low)

    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        low, exact = gates.dtype, cells.dtype
        recurrent, projection = recurrent.to(exact), projection.to(exact)
        later = recurrent.new_zeros(len(gates), rows, d_outputs.shape[2])
        carried = recurrent.new_zeros(len(gates), rows, cells.shape[2])
        for time in reversed(range(starts.shape[1] - 1)):
            user, row, place = _live(starts, time, rows)
            d_outputs[user, place] = (d_outputs[user, place].to(exact) + later[user, row]).to(low)
            own = projection[user] @ d_outputs[user, place].to(exact)[..., None]
            d_hidden, (f, o, g) = own[..., 0], gates[user, place].to(exact).chunk(3, dim=-1)
            last = cells[user, starts[user, time - 1] + row] if time else torch.zeros_like(f)
            bounded = cells[user, place].tanh()
            d_cell = carried[user, row] + d_hidden * o * (1 - bounded**2)
            d_forget, d_open = d_cell * (last - g) * f * (1 - f), d_hidden * bounded * o * (1 - o)
            gates[user, place] = torch.cat((d_forget, d_open, d_cell * (1 - f) * (1 - g**2)), dim=-1).to(low)
            later, carried = torch.zeros_like(later), torch.zeros_like(carried)
            later[user, row] = (recurrent[user] @ gates[user, place].to(exact)[..., None])[..., 0]
            carried[user, row] = d_cell * f

    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        scores, real = _scores(prediction), _real(prediction)
        prediction.log_sums.copy_(scores.logsumexp(-1)).masked_fill_(~real, torch.inf)
        own = scores.gather(-1, prediction.targets.long()[..., None])[..., 0]
        losses.copy_(prediction.log_sums - own).masked_fill_(~real, 0)
        d_chosen.copy_(torch.bmm(_errors(prediction), _rounded(prediction)))

    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        errors, real = _errors(prediction), _real(prediction)[..., None]
        gradient = torch.bmm(errors.mT, prediction.chosen.to(errors.dtype).masked_fill(~real, 0))
        _settle(weight, gradient, prediction.counts, rate)
        _settle(bias, errors.sum(1), prediction.counts, rate)

    def descend_positions(
        self, weights: Sequence[Target], lefts: Sequence[Tensor], right: Tensor, bias: Target | None, counts: Tensor,
        rate: float | None,
    ) -> None:  # fmt: skip
        beyond = torch.arange(right.shape[1], device=right.device)[:, None] >= counts[:, None, None]
        exact = torch.promote_types(right.dtype, torch.float32)
        right = right.to(exact).masked_fill(beyond, 0)
        for weight, left in zip(weights, lefts, strict=True):
            _settle(weight, torch.bmm(left.to(exact).masked_fill(beyond, 0).mT, right), counts, rate)
        if bias is not None:
            _settle(bias, right.sum(1), counts, rate)


def _live(starts: Tensor, time: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return user, row and position of every position of a time, int64 [n] each."""
    row = torch.arange(rows, device=starts.device)
    user, row = (row < (starts[:, time + 1] - starts[:, time])[:, None]).nonzero(as_tuple=True)
    return user, row, starts[user, time] + row


def _real(prediction: Prediction) -> Tensor:
    """Return whether each place has a position, bool [u, N]."""
    places = torch.arange(prediction.chosen.shape[1], device=prediction.chosen.device)
    return places < prediction.counts[:, None]


def _rounded(prediction: Prediction) -> Tensor:
    """Return the embedding in the precision of products, in the dtype of sums."""
    return prediction.embedding.to(prediction.chosen.dtype).to(prediction.log_sums.dtype)


def _scores(prediction: Prediction) -> Tensor:
    """Return the logits [u, N, V]."""
    exact = prediction.log_sums.dtype
    return torch.baddbmm(prediction.bias.to(exact)[:, None], prediction.chosen.to(exact), _rounded(prediction).mT)


def _errors(prediction: Prediction) -> Tensor:
    """Return the gradient by the logits [u, N, V], 0 after the positions of a user."""
    errors = (_scores(prediction) - prediction.log_sums[..., None]).exp_()
    chosen = prediction.targets.long()[..., None]
    errors.scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=errors.dtype))
    errors.div_(prediction.counts[:, None, None])
    if prediction.factor is not None:
        errors.mul_(prediction.factor)
    return errors.masked_fill_(~_real(prediction)[..., None], 0)


def _settle(target: Target, gradient: Tensor, counts: Tensor, rate: float | None) -> None:
    """Store the gradients of users that have positions, or subtract rate times them."""
    active = (counts > 0).view(-1, *[1] * (gradient.ndim - 1))
    value = gradient.to(target.value.dtype) if rate is None else target.value - rate * gradient
    target.value.copy_(torch.where(active, value, target.value))
    if target.low is not None:
        target.low.copy_(target.value)
