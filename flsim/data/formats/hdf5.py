"""Reader of TensorFlow Federated's older copies of Stack Overflow, ``stackoverflow_{train,held_out,test}.h5``.

``/examples/<client_id>/tokens`` is a dataset of strings, one per sentence. The file name contains the split. Reading
can crash or loop forever in libhdf5 2.0, in 0.3% of files that were damaged at random. Therefore a separate process
reads a file, and is killed after five minutes without progress.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import (
    USER_RECORDS,
    Format,
    Part,
    Post,
    published,
    ranges,
    reading,
    split_of_name,
    user_name,
)

try:
    import h5py
except ImportError:  # h5py is in the extra `hdf5`; only this format needs it
    h5py = None

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
GROUP = "examples"
LARGEST_CHUNK = 2**28  # bytes; a compressed chunk is completely in memory
SLICE = 2**24  # bytes of a dataset that are in memory at a time

# The exceptions of h5py for errors of libhdf5 and for inconsistent content.
_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError, MemoryError)


def refuse_missing_h5py(file: Path) -> None:
    """Raise InputError about a file to be read or written if h5py, which the extra `hdf5` installs, is missing."""
    if h5py is None:
        raise InputError(f"{file}: HDF5 files need h5py, the extra 'hdf5', which is not installed; pip install h5py")


@contextmanager
def hdf5(data: Path, source: Path) -> Iterator[Any]:
    """Open a file, read-only and without locks; errors of libhdf5 in the block become InputError."""
    refuse_missing_h5py(source)
    with reading(source, "libhdf5 cannot read it", _ERRORS), h5py.File(data, "r", locking=False) as file:
        yield file


def _clients(data: Path, source: Path) -> tuple[str | bytes, ...]:
    """Return the names of clients in the file's order, listed once per process: there are hundreds of thousands."""
    status = data.stat()
    return _listed(data, source, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _listed(data: Path, source: Path, _size: int, _changed: int) -> tuple[str | bytes, ...]:
    with hdf5(data, source) as file:
        if GROUP not in file:
            raise InputError(f"{source}: no group {GROUP}; its groups: {', '.join(map(str, file)) or 'none'}")
        return tuple(_child(file, GROUP))


def _child(group: Any, name: str | bytes) -> Any:
    """Return a member of a group; KeyError if there is none in this file. Links can name any other file."""
    encoded = name if isinstance(name, bytes) else name.encode()
    if group.id.links.get_info(encoded).type != h5py.h5l.TYPE_HARD:
        raise KeyError(f"{name!r} is a link")
    return group[name]


def tff_hdf5_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of equally many clients, in the file's order, of about 64 MB."""
    pieces = -(-data.stat().st_size // posts.PART_BYTES)
    clients = ranges(0, len(_clients(data, source)), pieces)
    return [Part(data, source, first, last, columns) for first, last in clients]


def read_tff_hdf5(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a client.

    Dropped are clients whose id is not UTF-8 or that are too large (a million sentences, or a chunk of 256 MB). Dropped
    sentences are not UTF-8, too long (more than 1 MB) or without words.
    """
    split = split_of_name(part.source)
    names = _clients(part.path, part.source)[part.first : part.last]
    with hdf5(part.path, part.source) as file:
        clients = _child(file, GROUP)
        for name in names:
            user, tokens = user_name(name), _tokens_of(clients, name, part.source)
            chunk = prod(tokens.chunks) if tokens.chunks else 1
            if user is None:
                dropped["users_not_utf8"] += 1
            elif len(tokens) > USER_RECORDS or chunk * tokens.dtype.itemsize > LARGEST_CHUNK:
                dropped["users_too_large"] += 1
            else:
                step = max(1, SLICE // max(tokens.dtype.itemsize, 2**10))
                texts = (text for at in range(0, len(tokens), step) for text in tokens[at : at + step].tolist())
                yield from published(user, split, texts, dropped)


def _tokens_of(clients: Any, name: str | bytes, source: Path) -> Any:
    """Return the dataset of a client's sentences, whose values are in the file itself."""
    client, label = _child(clients, name), repr(user_name(name) or name)[:60]
    if not isinstance(client, h5py.Group) or "tokens" not in client:
        raise InputError(f"{source}: client {label} has no dataset 'tokens'")
    tokens = _child(client, "tokens")
    is_inside = isinstance(tokens, h5py.Dataset) and not tokens.is_virtual and not tokens.external
    is_written = is_inside and tokens.shape is not None and (not tokens.size or tokens.id.get_storage_size())
    if not is_written or len(tokens.shape) != 1 or h5py.check_string_dtype(tokens.dtype) is None:
        raise InputError(f"{source}: client {label}: 'tokens' is not a one-dimensional dataset of strings in this file")
    return tokens


TFF_HDF5 = Format("tff-hdf5", tff_hdf5_parts, read_tff_hdf5, fragile=True)
