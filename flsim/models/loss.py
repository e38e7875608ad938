"""The next-word loss and predictions, over real positions only; losses merge as (sum, count)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flsim.models.language_model import TrainableModel


def loss_sum(
    model: TrainableModel, inputs: Tensor, targets: Tensor, pad: int = 0, kept: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the summed cross-entropy in nats, and the number of positions in the sum.

    Args:
        model: the model.
        inputs: int64 [B, T].
        targets: int64 [B, T]; positions that are `pad` do not count, and no logits are computed for them.
        pad: the id of padding.
        kept: dropout's factors [2, B, T, D], of the embeddings and of the outputs; see `flsim.training.dropout`.
    """
    real = targets != pad
    return cross_entropy(model.logits_at(inputs, real, kept), targets[real], reduction="sum"), int(real.sum())


@torch.no_grad()
def predictions(model: TrainableModel, inputs: Tensor, targets: Tensor, pad: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return, at the n real positions, the targets [n], their cross-entropy in nats [n], and likeliest words [n]."""
    real = targets != pad
    logits = model.logits_at(inputs, real)
    return targets[real], cross_entropy(logits, targets[real], reduction="none"), logits.argmax(-1)
