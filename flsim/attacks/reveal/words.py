"""The bag of words of an update: which words the users trained on, and how often.

A step of SGD at learning rate eta, on the mean loss over T tokens, changes the output bias of token v by

    Delta b_v = -eta (p_v - n_v / T),

with p the mean probability that the model predicts, and n_v the number of targets v. Therefore only a token that occurs
can have a positive change. This holds for any number of steps, sums with positive weights, and after a clip. For s
steps, n_v / T = Delta b_v / eta + p_v with s eta is a first-order approximation.

Without an output bias, the norms of the rows of the input embedding are the scores: `recover_token_information` of
Geiping's breaching (https://github.com/JonasGeiping/breaching), "decoder-bias" and "embedding-norm".
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.statistics import auroc
from flsim.data.records import Records, batch, batches_by_length
from flsim.data.vocabulary import Layout
from flsim.models.language_model import Params, TrainableModel

CUTOFF = 1.5  # breaching's: standard deviations above the mean of log-norms, if all rows change
FLOATS = 2**22  # values of logits in one batch


@dataclass(frozen=True)
class Guess:
    """An attacker's guess of the words of a sum: scores [V], higher for more frequent tokens, and chosen tokens [V]."""

    scores: Floats
    chosen: Flags

    def permuted(self, order: Ints) -> "Guess":
        """Return the guess with the token ids exchanged: int64 [V], a permutation."""
        return Guess(self.scores[order], self.chosen[order])


def guess_of(model: TrainableModel, total: Params, rate: float, predicted: Tensor) -> Guess | None:
    """Return the words that a sum of updates reveals; None if it has no row of a token.

    `rate` is the learning rate times the steps, summed over users; `predicted` the model's mean probability [V].
    """
    bias, rows = model.rows_of_tokens(total)
    if bias is not None:
        return Guess((bias / rate + predicted).numpy(), (bias > 0).numpy())
    if rows is None:
        return None
    norms = rows.norm(dim=1)
    deviation, mean = torch.std_mean(norms.log())
    cutoff = mean + CUTOFF * deviation  # not finite if some rows do not change
    chosen = norms.log() > cutoff if cutoff.isfinite() else norms > 0
    return Guess(norms.numpy(), chosen.numpy())


def blind_guess(log_probs: Floats, chosen: Flags) -> Guess:
    """Return the guess without an update: the most frequent tokens, as many as another guess has."""
    most_frequent = np.zeros(len(log_probs), bool)
    most_frequent[np.argsort(-log_probs, kind="stable")[: chosen.sum()]] = True
    return Guess(log_probs, most_frequent)


def measures_of_words(guess: Guess, counts: Ints, among: Flags) -> dict[str, float]:
    """Return how well a guess agrees with the words of users; NaN for values that are not defined.

    `counts` has the number of each token among the targets, and `among` the measured tokens, [V] each. ``spearman`` is
    the rank correlation of scores and counts; ``precision`` and ``recall`` are of the set of guessed tokens.
    """
    scores, chosen, counts = guess.scores[among], guess.chosen[among], counts[among]
    occurs = counts > 0
    hits = int((chosen & occurs).sum())
    is_constant = not len(counts) or np.ptp(counts) == 0 or np.ptp(scores) == 0
    return {
        "auroc": auroc(scores[occurs], scores[~occurs]) if 0 < occurs.sum() < len(occurs) else math.nan,
        "precision": hits / chosen.sum() if chosen.any() else math.nan,
        "recall": hits / occurs.sum() if occurs.any() else math.nan,
        "spearman": math.nan if is_constant else float(scipy.stats.spearmanr(scores, counts).statistic),
    }


@torch.no_grad()
def mean_prediction(model: TrainableModel, records: Records, layout: Layout) -> Tensor:
    """Return the mean probability of each token over all positions of records, float64 [V]."""
    total, positions = torch.zeros(layout.vocabulary_size, dtype=torch.float64), 0
    for rows in batches_by_length(records, layout, FLOATS // layout.vocabulary_size):
        read = batch(records, rows, layout)
        inputs, targets = (torch.from_numpy(side).to(model.device) for side in (read.inputs, read.targets))
        real = targets != layout.pad
        total += model.logits_at(inputs, real).double().softmax(-1).sum(0).cpu()
        positions += int(real.sum())
    return total / max(positions, 1)
