"""Torch's threads in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch computes with so many threads in the block.

    Small products gain nothing from a second thread, and wait for it where cores are busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
