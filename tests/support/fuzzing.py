"""Program that reads damaged files: ``python fuzzing.py FOLDER FORMAT FIRST LAST``.

The program is a separate process, because libhdf5 may crash. Each case prints its number before it begins, and its
outcome at its end. A timer kills a case that takes too long, which counts as a crash.
"""

import resource
import signal
import sys
from pathlib import Path

from reading import check_post, damaged, parts_of, read

from flsim.base.errors import InputError
from flsim.base.rng import stream

LONGEST_CASE = 1.0  # seconds
MEMORY = 8 * 2**30  # bytes of address space


def outcome(content: bytes, path: Path, format: str, case: int) -> str:
    """Damage a valid file's content as this case does, and read it: only posts or an InputError may result."""
    path.write_bytes(damaged(content, stream(0, "fuzz", format, case)))
    message = ""
    try:
        with parts_of(300 if case % 2 else 2**26):
            found, dropped = read(path, format)
    except InputError as error:
        message = str(error)
    if message:
        assert "\n" not in message, message
        assert len(message) < 600, message
        return "refused"
    for post in found:
        check_post(post)
    return "dropped" if dropped.total() else "read"


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(folder: Path, format: str, first: int, last: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    content = (folder / "valid").read_bytes()
    for case in range(first, last):
        say(f"{case} ")
        signal.setitimer(signal.ITIMER_REAL, LONGEST_CASE)
        path = folder / f"{case}.damaged"  # a new path: listings of HDF5 files are cached by path and time
        say(f"{outcome(content, path, format, case)}\n")
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
