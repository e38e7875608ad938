"""Tests of the lines of errors that messages quote, also of errors without a message, and of lack of memory."""

from flsim.base.errors import first_line, in_one_line, is_out_of_memory, last_line


def test_lines_are_those_with_text() -> None:
    for message in ((), ("",), (" \n\n ",)):
        assert first_line(OSError(*message)) == last_line(OSError(*message)) == in_one_line(OSError(*message))
        assert in_one_line(OSError(*message)) == "OSError"
    error = RuntimeError("\n  the store is\n\n\tfull  \n ")
    assert (first_line(error), last_line(error)) == ("the store is", "full")
    assert in_one_line(error) == "the store is full"
    assert in_one_line(KeyError("corpus")) == "'corpus' is missing"


def test_lack_of_memory_in_a_cuda_recording_is_found_in_the_error_before() -> None:
    """CUDA cannot end a recording after memory ran out, and this error comes last; other kinds do not count."""

    def end_with(last: Exception) -> Exception:
        try:
            try:
                raise MemoryError
            finally:
                raise last
        except type(last) as error:
            return error

    assert is_out_of_memory(end_with(RuntimeError("CUDA error: operation failed due to a previous error")))
    assert not is_out_of_memory(end_with(ValueError("a name is unknown")))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
