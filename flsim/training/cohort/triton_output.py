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
from flsim.training.cohort.triton_kernels import _settle
from flsim.training.cohort.triton_recurrence import DOT, block

TILES = {"bf16": (64, 64), "tf32": (32, 64), "ieee": (16, 16)}  # positions and words of a tile of logits
VALUES = 2**13  # of a sum of rows that registers hold


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
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the loss of some positions of a user, and its gradient by r."""
    user = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    count = tl.load(counts + user)
    place = user * N + n
    at = place[:, None] * D + d[None, :]
    stored = (n < N)[:, None] & (d < D)[None, :]
    low = d_chosen.dtype.element_ty
    if tl.program_id(0) * BN >= count:
        tl.store(losses + place, tl.zeros((BN,), tl.float32), n < N)
        tl.store(d_chosen + at, tl.zeros((BN, BD), low), stored)
    else:
        real = n < count
        output = tl.load(chosen + at, real[:, None] & (d < D)[None, :], other=0.0)
        embedding += user * V * D
        bias += user * V
        largest = tl.full((BN,), float("-inf"), tl.float32)
        total = tl.zeros((BN,), tl.float32)
        mean = tl.zeros((BN, BD), tl.float32)
        for first in range(0, V, BV):
            v = first + tl.arange(0, BV)
            row = embedding + v[:, None] * D + d[None, :]
            rows = tl.load(row, (v < V)[:, None] & (d < D)[None, :], other=0.0).to(low)
            scores = tl.dot(output, tl.trans(rows), input_precision=PRECISION)
            scores += tl.load(bias + v, v < V, other=float("-inf")).to(tl.float32)[None, :]
            above = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - above[:, None])
            shrink = tl.exp(largest - above)
            total = total * shrink + tl.sum(weights, 1)
            mean = tl.dot(weights.to(low), rows, mean * shrink[:, None], input_precision=PRECISION)
            largest = above
        # First the gradient, then the loss: both need many registers.
        scale = 1.0 / count
        if FACTOR:
            scale *= tl.load(factor).to(tl.float32)
        target = tl.load(targets + place, real, other=0)
        row = embedding + target[:, None] * D + d[None, :]
        rows = tl.load(row, (d < D)[None, :], other=0.0).to(low).to(tl.float32)
        gradient = tl.where(real[:, None], (mean / total[:, None] - rows) * scale, 0.0)
        tl.store(d_chosen + at, gradient.to(low), stored)
        own = tl.sum(output.to(tl.float32) * rows, 1) + tl.load(bias + target).to(tl.float32)
        log_sum = tl.log(total) + largest
        tl.store(log_sums + place, log_sum, real)
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
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient by some rows of the embedding and by their biases, over all of a user's positions."""
    user = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    d = tl.arange(0, BD)
    count = tl.load(counts + user)
    if count > 0:
        chosen += user * N * D
        at = (user * V + v)[:, None] * D + d[None, :]
        inside = (v < V)[:, None] & (d < D)[None, :]
        rows = tl.load(embedding + at, inside, other=0.0).to(chosen.dtype.element_ty)
        shift = tl.load(bias + user * V + v, v < V, other=float("-inf")).to(tl.float32)
        total = tl.zeros((BV, BD), tl.float32)
        sums = tl.zeros((BV,), tl.float32)
        for first in range(0, count, BN):
            n = first + tl.arange(0, BN)
            place = user * N + n
            output = tl.load(chosen + n[:, None] * D + d[None, :], (n < count)[:, None] & (d < D)[None, :], other=0.0)
            scores = tl.dot(rows, tl.trans(output), input_precision=PRECISION) + shift[:, None]
            error = tl.exp(scores - tl.load(log_sums + place, n < count, other=float("inf"))[None, :])
            target = tl.load(targets + place, n < count, other=-1)
            error -= tl.where(v[:, None] == target[None, :], 1.0, 0.0)
            total = tl.dot(error.to(output.dtype), output, total, input_precision=PRECISION)
            sums += tl.sum(error, 1)
        scale = 1.0 / count
        if FACTOR:
            scale *= tl.load(factor).to(tl.float32)
        _settle(weight, low, at, inside, rate, total * scale, LOW, GRADIENT)
        _settle(own_bias, low_bias, user * V + v, v < V, rate, sums * scale, LOW, GRADIENT)


class OutputLayer:
    """The launcher of both passes, with the precision of `tl.dot` for products of float32."""

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        users, positions, _ = prediction.chosen.shape
        operands, sizes = self._operands(prediction), self._tile(prediction)
        _predict[(triton.cdiv(positions, sizes["BN"]), users)](
            *operands, losses, d_chosen, positions, prediction.bias.shape[1], num_stages=3, **sizes
        )

    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        users, vocabulary = prediction.bias.shape
        operands, sizes = self._operands(prediction), self._tile(prediction)
        low, low_bias = (target.value if target.low is None else target.low for target in (weight, bias))
        _descend_predictions[(triton.cdiv(vocabulary, sizes["BV"]), users)](
            *operands, weight.value, low, bias.value, low_bias, 0.0 if rate is None else rate,
            prediction.chosen.shape[1], vocabulary, LOW=weight.low is not None, GRADIENT=rate is None,
            num_stages=2, **sizes,
        )  # fmt: skip

    def _operands(self, prediction: Prediction) -> tuple[Tensor, ...]:
        *operands, factor = prediction
        return *operands, prediction.log_sums if factor is None else factor

    def _tile(self, prediction: Prediction) -> dict[str, Any]:
        """Return the sizes of a tile of logits; wide embeddings have small tiles, as their sums are in registers."""
        (_, positions, width), vocabulary = prediction.chosen.shape, prediction.bias.shape[1]
        most = max(DOT, VALUES // block(width))
        few, words = TILES["bf16" if prediction.chosen.dtype == torch.bfloat16 else self._precision]
        sizes = {"BN": block(positions, min(few, most)), "BV": block(vocabulary, min(words, most)), "num_warps": 4}
        sizes |= {"D": width, "BD": block(width), "FACTOR": prediction.factor is not None}
        return {**sizes, "PRECISION": self._precision}
