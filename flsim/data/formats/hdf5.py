"""Reading of untrusted HDF5 files.

libhdf5 2.0 may crash on a file that is damaged in the wrong place. It may also loop forever in a damaged heap of
strings (in 0.3% of files that were damaged at random), and cannot be stopped from inside. Therefore such a file is read
in a separate process, which is killed after five minutes without progress.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import USER_RECORDS, Part, library_message, ranges, user_name

try:
    import h5py
except ImportError:  # h5py is in the extra `hdf5`; only this format needs it
    h5py = None

MAGIC = b"\x89HDF\r\n\x1a\n"
LARGEST_CHUNK = 2**28  # bytes; a compressed chunk is completely in memory
SLICE = 2**24  # bytes of a dataset that are in memory at a time

# The exceptions of h5py for errors of libhdf5 and for inconsistent content.
_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError, MemoryError)


def refuse_missing_h5py(file: Path) -> None:
    """Raise InputError if h5py, which the extra `hdf5` installs, cannot be imported.

    Args:
        file: the file that is to be read or written, for the message.
    """
    if h5py is None:
        raise InputError(f"{file}: HDF5 files need h5py, the extra 'hdf5', which is not installed; pip install h5py")


@contextmanager
def hdf5(data: Path, source: Path) -> Iterator[Any]:
    """Open a file, read-only and without locks.

    Raises:
        InputError: libhdf5 raised an error in the block, or h5py is not installed.
    """
    refuse_missing_h5py(source)
    try:
        with h5py.File(data, "r", locking=False) as file:
            yield file
    except InputError:
        raise
    except _ERRORS as error:
        raise InputError(
            f"{source}: libhdf5 cannot read it ({library_message(error)}); check that it is complete, or "
            "download it again"
        ) from error


def child(group: Any, name: str | bytes) -> Any:
    """Return a member of a group that is in this file.

    Links are not followed, because they can name any other file.

    Raises:
        KeyError: there is no such member, or it is a link.
    """
    encoded = name if isinstance(name, bytes) else name.encode()
    if group.id.links.get_info(encoded).type != h5py.h5l.TYPE_HARD:
        raise KeyError(f"{name!r} is a link")
    return group[name]


def members(data: Path, source: Path, *groups: str) -> dict[str, tuple[str | bytes, ...]]:
    """Return the names in groups below the root, in the file's order.

    There are hundreds of thousands of names, so they are listed once per process.

    Raises:
        InputError: the file has none of the groups.
    """
    status = data.stat()
    return _members(data, source, groups, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _members(
    data: Path, source: Path, groups: tuple[str, ...], _size: int, _changed: int
) -> dict[str, tuple[str | bytes, ...]]:
    with hdf5(data, source) as file:
        names = {group: tuple(child(file, group)) for group in groups if group in file}
        if not names:
            raise InputError(
                f"{source}: no group {' or '.join(groups)}; its groups: {', '.join(map(str, file)) or 'none'}"
            )
        return names


def client_parts(data: Path, source: Path, columns: tuple[str, str], clients: int) -> list[Part]:
    """Return parts of about 64 MB, with equally many clients each."""
    pieces = -(-data.stat().st_size // posts.PART_BYTES)
    return [Part(data, source, first, last, columns) for first, last in ranges(0, clients, pieces)]


def too_large(dataset: Any) -> bool:
    """Return whether a dataset is larger than any published dataset, or needs too much memory to read a piece."""
    rows = dataset.shape[0] if dataset.shape else 0
    row = prod(dataset.shape[1:]) * dataset.dtype.itemsize
    chunk = prod(dataset.chunks) * dataset.dtype.itemsize if dataset.chunks else 0
    return bool(rows > USER_RECORDS or row > LARGEST_CHUNK or chunk > LARGEST_CHUNK)


def slices(dataset: Any) -> Iterator[Any]:
    """Yield a dataset's rows, a bounded number at a time."""
    row = max(1, prod(dataset.shape[1:]) * dataset.dtype.itemsize)
    step = max(1, SLICE // max(row, 2**10))
    for first in range(0, dataset.shape[0], step):
        yield dataset[first : first + step]


def is_group(member: Any) -> bool:
    """Return whether a member of a group is a group."""
    return isinstance(member, h5py.Group)


def holds_strings(dataset: Any) -> bool:
    """Return whether a dataset's values are strings, of fixed or variable length."""
    return h5py.check_string_dtype(dataset.dtype) is not None


def plain(dataset: Any) -> bool:
    """Return whether the values of a dataset are in the file itself.

    Values may be missing, or be in other files that a dataset names.
    """
    inside = isinstance(dataset, h5py.Dataset) and not dataset.is_virtual and not dataset.external
    return bool(inside and dataset.shape is not None and (not dataset.size or dataset.id.get_storage_size()))


def client_label(name: str | bytes) -> str:
    """Return a client's name for a message, at most 60 characters."""
    return repr(user_name(name) or name)[:60]
