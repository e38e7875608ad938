"""The random numbers that a network draws while it is trained, such as those of dropout.

torch's modules draw from generators that a process shares. Here the generators are seeded for a piece of training, so
that what is drawn does not depend on the process, or on what the process trained before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flsim.base.rng import torch_stream
from flsim.models.language_model import TrainableModel


@contextmanager
def training_mode(model: TrainableModel, seed: int, *keys: int) -> Iterator[None]:
    """Set a model to training mode, in which dropout is active, and seed torch's generators within the block.

    After the block the model is in evaluation mode, and the generators are in their states from before.

    Args:
        model: the model, whose device tells which generators it draws from.
        seed: the experiment's seed.
        keys: the round and the user of federated training; the step of central training.
    """
    with torch_stream(model.device, seed, *keys):
        model.train()
        try:
            yield
        finally:
            model.eval()


@torch.no_grad()
def draws(model: TrainableModel, tokens: Tensor) -> bool:
    """Return whether reading tokens int64 [B, T] in training mode draws from torch's generator of CPUs."""
    with training_mode(model, 0):
        before = torch.get_rng_state()
        model(tokens)
        return not torch.equal(before, torch.get_rng_state())
