"""Reading ahead changes neither items nor errors, and its thread ends."""

import threading
from collections.abc import Iterator

import pytest

from flsim.training.local import prefetched


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ahead"]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_the_same_items_in_the_same_order(count: int) -> None:
    assert list(prefetched(range(count))) == list(range(count))
    assert not threads()


def test_it_works_ahead_but_not_further_than_asked_for() -> None:
    made, enough = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == 3:
                enough.set()
            yield number

    iterator = prefetched(items(), depth=2)
    assert next(iterator) == 0
    assert enough.wait(timeout=30)  # 1 and 2 wait to be taken, 3 is in hand
    assert made == [0, 1, 2, 3]
    assert list(iterator) == list(range(1, 10))


def test_an_error_comes_after_what_came_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    iterator = prefetched(items())
    assert next(iterator) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert not threads()


def test_the_thread_ends_with_whoever_leaves_early() -> None:
    def items() -> Iterator[int]:
        number = 0
        while True:
            yield (number := number + 1)

    iterator = prefetched(items())
    assert next(iterator) == 1
    iterator.close()
    assert not threads()
