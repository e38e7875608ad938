"""Beam Search (BS): whether the model, given a prefix, completes it to the canary.

Thakkar et al. (2020), section 4.1, "Evaluation Methods".
"""

import torch
from torch import Tensor

from flsim.data.vocabulary import Layout
from flsim.memorization.score import nats
from flsim.model.cifg import LanguageModel


def beam_search(model: LanguageModel, prefix: Tensor, length: int, width: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """The most likely continuations that a beam of `width` finds, best first.

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
    state, log_probs = model.start(prefix[None])
    beams = prefix.new_empty(1, 0)
    scores = log_probs.new_zeros(1, dtype=torch.float64)
    while True:
        costs = nats(log_probs[:, layout.first_word : layout.last_word + 1])
        scores, best = (scores[:, None] + costs).flatten().sort(stable=True)  # topk leaves the order of ties open
        scores, best = scores[:width], best[:width]
        parent, word = best // layout.words, best % layout.words + layout.first_word
        beams = torch.cat([beams[parent], word[:, None]], dim=1)
        if beams.shape[1] == length:
            return beams, scores
        state, log_probs = model.step(tuple(part[parent] for part in state), word)
