"""Beam Search (BS), which tests whether the model completes a prefix to the canary.

Thakkar et al. (2020), section 4.1, "Evaluation Methods"; Carlini et al. (2018), "The Secret Sharer", section 5.3, with
a template that gives the allowed words at each position.
"""

import torch
from torch import Tensor

from flsim.measures.memorization.score import nats, rows_at_once
from flsim.measures.memorization.template import Template, cheapest
from flsim.models.language_model import LanguageModel, State


def beam_search(model: LanguageModel, prefix: Tensor, template: Template, width: int) -> tuple[Tensor, Tensor]:
    """Return the result of `beam_searches` for one prefix: continuations [W, n] and log-perplexities [W]."""
    tokens, scores = beam_searches(model, prefix[None], template, width)
    return tokens[0], scores[0]


def beam_searches(model: LanguageModel, prefixes: Tensor, template: Template, width: int) -> tuple[Tensor, Tensor]:
    """Return the most likely continuations in a template's space that a beam of `width` finds after each prefix.

    Prefixes are int64 [P, L], BOS first. Results are continuations, int64 [P, W, n], best first, and their
    log-perplexities in nats, float64 [P, W], where W is `width`, or the size of the space if that is smaller. If the
    space has at most `width` sequences, it is enumerated. Only allowed tokens continue a beam: canaries have no PAD,
    OOV, BOS or EOS. The probability of other tokens still counts, so scores are the same log-perplexities as in other
    measures. Ties go to the beam that ranked higher one token before, then to the lower id.

    A batch has as many prefixes as fit in memory. If the beams of a single prefix exceed memory, they are read in
    parts. Neither changes the result, up to the model's rounding. Raises Diverged if a log-probability is not finite.
    """
    state, log_probs = model.start(prefixes[:1])
    rows = rows_at_once(log_probs, state)
    results = [
        _beam_searches(model, part, template, width, rows) for part in torch.split(prefixes, max(1, rows // width))
    ]
    return torch.cat([tokens for tokens, _ in results]), torch.cat([scores for _, scores in results])


def _beam_searches(
    model: LanguageModel, prefixes: Tensor, template: Template, width: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Search for prefixes whose beams form one batch of at most `rows` sequences, or for one prefix."""
    row = torch.arange(len(prefixes), device=prefixes.device)[:, None]
    state, log_probs = model.start(prefixes)
    beams, allowed = prefixes[:, None, :0], template.on(prefixes.device)
    scores, best = cheapest(nats(log_probs[:, allowed[0]]), width)
    for position, ids in enumerate(allowed):
        if position:
            scores, best, state = _extend(model, state, beams[:, :, -1], scores, ids, width, rows)
        parent, token = best // len(ids), ids[best % len(ids)]
        state = tuple(part[(row * beams.shape[1] + parent).flatten()] for part in state)
        beams = torch.cat([beams[row, parent], token[:, :, None]], dim=2)
    return beams, scores


def _extend(
    model: LanguageModel, state: State, read: Tensor, scores: Tensor, ids: Tensor, width: int, rows: int
) -> tuple[Tensor, Tensor, State]:
    """Read one token per beam [P, B]; return the best scores [P, W], their beam x ids + index, and new states."""
    step = max(1, rows // len(read))  # beams of each prefix; all of them if there are several prefixes
    best_scores, best, states = scores[:, :0], read[:, :0], []
    for first in range(0, read.shape[1], step):
        piece = tuple(part[first * len(read) : (first + step) * len(read)] for part in state)
        piece, log_probs = model.step(piece, read[:, first : first + step].flatten())
        states.append(piece)
        costs = scores[:, first : first + step, None] + nats(log_probs[:, ids]).view(len(read), -1, len(ids))
        costs, index = cheapest(costs.flatten(1), width)
        best_scores, order = cheapest(torch.cat([best_scores, costs], dim=1), width)
        best = torch.cat([best, index + first * len(ids)], dim=1).gather(1, order)
    return best_scores, best, tuple(map(torch.cat, zip(*states, strict=True)))
