"""The number of threads that torch computes with in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch compute with `number` threads within the block, and put the former number back afterwards.

    Small products gain nothing from a second thread, and wait for it where cores are busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
