"""Extraction without the string's own beginning, and of strings that are not quite right.

Schwarzschild et al., "Rethinking LLM Memorization through the Lens of Adversarial Compression" (2024), ask for the
shortest prompt that makes greedy decoding write a string. Of prompts of one word there are few enough to try all.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.memorization.beam_search import beam_searches
from flsim.memorization.score import nats, rows_at_once
from flsim.memorization.template import Template
from flsim.models.language_model import LanguageModel

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
WRONG = 1  # words of a suffix that may differ in near-verbatim text


def one_word_continuations(model: LanguageModel, length: int, layout: Layout, device: torch.device) -> Ints:
    """Return what greedy decoding writes after each word of the vocabulary, int64 [words, length].

    Raises:
        Diverged: a log-probability is not finite.
    """
    words = torch.arange(layout.first_word, layout.last_word + 1, device=device)
    prompts = torch.stack([torch.full_like(words, layout.bos), words], dim=1)
    rows = rows_at_once(model.start(prompts[:1])[1])
    return torch.cat([_greedy(model, part, length) for part in torch.split(prompts, rows)]).cpu().numpy()


def _greedy(model: LanguageModel, prompts: Tensor, length: int) -> Tensor:
    state, log_probs = model.start(prompts)
    written = [nats(log_probs).argmin(-1)]
    while len(written) < length:
        state, log_probs = model.step(state, written[-1])
        written.append(nats(log_probs).argmin(-1))
    return torch.stack(written, dim=1)


def is_elicited(continuations: Ints, strings: Records, prefix: int) -> Flags:
    """Return whether some prompt is continued by the suffix of each string, bool [N].

    Args:
        continuations: int64 [prompts, words], as many words as the longest suffix has.
        strings: N strings.
        prefix: number of words before a suffix.
    """
    suffixes = [tuple(string[prefix:].tolist()) for string in strings]
    written = {size: set(map(tuple, continuations[:, :size].tolist())) for size in set(map(len, suffixes))}
    return np.array([suffix in written[len(suffix)] for suffix in suffixes], np.bool_)


def is_near_verbatim(
    model: LanguageModel, strings: Records, prefix: int, width: int, layout: Layout, device: torch.device
) -> Flags:
    """Return whether some continuation that a beam search writes after each prefix is nearly the suffix, bool [N].

    It may differ in one word in its place (Hamming distance `WRONG`). A suffix of one word must be exact.

    Args:
        model: the model.
        strings: N strings.
        prefix: number of words before a suffix.
        width: number of beams; 1 is greedy decoding among words.
        layout: the corpus' token layout.
        device: the model's device.

    Raises:
        Diverged: a log-probability is not finite.
    """
    lengths: Ints = np.diff(strings.offsets) - prefix
    is_near = np.zeros(len(strings), np.bool_)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        texts = torch.tensor(np.stack([strings[row].astype(np.int64) for row in rows.tolist()]), device=device)
        prefixes = torch.cat([torch.full_like(texts[:, :1], layout.bos), texts[:, :prefix]], dim=1)
        beams, _ = beam_searches(model, prefixes, Template.words(layout, length), width)
        wrong = (beams != texts[:, None, prefix:]).sum(-1).amin(-1)
        is_near[rows] = (wrong <= min(WRONG, length - 1)).cpu().numpy()
    return is_near
