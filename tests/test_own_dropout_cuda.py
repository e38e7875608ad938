"""Dropout of a custom network on a GPU repeats; torch and cuDNN draw from the device's generator."""

from pathlib import Path

import pytest
import torch
from populations import InMemory
from stepping import LAYOUT

from flsim.algorithms import fedavg
from flsim.algorithms.rounds import LocalEngine
from flsim.models.architectures import ModelHParams, build
from flsim.training.update import LocalHParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DROPPED = """
from torch import nn

from flsim.models.language_model import TrainableModel


class Dropped(TrainableModel):
    '''A GRU of two layers with dropout between them, which cuDNN would draw, and after them.'''

    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        self.words = nn.Embedding(vocabulary_size, 16)
        self.cells = nn.GRU(16, 16, num_layers=2, dropout=hparams.options["between"], batch_first=True)
        self.dropout = nn.Dropout(hparams.options["after"])
        self.out = nn.Linear(16, vocabulary_size)

    def forward(self, tokens):
        return self.out(self.dropout(self.cells(self.words(tokens))[0]))
"""
USERS = InMemory(LAYOUT, [[[1, 2, 3], [4]], [[5, 6]], [[1, 1, 1, 2], [7, 8]]])
LOCAL = LocalHParams(batch_size=1, epochs=3, learning_rate=0.5)


@pytest.mark.parametrize("options", [{"between": 0.5, "after": 0.0}, {"between": 0.0, "after": 0.5}])
def test_a_user_is_trained_to_the_same_bits_whatever_came_before(tmp_path: Path, options: dict[str, float]) -> None:
    (tmp_path / "dropped.py").write_text(DROPPED)
    hparams = ModelHParams(architecture=f"{tmp_path}/dropped.py:Dropped", options=options)
    start = fedavg.init(LAYOUT.vocabulary_size, hparams, 0).params

    def engine() -> LocalEngine:
        return LocalEngine(build(LAYOUT.vocabulary_size, hparams).to("cuda"), LOCAL)

    first = engine().train(start, USERS, [2], 0, 0)
    torch.cuda.manual_seed(5)
    later = engine()
    later.train(start, USERS, [0, 1], 0, 0)
    again = later.train(start, USERS, [2], 0, 0)
    for name, value in first.delta.items():
        assert torch.equal(value, again.delta[name]), name
    assert later.train(start, USERS, [2], 0, 1).counts.loss != first.counts.loss
