"""The lines of errors that messages quote, also of errors without a message."""

import pytest

from flsim.base.errors import first_line, in_one_line, last_line


@pytest.mark.parametrize("message", [(), ("",), (" \n\n ",)])
def test_an_error_without_a_message_is_quoted_by_its_type(message: tuple[str, ...]) -> None:
    error = OSError(*message)
    assert first_line(error) == last_line(error) == in_one_line(error) == "OSError"


def test_lines_are_those_with_text() -> None:
    error = RuntimeError("\n  the store is\n\n\tfull  \n ")
    assert (first_line(error), last_line(error)) == ("the store is", "full")
    assert in_one_line(error) == "the store is full"
