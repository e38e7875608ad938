"""The output layer of stacked users in Triton: two passes over the vocabulary, neither of which stores logits.

The first pass has some positions of a user and streams the embedding, as attention streams its keys: it keeps the
largest logit so far, the sum of exponentials and the sum of rows that they weight (Dao et al., 2022, Algorithm 1, with
the embedding as both keys and values). The second pass has some rows of the embedding and streams the positions. So
each gradient is a sum in the registers of one program, in one order.
"""
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from flsim.training.cohort.position_kernels import Prediction, Target
from flsim.training.cohort.triton_kernels import _former, _settle
from flsim.training.cohort.triton_recurrence import DOT, block

# Positions and words of a tile of logits in the first pass, and in the second.
TILES = {"bf16": ((64, 64), (32, 64)), "tf32": ((32, 32), (32, 32)), "ieee": ((16, 16), (16, 16))}
REGISTERS = 168  # of a thread of the first pass, so that three programs of bfloat16 fit a multiprocessor
VALUES = 2**13  # of a sum of rows that registers hold
LOG2E = tl.constexpr(1.4426950408889634)  # GPUs compute powers of 2: e^x = 2^(x log2 e)


@triton.jit
def _rows(matrix, row, valid, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of some rows of a matrix of D columns, 0 where a row is not valid."""
    d = FIRST + tl.arange(0, BLOCK)
    at = matrix + row[:, None] * D + d[None, :]
    if FIRST + BLOCK <= D:
        return tl.load(at, valid[:, None], other=0.0)
    return tl.load(at, valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_gradient(
    d_chosen, place, stored, real, mean, rows, total, scale, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """Store columns of the gradient by r: the mean row of the embedding minus the target's row, scaled."""
    d = FIRST + tl.arange(0, BLOCK)
    gradient = tl.where(real[:, None], (mean / total[:, None] - rows) * scale, 0.0).to(d_chosen.dtype.element_ty)
    tl.store(d_chosen + place[:, None] * D + d[None, :], gradient, stored[:, None] & (d < D)[None, :])


@triton.jit
def _predict(
    chosen,
    embedding,
    bias,
    targets,
    counts,
    log_sums,
    factor,
    losses,
    d_chosen,
    N,
    V,
    D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the loss of some positions of a user, and its gradient by r."""
    user = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    count = tl.load(counts + user)
    place = user * N + n
    real = n < count
    low = d_chosen.dtype.element_ty
    embedding += user * V * D
    bias += user * V
    output = _rows(chosen, place, real, D, 0, BD)
    mean = tl.zeros((BN, BD), tl.float32)
    if BE:
        second_output = _rows(chosen, place, real, D, BD, BE)
        second_mean = tl.zeros((BN, BE), tl.float32)
    largest = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    columns = tl.arange(0, BV)
    next_shift = tl.load(bias + columns, columns < V, other=float("-inf"))
    words = tl.where(tl.program_id(0) * BN < count, V, 0)
    for first in range(0, words, BV):
        v = first + columns
        shift = next_shift.to(tl.float32) * LOG2E
        # The biases of the next tile, which so have a whole tile's time to arrive.
        next_shift = tl.load(bias + v + BV, v + BV < V, other=float("-inf"))
        rows = _rows(embedding, v, v < V, D, 0, BD).to(low)
        scores = tl.dot(output, tl.trans(rows), input_precision=PRECISION)
        if BE:
            second_rows = _rows(embedding, v, v < V, D, BD, BE).to(low)
            scores = tl.dot(second_output, tl.trans(second_rows), scores, input_precision=PRECISION)
        scores = scores * LOG2E + shift[None, :]
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        shrink = tl.exp2(largest - above)
        total = total * shrink + tl.sum(weights, 1)
        mean = tl.dot(weights.to(low), rows, mean * shrink[:, None], input_precision=PRECISION)
        if BE:
            second_mean *= shrink[:, None]
            second_mean = tl.dot(weights.to(low), second_rows, second_mean, input_precision=PRECISION)
        largest = above
    total = tl.where(real, total, 1.0)
    scale = 1.0 / tl.maximum(count, 1)
    if FACTOR:
        scale *= tl.load(factor).to(tl.float32)
    target = tl.load(targets + place, real, other=0)
    # The gradient before the loss: both need many registers.
    rows = _rows(embedding, target, real, D, 0, BD).to(low).to(tl.float32)
    _store_gradient(d_chosen, place, n < N, real, mean, rows, total, scale, D, 0, BD)
    own = tl.load(bias + target).to(tl.float32) + tl.sum(output.to(tl.float32) * rows, 1)
    if BE:
        second_rows = _rows(embedding, target, real, D, BD, BE).to(low).to(tl.float32)
        _store_gradient(d_chosen, place, n < N, real, second_mean, second_rows, total, scale, D, BD, BE)
        own += tl.sum(second_output.to(tl.float32) * second_rows, 1)
    log_sum = (tl.log2(total) + largest) / LOG2E
    tl.store(log_sums + place, tl.where(real, log_sum, float("inf")), n < N)
    tl.store(losses + place, tl.where(real, log_sum - own, 0.0), n < N)


@triton.jit
def _descend_predictions(
    chosen,
    embedding,
    bias,
    targets,
    counts,
    log_sums,
    factor,
    weight,
    low,
    own_bias,
    low_bias,
    rate,
    N,
    V,
    D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    EVEN: tl.constexpr,
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient by some rows of the embedding and by their biases, over all of a user's positions."""
    user = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    place = user * V + v
    count = tl.load(counts + user)
    if count > 0:
        rows = _rows(embedding, place, v < V, D, 0, BD).to(chosen.dtype.element_ty)
        total = tl.zeros((BV, BD), tl.float32)
        if BE:
            second_rows = _rows(embedding, place, v < V, D, BD, BE).to(chosen.dtype.element_ty)
            second_total = tl.zeros((BV, BE), tl.float32)
        shift = tl.load(bias + place, v < V, other=float("-inf")).to(tl.float32) * LOG2E
        sums = tl.zeros((BV,), tl.float32)
        word = tl.where(v > 0, v, -1)  # as 0, which is no word, is the target beyond a user's positions
        for first in range(0, count, BN):
            n = first + tl.arange(0, BN)
            at = user * N + n
            output = _rows(chosen, at, n < count, D, 0, BD)
            scores = tl.dot(rows, tl.trans(output), input_precision=PRECISION)
            if BE:
                second_output = _rows(chosen, at, n < count, D, BD, BE)
                scores = tl.dot(second_rows, tl.trans(second_output), scores, input_precision=PRECISION)
            log_sum = tl.load(log_sums + at) if EVEN else tl.load(log_sums + at, n < N, other=float("inf"))
            error = tl.exp2(scores * LOG2E + shift[:, None] - (log_sum * LOG2E)[None, :])
            target = tl.load(targets + at) if EVEN else tl.load(targets + at, n < N, other=0)
            error -= tl.where(word[:, None] == target[None, :], 1.0, 0.0)
            total = tl.dot(error.to(output.dtype), output, total, input_precision=PRECISION)
            if BE:
                second_total = tl.dot(error.to(output.dtype), second_output, second_total, input_precision=PRECISION)
            sums += tl.sum(error, 1)
        scale = 1.0 / count
        if FACTOR:
            scale *= tl.load(factor).to(tl.float32)
        d = tl.arange(0, BD)
        at = place[:, None] * D + d[None, :]
        valid = (v < V)[:, None] & (d < D)[None, :]
        former = _former(weight, at, valid, GRADIENT)
        former_bias = _former(own_bias, place, v < V, GRADIENT)
        if BE:
            e = BD + tl.arange(0, BE)
            second_at = place[:, None] * D + e[None, :]
            second_valid = (v < V)[:, None] & (e < D)[None, :]
            second_former = _former(weight, second_at, second_valid, GRADIENT)
            second_total *= scale
            _settle(weight, low, second_at, second_valid, second_former, rate, second_total, LOW, GRADIENT)
        _settle(weight, low, at, valid, former, rate, total * scale, LOW, GRADIENT)
        _settle(own_bias, low_bias, place, v < V, former_bias, rate, sums * scale, LOW, GRADIENT)


class OutputLayer:
    """The launcher of both passes, with the precision of `tl.dot` for products of float32."""

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        users, positions, _ = prediction.chosen.shape
        operands, sizes = self._operands(prediction), self._tile(prediction, 0)
        if d_chosen.dtype == torch.bfloat16:
            sizes["maxnreg"] = REGISTERS
        _predict[(triton.cdiv(positions, sizes["BN"]), users)](
            *operands, losses, d_chosen, positions, prediction.bias.shape[1], **sizes
        )

    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        (users, positions, _), vocabulary = prediction.chosen.shape, prediction.bias.shape[1]
        operands, sizes = self._operands(prediction), self._tile(prediction, 1)
        low, low_bias = (target.value if target.low is None else target.low for target in (weight, bias))
        _descend_predictions[(triton.cdiv(vocabulary, sizes["BV"]), users)](
            *operands, weight.value, low, bias.value, low_bias, 0.0 if rate is None else rate,
            positions, vocabulary, EVEN=positions % sizes["BN"] == 0, LOW=weight.low is not None, GRADIENT=rate is None,
            **sizes,
        )  # fmt: skip

    def _operands(self, prediction: Prediction) -> tuple[Tensor, ...]:
        *operands, factor = prediction
        return *operands, prediction.log_sums if factor is None else factor

    def _tile(self, prediction: Prediction, number: int) -> dict[str, Any]:
        """Return the sizes of a tile of logits in the first pass, number 0, or the second.

        Wide embeddings have small tiles, as their sums are in registers.
        """
        (_, positions, width), vocabulary = prediction.chosen.shape, prediction.bias.shape[1]
        most = max(DOT, VALUES // block(width))
        few, words = TILES["bf16" if prediction.chosen.dtype == torch.bfloat16 else self._precision][number]
        sizes = {"BN": block(positions, min(few, most)), "BV": block(vocabulary, min(words, most))}
        sizes |= {"num_warps": 4, "num_stages": 3}
        sizes |= {"FACTOR": prediction.factor is not None} | dict(zip(("D", "BD", "BE"), columns(width), strict=True))
        return {**sizes, "PRECISION": self._precision}


def columns(width: int) -> tuple[int, int, int]:
    """Return a width, and its columns as blocks of two powers of two; the second is 0 where it would save nothing.

    Examples:
        >>> columns(96), columns(100), columns(18)
        ((96, 64, 32), (100, 128, 0), (18, 32, 0))
    """
    whole = block(width)
    second = block(width - whole // 2)
    return (width, whole // 2, second) if DOT < whole != whole // 2 + second else (width, whole, 0)
