"""What can be wrong with a run, as the command line reports it."""


class InputError(ValueError):
    """The user's input is wrong. The message is one line: what is wrong, where, and what to do."""


def at_least_one(**values: int) -> None:
    """Raises InputError for the first value below 1; settings check their counts with it."""
    for name, value in values.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, found {value}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory: for Python, for CUDA (torch.OutOfMemoryError), or for torch on a CPU.

    The last is a plain RuntimeError. torch is not imported here: most commands do without it.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


class RunFailed(RuntimeError):  # noqa: N818 (an outcome of a run, as in its status)
    """A run stopped for a reason outside its input: a client that keeps failing, an evaluation that did not finish."""


class Diverged(RunFailed):
    """Training produced values that are not finite. The message names the round and the likely cause."""


class Interrupted(RunFailed):
    """Someone asked the run to end: the number of the signal, 0 where it came in another way."""

    def __init__(self, signal: int = 0) -> None:
        super().__init__(signal)
        self.signal = signal

    def __str__(self) -> str:
        return "interrupted; `flsim run --resume` continues from the newest checkpoint"
