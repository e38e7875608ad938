"""Damaged files, read: ``python fuzzing.py FOLDER FORMAT FIRST LAST`` in a process of its own, as libhdf5 may crash.

Every case prints its number before it begins, and its outcome when it is over; a case that takes too long is killed by
the alarm clock, which is one way of crashing.
"""

import resource
import signal
import sys
from pathlib import Path

from reading import check_post, damaged, read

from flsim.errors import InputError
from flsim.rng import stream

LONGEST_CASE = 1.0  # seconds
MEMORY = 8 * 2**30  # bytes of address space


def outcome(content: bytes, path: Path, format: str, case: int) -> str:
    """Read a valid file's content, damaged for this case: posts or an InputError, and nothing else."""
    path.write_bytes(damaged(content, stream(0, "fuzz", format, case)))
    try:
        posts, dropped = read(path, format)
    except InputError as error:
        assert "\n" not in str(error), error
        assert len(str(error)) < 600, error
        return "refused"
    for post in posts:
        check_post(post)
    return "dropped" if dropped.total() else "read"


def main(folder: Path, format: str, first: int, last: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    content = (folder / "valid").read_bytes()
    for case in range(first, last):
        print(case, end=" ", flush=True)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_CASE)
        path = folder / f"{case}.damaged"  # listings of HDF5 files are kept, by path and time
        print(outcome(content, path, format, case), flush=True)
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
