"""An iterator that computes its next items in a separate thread while earlier items are used."""

from collections.abc import Generator, Iterable
from queue import Full, Queue
from threading import Event, Thread
from typing import TypeVar

Item = TypeVar("Item")
PATIENCE = 0.1  # seconds between two checks whether the iterator was closed


def prefetched(items: Iterable[Item], depth: int = 2) -> Generator[Item]:
    """Yield the same items in order, and compute up to `depth` in advance, in a thread; errors come at their items."""
    made: Queue[tuple[Item | None, BaseException | None, bool]] = Queue(depth)
    left = Event()

    def hand_over(item: Item | None, error: BaseException | None, last: bool) -> bool:
        while not left.is_set():
            try:
                made.put((item, error, last), timeout=PATIENCE)
            except Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not hand_over(item, None, False):
                    return
        except BaseException as error:  # raised again in the thread that iterates
            hand_over(None, error, True)
        else:
            hand_over(None, None, True)

    thread = Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error, last = made.get()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        left.set()
        thread.join()
