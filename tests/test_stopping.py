"""Signals that a library catches: the command ends all the same."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flsim.base.errors import Interrupted
from server.stopping import no_signal_lost


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal whose handler raises SystemExit, as that of the command line does."""

    def handle(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(request.param, handle)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_whose_exception_is_caught_interrupts_after_the_block(number: int) -> None:
    went_on = list[bool]()

    def catch_and_go_on() -> None:
        with suppress(SystemExit):
            os.kill(os.getpid(), number)
        went_on.append(True)

    with pytest.raises(Interrupted) as raised, no_signal_lost():
        catch_and_go_on()
    assert (raised.value.signal, went_on) == (number, [True])


def test_an_exception_that_nobody_catches_ends_the_block(number: int) -> None:
    with pytest.raises(SystemExit) as raised, no_signal_lost():
        os.kill(os.getpid(), number)
    assert raised.value.code == 128 + number


def test_handlers_are_what_they_were(number: int) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with no_signal_lost():
        pass
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
