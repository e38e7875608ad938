"""Errors that the command line reports in one line, without a traceback."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """The user's input is wrong; the message says in one line what is wrong, where, and what to do."""


def at_least_one(**values: int) -> None:
    """Raise InputError for the first value that is no whole number, or is below 1.

    Settings check their counts with this function.
    """
    for name, value in values.items():
        _refuse_fraction(name, value)
        if value < 1:
            raise InputError(f"{name} must be at least 1, found {value}")


def not_negative(**values: int) -> None:
    """Raise InputError for the first value that is no whole number, or is below 0."""
    for name, value in values.items():
        _refuse_fraction(name, value)
        if value < 0:
            raise InputError(f"{name} must not be negative, found {value}")


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return values as a list; raise InputError for a single text, whose letters would be taken for the values."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{name} must be a list, such as [{values!r}]")
    return list(values)


def _refuse_fraction(name: str, value: object) -> None:
    if not isinstance(value, Integral):
        raise InputError(f"{name} must be an integer, found {value!r}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, in Python, in CUDA or in torch on a CPU.

    CUDA raises torch.OutOfMemoryError; where that ends the capture of a CUDA graph, another error of CUDA follows from
    it. torch on a CPU raises a plain RuntimeError, which is known by its message. torch is not imported here, because
    most commands do without it.
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
    """Return an error's whole message as one line, or the name of its type if there is none."""
    return " ".join(str(error).split()) or type(error).__name__


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
    """Custom code raised an error, as it does each time; the message names its file."""


class Terminated(SystemExit):
    """A signal's exit of the process, which is no failure of the code that was running."""


class Interrupted(RunFailed):
    """Somebody asked the run to end.

    Attributes:
        signal: the number of the signal that asked; 0 if the request came in another way.
        advice: what to do to go on.
    """

    def __init__(
        self, signal: int = 0, advice: str = "`flsim run --resume` continues from the newest checkpoint"
    ) -> None:
        super().__init__(signal, advice)
        self.signal, self.advice = signal, advice

    def __str__(self) -> str:
        return f"interrupted; {self.advice}"
