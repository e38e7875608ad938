"""The only source of randomness.

Every random number is a function of a seed, a purpose and keys, such as the round and the user. A resumed run therefore
draws the same numbers as an uninterrupted run, for any number of processes.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """Return a fresh generator for one purpose.

    Args:
        purpose: what is drawn, e.g. ``"cohort"``; two purposes never share a stream.
        keys: values that distinguish this draw from others of the same purpose, e.g. the round and the user.

    >>> stream(0, "cohort", 3).integers(100) == stream(0, "cohort", 3).integers(100)
    True
    """
    # Integers of numpy become Python's, so that the name of a stream does not depend on the type of a key.
    plain = (key if isinstance(key, str) else int(key) for key in keys)
    name = "/".join([str(int(seed)), purpose, *(f"{type(key).__name__}:{key}" for key in plain)])
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")))


@contextmanager
def shared_generators(device: "torch.device", seed: int, *keys: int | str) -> Iterator[None]:
    """Seed torch's generators of CPUs and of a device, `random` and `np.random`, by `stream`, and restore them."""
    import torch

    value = int(stream(seed, "torch", *keys).integers(2**63))
    gpus = []
    if device.type == "cuda":
        gpus.append(torch.cuda.current_device() if device.index is None else device.index)
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(value)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(value)
        random.seed(value)
        np.random.seed(value % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def states_of_shared_generators() -> tuple[str, ...]:
    """Return the states of torch's generator of CPUs, Python's `random` and NumPy's `np.random`, as texts."""
    import torch

    words: Any = np.random.get_state(legacy=False)["state"]
    numpy_state = (words["key"].tolist(), words["pos"])
    return str(torch.get_rng_state().tolist()), str(random.getstate()), str(numpy_state)
