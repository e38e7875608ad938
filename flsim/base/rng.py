"""The only birthplace of randomness.

Every random number is a function of (seed, purpose, keys), where the keys are the round, the user, or whatever else
tells two draws apart. Nothing holds a generator between rounds, so a resumed run draws exactly what an undisturbed
one would have drawn, whatever the number of processes.
"""

import hashlib

import numpy as np


def stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """A fresh generator for one purpose.

    Args:
        seed: the experiment's seed.
        purpose: what is drawn, e.g. ``"cohort"``; two purposes never share a stream.
        keys: what tells this draw from others of the same purpose, e.g. the round and the user.

    >>> stream(0, "cohort", 3).integers(100) == stream(0, "cohort", 3).integers(100)
    True
    """
    name = "/".join([str(int(seed)), purpose, *(f"{type(key).__name__}:{key}" for key in map(_plain, keys))])
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")))


def _plain(key: int | str) -> int | str:
    """Numpy integers count as Python's, so that a key's spelling does not depend on where it came from."""
    return key if isinstance(key, str) else int(key)
