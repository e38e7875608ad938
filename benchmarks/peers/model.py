"""The models that other platforms train: this project's, and a plain LSTM; and a user's training with Flower."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss

from benchmarks.peers.work import PAD, UserData, Work
from flsim.models.architectures import CIFGLanguageModel
from flsim.models.language_model import Params, loss_sum


class NextWord(CIFGLanguageModel):
    """The model of flsim, whose loss cuts off the columns that are padding in all records of a batch."""

    def total_loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the summed cross-entropy (nats) and its number of positions, without unneeded padding."""
        time = int((targets != PAD).any(0).sum())
        return loss_sum(self, inputs[:, :time], targets[:, :time])

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats."""
        total, count = self.total_loss(inputs, targets)
        return total / count


class PlainLSTM(nn.Module):
    """A next-word LSTM in torch's modules, with a loss over padded records.

    It is built as pfl-research's benchmark for Stack Overflow builds it (`benchmarks/model/pytorch/lstm.py`): torch's
    LSTM with four gates, a linear layer back to the width of the embedding, which is also the output layer.

    Args:
        vocabulary_size, embedding, units: the sizes V, D and H.
    """

    def __init__(self, vocabulary_size: int, embedding: int, units: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, embedding, padding_idx=PAD)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.back = nn.Linear(units, embedding)

    @classmethod
    def from_params(cls, params: Params) -> Self:
        """Return a model with these parameters, which also give its sizes."""
        vocabulary_size, embedding = params["words.weight"].shape
        model = cls(vocabulary_size, embedding, params["back.weight"].shape[1])
        model.load_state_dict(params)
        return model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits [records, T, V] of inputs [records, T]."""
        hidden, _ = self.lstm(self.words(inputs))
        logits: Tensor = self.back(hidden) @ self.words.weight.t()
        return logits

    def total_loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the summed cross-entropy (nats) and its number of positions, which are not padding."""
        scores = log_softmax(self(inputs), -1)
        total = nll_loss(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        return total, int((targets != PAD).sum())

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats."""
        total, count = self.total_loss(inputs, targets)
        return total / count


def model_type(params: Params) -> type[NextWord] | type[PlainLSTM]:
    """Return the type of the model that has parameters of these names."""
    return PlainLSTM if "words.weight" in params else NextWord


def train(model: NextWord | PlainLSTM, data: UserData, work: Work) -> None:
    """Train one local epoch of SGD, in place."""
    optimizer = torch.optim.SGD(model.parameters(), work.learning_rate)
    for batch in zip(*(torch.split(tensor, work.batch_size) for tensor in data), strict=True):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(*batch))
        optimizer.step()
