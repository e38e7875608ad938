"""A network of one vector, whose gradients can be computed by hand, and the records of five users."""

import numpy as np
from numpy.typing import NDArray
from stepping import LAYOUT

Vector = NDArray[np.float64]
USERS = [[[1, 2, 3], [4]], [[5, 6]], [], [[1, 1, 1, 2]], [[7], [8], [9]]]
ONE_VECTOR = """
import torch
from flsim.models.language_model import TrainableModel

class Bias(TrainableModel):
    '''Logits that are the same whatever was read, so that gradients can be computed by hand.'''

    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        self.bias = torch.nn.Parameter(torch.zeros(vocabulary_size))

    def forward(self, tokens):
        return self.bias.expand(*tokens.shape, -1)
"""


def frequencies(records: list[list[int]]) -> Vector:
    """Return each token's share of the targets in a user's records, end-of-record tokens included."""
    counts = np.zeros(LAYOUT.vocabulary_size)
    for words in records:
        for token in [*words, *([LAYOUT.eos] if len(words) < LAYOUT.record_words else [])]:
            counts[token] += 1
    return np.asarray(counts / counts.sum())


def softmax(x: Vector) -> Vector:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum())
