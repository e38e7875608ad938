"""An iterator that computes its next items in a separate thread while earlier items are used."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
