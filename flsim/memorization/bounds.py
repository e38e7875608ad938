"""Bounds on the cost of a next word: -log Pr(w) = log Z(r) - (e_w.r + b_w), Z(r) the sum over v of exp(e_v.r + b_v).

Words that matter are summed. The other words are one cloud with its first two moments, weighted as at a center c near
the expected outputs. With d = r - c, mu the cloud's mean, S its covariance, X = (e_v - mu).d and m >= |X|,

    sum over the rest = exp(mu.d) E[exp X] times its value at c,   1 + d'Sd phi(-m) <= E[exp X] <= 1 + d'Sd phi(m),

as E X = 0 and phi(x) = (exp x - 1 - x) / x^2 increases: Bennett's inequality (1962) and its mirror image. The bounds
hold for every r, and are tighter for r near c. A single logit is bounded by Cauchy and Schwarz.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flsim.memorization.score import rows_at_once

LARGEST = 50.0  # beyond this m the bound is E exp(X) <= exp(m), so that nothing overflows
# Allowance in a logit, in units of rounding, relative to |e| |r| + |b|; a dot product of 96 needs 48 at worst.
ROUNDING = 64
REDUCED = 2.0**-7  # unit of rounding where torch may multiply float32 in less than float32
LOOSE = 1e-4  # relative allowance in the moments, which have the model's precision


class Interval(NamedTuple):
    """Bounds low <= the true value <= high; float64."""

    low: Tensor
    high: Tensor


class OutputBounds:
    """Bounds that are tight around a few outputs of a model. Shapes: S sampled outputs, D their size, V vocabulary.

    Args:
        weight: E [V, D].
        bias: b [V].
        outputs: [S, D], typical outputs; their mean is the center.
        probabilities: [V], mean probability of each word at these outputs.
        summed: number of words that are summed one by one.
    """

    def __init__(self, weight: Tensor, bias: Tensor, outputs: Tensor, probabilities: Tensor, summed: int) -> None:
        self.weight, self.bias = weight, bias
        self.center = outputs.mean(0)
        vectors = weight.double()
        at_center = vectors @ self.center.double() + bias
        mean = probabilities.double() @ vectors
        self.summed = _most_telling(probabilities, (vectors - mean).norm(dim=1), summed)
        rest = torch.ones_like(bias, dtype=torch.bool)
        rest[self.summed] = False
        self.any_rest = bool(rest.any())
        if self.any_rest:
            share = at_center[rest].softmax(0)
            mean = share @ vectors[rest]
            around = vectors[rest] - mean
            self.rest_at_center = at_center[rest].logsumexp(0)
            self.covariance = ((around.T * share) @ around).to(weight.dtype)
            self.rest_radius = around.norm(dim=1).max()
        self.mean, self.at_center = mean.to(weight.dtype), at_center
        self.radius = (vectors - mean).norm(dim=1) * (1 + LOOSE)  # [V]
        self.length, self.offset = weight.norm(dim=1).max().double(), bias.abs().max().double()

    def rounding(self, outputs: Tensor) -> Tensor:
        """Return the most by which two computations of a word's cost differ, float64 [M], for outputs [M, D]."""
        unit = torch.finfo(outputs.dtype).eps
        if outputs.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            unit = REDUCED
        size: Tensor = outputs.norm(dim=1).double() * self.length + self.offset
        return unit * (ROUNDING * size + 2 * len(self.bias).bit_length())  # and a logarithm of V terms, twice

    def log_sum_exp(self, outputs: Tensor) -> Interval:
        """Return bounds on log Z, [M] each, for outputs [M, D]; without allowance for rounding."""
        summed = torch.addmm(self.bias[self.summed], outputs, self.weight[self.summed].T).logsumexp(1).double()
        if not self.any_rest:
            return Interval(summed, summed)
        away = outputs - self.center
        variance = ((away @ self.covariance) * away).sum(1).double().clamp(min=0)
        most = (self.rest_radius * away.norm(dim=1)).double() * (1 + LOOSE)
        center = self.rest_at_center + (away @ self.mean).double()
        capped = most.clamp(max=LARGEST)
        low = torch.log1p(variance * (1 - LOOSE) * _phi(-most))
        high = torch.log1p(variance * (1 + LOOSE) * _phi(capped))
        high = torch.where(most > LARGEST, most, high)
        return Interval(torch.logaddexp(summed, center + low), torch.logaddexp(summed, center + high))

    def exact_log_sum_exp(self, outputs: Tensor) -> Tensor:
        """Return log Z itself, float64 [M], computed in pieces."""
        parts = torch.split(outputs, rows_at_once(self.weight.T))
        return torch.cat([torch.addmm(self.bias, part, self.weight.T).logsumexp(1).double() for part in parts])

    def logits(self, outputs: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        """Return the logits of words [N] after outputs[rows], float64 [N], computed in pieces."""
        parts = zip(*(torch.split(ids, rows_at_once(outputs)) for ids in (rows, words)), strict=True)
        logits = [torch.linalg.vecdot(outputs[row], self.weight[word]) + self.bias[word] for row, word in parts]
        return torch.cat(logits).double()

    def logits_at_most(self, outputs: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        """Return upper bounds on the logits of words [N] after outputs[rows], float64 [N]; O(1) each, not O(D)."""
        away = outputs - self.center
        distance, shift = away.norm(dim=1).double(), (away @ self.mean).double()
        most: Tensor = self.at_center[words] + self.radius[words] * distance[rows] + shift[rows]
        return most


def _most_telling(probabilities: Tensor, distances: Tensor, count: int) -> Tensor:
    """Return ids [<= count] of the likeliest words, and of words that would make the cloud of the rest wide."""
    far = distances.topk(min(count // 4, len(distances))).indices
    likely = probabilities.topk(min(count - count // 4, len(distances))).indices
    return torch.from_numpy(np.union1d(likely.cpu(), far.cpu())).to(likely.device)


def _phi(x: Tensor) -> Tensor:
    """Return (exp x - 1 - x) / x^2, and 1/2 at 0; float64."""
    small = x.abs() < 1e-3
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 0.5 + x / 6 + x * x / 24, (safe.expm1() - safe) / (safe * safe))
