"""Extraction by generative sampling, which counts how often the model generates the canary.

Carlini et al. (2018), "The Secret Sharer", section 5.2: a template is filled from left to right, each token drawn from
the model's distribution over the allowed tokens.
"""

import numpy as np
import torch
from torch import Tensor

from flsim.measures.memorization.score import nats, rows_at_once
from flsim.measures.memorization.template import Template
from flsim.models.language_model import LanguageModel

PIECE = 2**13  # continuations that are sampled at once: common beginnings are read once


def generate(
    model: LanguageModel, prefix: Tensor, template: Template, samples: int, rng: np.random.Generator
) -> Tensor:
    """Return continuations of a prefix, int64 [samples, n], in the order drawn, or raise Diverged."""
    parts = []
    for first in range(0, samples, PIECE):
        uniform = rng.random((min(PIECE, samples - first), template.length))
        parts.append(_generate(model, prefix, template, torch.from_numpy(uniform).to(prefix.device)))
    return torch.cat(parts)


def _generate(model: LanguageModel, prefix: Tensor, template: Template, uniform: Tensor) -> Tensor:
    """Return a continuation for each row of uniform numbers [M, n], reading each beginning once for all its samples."""
    state, log_probs = model.start(prefix[None])
    step = rows_at_once(log_probs, state)
    sampled = prefix.new_zeros(len(uniform), 0)
    column, row = prefix.new_zeros(len(uniform)), prefix.new_zeros(len(uniform))  # each sample's token, and beginning
    read = prefix.new_zeros(1)
    for position, ids in enumerate(template.on(prefix.device)):
        states = []
        for first in range(0, len(read), step):
            piece = tuple(part[first : first + step] for part in state)
            if position:
                piece, log_probs = model.step(piece, read[first : first + step])
            states.append(piece)
            mine = ((row >= first) & (row < first + step)).nonzero()[:, 0]
            weights = (-nats(log_probs[:, ids])).softmax(1)
            column[mine] = _invert(weights.cumsum(1), row[mine] - first, uniform[mine, position])
        sampled = torch.cat([sampled, ids[column][:, None]], dim=1)
        distinct, row = torch.unique(row * len(ids) + column, return_inverse=True)
        state = tuple(torch.cat(parts)[distinct // len(ids)] for parts in zip(*states, strict=True))
        read = ids[distinct % len(ids)]
    return sampled


def _invert(summed: Tensor, rows: Tensor, uniform: Tensor) -> Tensor:
    """Return, for each of `uniform` [M], the first column of its row of `summed` [N, A] above that share of the total.

    It is never a column of value 0: the total times a number below 1 does not round up to the total.
    """
    order = rows.sort(stable=True).indices
    sizes = rows.bincount(minlength=len(summed))
    place = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[rows[order]]
    shares = summed.new_zeros(len(summed), int(sizes.max()))
    shares[rows[order], place] = uniform[order]
    first_above = torch.searchsorted(summed, shares * summed[:, -1:], right=True)
    columns = torch.empty_like(rows)
    columns[order] = first_above[rows[order], place]
    return columns
