"""Beam Search (BS): whether the model, given a prefix, completes it to the canary.

Thakkar et al. (2020), section 4.1, "Evaluation Methods"; Carlini et al. (2018), "The Secret Sharer", section 5.3, where
the words that may stand at each position are those of a template.
"""

import torch
from torch import Tensor

from flsim.data.vocabulary import Layout
from flsim.memorization.score import nats, rows_at_once
from flsim.memorization.template import Template, cheapest
from flsim.models.language_model import LanguageModel, State


def beam_search(model: LanguageModel, prefix: Tensor, length: int, width: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """The most likely continuations by words that a beam of `width` finds after one prefix, best first.

    Only words are ever put in: canaries hold no PAD, OOV, BOS or EOS. Their probability still counts, so a score is the
    same log-perplexity as everywhere else. Ties go to the beam that was ahead one word before, then to the lower id.

    Args:
        model: the model.
        prefix: int64 [L], BOS first.
        length: number of words to put in.
        width: number of beams kept after each word.
        layout: where the words are.

    Returns:
        Continuations, int64 [width, length], and their log-perplexities in nats, float64 [width]; fewer than `width`
        where there are not that many continuations.

    Raises:
        Diverged: a log-probability is not finite.
    """
    tokens, scores = beam_searches(model, prefix[None], Template.words(layout, length), width)
    return tokens[0], scores[0]


def beam_searches(model: LanguageModel, prefixes: Tensor, template: Template, width: int) -> tuple[Tensor, Tensor]:
    """`beam_search` of many prefixes of one length at once, over a template's space.

    As many prefixes as memory allows make one batch; where one prefix's beams are more than that, they are read in
    parts. Neither changes what is found, up to the model's rounding.

    Args:
        model: the model.
        prefixes: int64 [P, L], BOS first.
        template: what may continue them.
        width: number of beams kept after each token, of each prefix. The whole space is enumerated where it has as many
            sequences; then the first k are the k most likely.

    Returns:
        Continuations, int64 [P, W, n], best first, and their log-perplexities in nats, float64 [P, W], where W is
        `width`, or the size of the space where that is smaller.

    Raises:
        Diverged: a log-probability is not finite.
    """
    rows = rows_at_once(model.start(prefixes[:1])[1])
    found = [
        _beam_searches(model, part, template, width, rows) for part in torch.split(prefixes, max(1, rows // width))
    ]
    return torch.cat([tokens for tokens, _ in found]), torch.cat([scores for _, scores in found])


def _beam_searches(
    model: LanguageModel, prefixes: Tensor, template: Template, width: int, rows: int
) -> tuple[Tensor, Tensor]:
    """The same, of prefixes whose beams make one batch of at most `rows` sequences, or else of one prefix."""
    own = torch.arange(len(prefixes), device=prefixes.device)[:, None]
    state, log_probs = model.start(prefixes)
    beams, allowed = prefixes[:, None, :0], template.on(prefixes.device)
    scores, best = cheapest(nats(log_probs[:, allowed[0]]), width)
    for position, ids in enumerate(allowed):
        if position:
            scores, best, state = _extend(model, state, beams[:, :, -1], scores, ids, width, rows)
        parent, token = best // len(ids), ids[best % len(ids)]
        state = tuple(part[(own * beams.shape[1] + parent).flatten()] for part in state)
        beams = torch.cat([beams[own, parent], token[:, :, None]], dim=2)
    return beams, scores


def _extend(
    model: LanguageModel, state: State, read: Tensor, scores: Tensor, ids: Tensor, width: int, rows: int
) -> tuple[Tensor, Tensor, State]:
    """Read a token int64 [P, B] each; the best scores [P, W], their (beam, index of id) in one number, the states."""
    step = max(1, rows // len(read))  # beams of each prefix; all of them where there are several prefixes
    best_scores, best, states = scores[:, :0], read[:, :0], []
    for first in range(0, read.shape[1], step):
        here = tuple(part[first * len(read) : (first + step) * len(read)] for part in state)
        here, log_probs = model.step(here, read[:, first : first + step].flatten())
        states.append(here)
        costs = scores[:, first : first + step, None] + nats(log_probs[:, ids]).view(len(read), -1, len(ids))
        costs, index = cheapest(costs.flatten(1), width)
        best_scores, order = cheapest(torch.cat([best_scores, costs], dim=1), width)
        best = torch.cat([best, index + first * len(ids)], dim=1).gather(1, order)
    return best_scores, best, tuple(map(torch.cat, zip(*states, strict=True)))
