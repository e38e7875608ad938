"""Errors that the command line reports in one line, without a traceback."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """An error of the input; its message is one line with the fault, the place and the remedy."""


def at_least_one(**values: int) -> None:
    """Raise InputError for the first value that is not an integer, or is below 1."""
    _refuse_below(1, "must be at least 1", values)


def not_negative(**values: int) -> None:
    """Raise InputError for the first value that is not an integer, or is below 0."""
    _refuse_below(0, "must not be negative", values)


def _refuse_below(least: int, requirement: str, values: dict[str, int]) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise InputError(f"{name} must be an integer, found {value!r}")
        if value < least:
            raise InputError(f"{name} {requirement}, found {value}")


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return values as a list; raise InputError for a single text, which would be a list of letters."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{name} must be a list, such as [{values!r}]")
    return list(values)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, in Python, in CUDA or in torch on a CPU.

    If torch.OutOfMemoryError ends the capture of a CUDA graph, it causes another CUDA error. On a CPU, torch raises a
    plain RuntimeError. torch is not imported here, because most commands do not need it.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"MemoryError", "OutOfMemoryError"} or "can't allocate memory" in str(error):
        return True
    return error.__context__ is not None and "CUDA" in str(error) and is_out_of_memory(error.__context__)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank, or the name of its type if there is none."""
    return next(iter(_lines(error)), type(error).__name__)


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message that is not blank, or the name of its type if there is none."""
    return next(reversed(_lines(error)), type(error).__name__)


def in_one_line(error: BaseException) -> str:
    """Return the complete message of an error as one line, or the name of its type if there is none."""
    missing = " is missing" if isinstance(error, KeyError) else ""
    return " ".join(str(error).split()) + missing or type(error).__name__


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


class RunFailed(RuntimeError):  # noqa: N818 (an outcome of a run, as in its status)
    """A run stopped for a reason outside its input, such as a client that keeps failing.

    `flsim.run` with ``resume=True`` continues such a run from its newest checkpoint.
    """


class Diverged(RunFailed):
    """Training produced values that are not finite; the message names the round and the likely cause.

    Examples:
        >>> try:                                                               # doctest: +SKIP
        ...     flsim.run("paper.toml", "runs/paper", overrides=["local.learning_rate=100"])
        ... except flsim.Diverged as error:
        ...     print(error)
    """


class CustomCodeError(RunFailed):
    """An error of custom code that would occur again in another attempt; the message names the file."""


class Terminated(SystemExit):
    """The exit of the process after a signal, which is not a failure of the running code."""


class Interrupted(RunFailed):
    """The exit of a run after a request to end."""

    def __init__(
        self, signal: int = 0, advice: str = "`flsim run --resume` continues from the newest checkpoint"
    ) -> None:
        super().__init__(signal, advice)
        self.signal, self.advice = signal, advice

    def __str__(self) -> str:
        return f"interrupted; {self.advice}"
