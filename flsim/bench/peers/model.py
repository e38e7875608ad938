"""The paper's model and a user's training, as users of the other platforms write them."""

import torch
from torch import Tensor

from flsim.bench.peers.work import UserData, Work
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.loss import loss_sum


class NextWord(CIFGLanguageModel):
    """The model, with its loss."""

    def total_loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the summed cross-entropy (nats) and its number of positions, without unneeded padding."""
        time = int((targets != 0).any(0).sum())
        return loss_sum(self, inputs[:, :time], targets[:, :time])

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats."""
        total, count = self.total_loss(inputs, targets)
        return total / count


def train(model: NextWord, data: UserData, work: Work) -> None:
    """Train one local epoch of SGD, in place."""
    optimizer = torch.optim.SGD(model.parameters(), work.learning_rate)
    for batch in zip(*(torch.split(tensor, work.batch_size) for tensor in data), strict=True):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(*batch))
        optimizer.step()
