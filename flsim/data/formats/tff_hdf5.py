"""Reader of TensorFlow Federated's older copies of Stack Overflow, ``stackoverflow_{train,held_out,test}.h5``.

``/examples/<client_id>/tokens`` is a dataset of strings, one per sentence. The other features are not read. Tokens are
split at white space and otherwise taken as published. The file's name tells the split.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from flsim.base.errors import InputError
from flsim.data.formats.hdf5 import child, client_label, client_parts, hdf5, members, plain, slices, too_large
from flsim.data.formats.posts import Format, Part, Post, published, split_of_name, user_name

GROUP = "examples"


def tff_hdf5_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of clients, in the file's order."""
    return client_parts(data, source, columns, len(members(data, source, GROUP)[GROUP]))


def read_tff_hdf5(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a client.

    Dropped are ``users_not_utf8`` (the client id), ``users_too_large`` (a million sentences, or a chunk of 256 MB),
    ``records_not_utf8``, ``records_too_long`` (more than 1 MB) and ``records_without_words``.

    Raises:
        InputError: libhdf5 cannot read the part, or a client has no strings ``tokens``.
    """
    split = split_of_name(part.source)
    names = members(part.path, part.source, GROUP)[GROUP][part.first : part.last]
    with hdf5(part.path, part.source) as file:
        clients = child(file, GROUP)
        for name in names:
            user = user_name(name)
            tokens = _tokens(clients, name, part.source)
            if user is None:
                dropped["users_not_utf8"] += 1
            elif too_large(tokens):
                dropped["users_too_large"] += 1
            else:
                texts = (text for piece in slices(tokens) for text in piece.tolist())
                yield from published(user, split, texts, dropped)


def _tokens(clients: Any, name: str | bytes, source: Path) -> Any:
    client = child(clients, name)
    if not isinstance(client, h5py.Group) or "tokens" not in client:
        raise InputError(f"{source}: client {client_label(name)} has no dataset 'tokens'")
    tokens = child(client, "tokens")
    if not plain(tokens) or len(tokens.shape) != 1 or h5py.check_string_dtype(tokens.dtype) is None:
        raise InputError(f"{source}: client {client_label(name)}: 'tokens' is not one row of strings in this file")
    return tokens


TFF_HDF5 = Format("tff-hdf5", tff_hdf5_parts, read_tff_hdf5, fragile=True)
