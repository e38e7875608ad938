"""Next-word loss and accuracy as mergeable (sum, count), over real positions only."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from flsim.models.language_model import NextWordModel


def loss_sum(
    model: NextWordModel, inputs: Tensor, targets: Tensor, pad: int = 0, kept: Tensor | None = None
) -> tuple[Tensor, int]:
    """Summed cross-entropy in nats, and the number of positions it is over.

    Args:
        model: the model.
        inputs: int64 [B, T].
        targets: int64 [B, T]; positions that are `pad` do not count, and no logits are computed for them.
        pad: the id of padding.
        kept: dropout's factors [2, B, T, D], of the embeddings and of the outputs; see `flsim.training.dropout`.
    """
    embedded = embedding(inputs, model.embedding)
    outputs = model.outputs(embedded if kept is None else embedded * kept[0])
    outputs = outputs if kept is None else outputs * kept[1]
    real = targets != pad
    return cross_entropy(model.logits(outputs[real]), targets[real], reduction="sum"), int(real.sum())


@torch.no_grad()
def predictions(model: NextWordModel, inputs: Tensor, targets: Tensor, pad: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """For each of the n real positions: its target [n], its cross-entropy in nats [n], the model's first choice [n]."""
    outputs = model.outputs(embedding(inputs, model.embedding))
    real = targets != pad
    logits = model.logits(outputs[real])
    return targets[real], cross_entropy(logits, targets[real], reduction="none"), logits.argmax(-1)
