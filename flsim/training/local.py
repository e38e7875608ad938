"""The common parts of all training engines: training mode, order of records, clip of gradients, and threads."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.base.rng import shared_generators, states_of_shared_generators
from flsim.data.records import Batch, Records, batch
from flsim.data.vocabulary import Layout
from flsim.models.language_model import Params, TrainableModel
from flsim.training.hparams import LocalHParams

# The random numbers of a network during training, such as those of dropout.
#  torch's modules draw from generators that a process shares. Here these generators are seeded for each piece of
# training, so the numbers do not depend on the process or on previous training.


@contextmanager
def training_mode(model: TrainableModel, seed: int, *keys: int) -> Iterator[None]:
    """Set a model to training mode and seed its device's generators by round and user, or step, within the block."""
    with shared_generators(model.device, seed, *keys):
        model.train()
        try:
            yield
        finally:
            model.eval()


@torch.no_grad()
def draws(model: TrainableModel, tokens: Tensor) -> bool:
    """Return whether reading tokens int64 [B, T] in training mode uses a shared generator of the process."""
    with training_mode(model, 0):
        before = states_of_shared_generators()
        model(tokens)
        return before != states_of_shared_generators()


# The choice and order of the records that a user trains on, which is the same for every engine.


def epoch_orders(records: int, hparams: LocalHParams, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the records of each epoch in the order of training, int64 [examples] each, shuffled in each epoch.

    If they exceed `hparams.max_records`, this many are drawn once for all epochs. `rng` is of the user and the round.
    """
    examples = hparams.examples(records)
    chosen = np.arange(records) if examples == records else rng.choice(records, examples, replace=False)
    return [chosen[rng.permutation(examples)] for _ in range(hparams.epochs)]


def local_batches(records: Records, layout: Layout, hparams: LocalHParams, rng: np.random.Generator) -> Iterator[Batch]:
    for order in epoch_orders(len(records), hparams, rng):
        for first in range(0, len(order), hparams.batch_size):
            yield batch(records, order[first : first + hparams.batch_size], layout)


def bound_norm(gradients: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """Return the gradients times min(1, bound / their norm as one vector)."""
    # torch's clip_grad_norm_ is not used, because it adds 1e-6 to the norm.
    norm = torch.nn.utils.get_total_norm(gradients)
    return tuple(gradient * (bound / norm).clamp(max=1) for gradient in gradients)


def take_step(
    optimizer: torch.optim.Optimizer, weights: Iterable[Tensor], gradients: Sequence[Tensor], bound: float | None
) -> None:
    """Take a step of torch's optimizer of these weights along their gradients, after a clip of the norm if bounded."""
    for weight, gradient in zip(weights, gradients if bound is None else bound_norm(gradients, bound), strict=True):
        weight.grad = gradient
    optimizer.step()


@torch.no_grad()
def restored(model: TrainableModel, start: Params) -> Params:
    """Return parameters - start, in float64 on the model's device, and set the parameters back to `start`."""
    update = {}
    for name, parameter in model.trainable.items():
        update[name] = (parameter - start[name]).to(torch.float64)
        parameter.copy_(start[name])
    return update


# The number of threads of torch in this process.


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch compute with `number` threads in the block; a second one would wait in small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Items that are computed in a separate thread while earlier items are used.

Item = TypeVar("Item")


def prefetched(items: Iterable[Item], depth: int = 2) -> Generator[Item]:
    """Yield the same items in order, and compute up to `depth` in advance, in a thread; errors come at their items."""
    iterator, end = iter(items), object()
    pool = ThreadPoolExecutor(1, "ahead")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth + 1))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
