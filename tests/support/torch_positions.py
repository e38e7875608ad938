"""The operations of a training step by position, in plain PyTorch on a CPU: the reference for Triton's kernels.

The recurrence uses the kernels of a padded step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flsim.training.cohort.kernels import Kernels, PositionKernels, Prediction, Target


class WideKernels(Kernels):
    """PyTorch's kernels of a padded step, which round the number of units up to a multiple of 16."""

    multiple = 16


class TorchPositionKernels(PositionKernels):
    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        at, place = _places(starts, rows)
        users, times = len(gates), starts.shape[1] - 1
        padded, m = (value.new_zeros(users, times, rows, value.shape[2]) for value in (gates, hidden))
        r, c = (value.new_zeros(users, times + 1, rows, value.shape[2]) for value in (outputs, cells))
        padded[at] = gates[place]
        self.recur(padded, bias, recurrent, projection, r, c, m)
        gates[place], before[place], hidden[place] = padded[at], r[at], m[at]
        outputs[place], cells[place] = r[:, 1:][at], c[:, 1:][at]

    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        at, place = _places(starts, rows)
        users, times = len(gates), starts.shape[1] - 1
        padded = gates.new_zeros(users, times, rows, gates.shape[2])
        d_r, c = (value.new_zeros(users, times + 1, rows, value.shape[2]) for value in (d_outputs, cells))
        padded[at], d_r[:, 1:][at], c[:, 1:][at] = gates[place], d_outputs[place], cells[place]
        self.recur_back(padded, recurrent, projection, d_r, c)
        gates[place], d_outputs[place] = padded[at], d_r[:, 1:][at]

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
        beyond = torch.arange(right.shape[1])[:, None] >= counts[:, None, None]
        exact = torch.promote_types(right.dtype, torch.float32)
        right = right.to(exact).masked_fill(beyond, 0)
        for weight, left in zip(weights, lefts, strict=True):
            _settle(weight, torch.bmm(left.to(exact).masked_fill(beyond, 0).mT, right), counts, rate)
        if bias is not None:
            _settle(bias, right.sum(1), counts, rate)


class WidePositionKernels(TorchPositionKernels):
    """PyTorch's kernels by position, which round the number of units up to a multiple of 16."""

    multiple = 16


def _places(starts: Tensor, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return each position's index in padded activations, (user, time, row), and in positions, (user, position)."""
    user, time, row = (torch.arange(rows) < starts.diff()[..., None]).nonzero(as_tuple=True)
    return (user, time, row), (user, starts[user, time] + row)


def _real(prediction: Prediction) -> Tensor:
    """Return whether each place has a position, bool [u, N]."""
    places = torch.arange(prediction.chosen.shape[1])
    return places < prediction.counts[:, None]


def _rounded(prediction: Prediction) -> Tensor:
    """Return the embedding in the precision of products, in the dtype of sums."""
    return prediction.embedding.to(prediction.chosen.dtype).to(prediction.log_sums.dtype)


def _scores(prediction: Prediction) -> Tensor:
    """Return the logits [u, N, V]."""
    exact = prediction.log_sums.dtype
    return torch.baddbmm(prediction.bias.to(exact)[:, None], prediction.chosen.to(exact), _rounded(prediction).mT)


def _errors(prediction: Prediction) -> Tensor:
    """Return the gradient with respect to the logits [u, N, V], which is 0 after the last position of a user."""
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
