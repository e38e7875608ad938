"""The operations of a step by position in plain PyTorch, on any device: the reference for Triton's kernels.

Sums and products have the dtype of the master weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flsim.training.cohort.kernels import Kernels
from flsim.training.cohort.position_kernels import PositionKernels, Prediction, Target


class WideKernels(Kernels):
    """PyTorch's kernels of a padded step, for which models get more units."""

    multiple = 16


class TorchPositionKernels(PositionKernels):
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


class WidePositionKernels(TorchPositionKernels):
    """The same, for which models get more units."""

    multiple = 16


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
