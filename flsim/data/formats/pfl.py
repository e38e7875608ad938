"""Reader of pfl-research's copy of Stack Overflow, ``stackoverflow.hdf5``: token ids and their vocabulary.

``/{train,val,test}/<user>/{inputs,targets}``, int32 [sentences, 20], are the padded [BOS, words, EOS][:21] without the
last token and without the first. ``/metadata/vocabulary/"<token>"`` is a token's id. A token with ``/`` becomes nested
groups, and HDF5 merges consecutive slashes.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.data.formats.hdf5 import child, client_label, client_parts, hdf5, is_group, members, plain, slices, too_large
from flsim.data.formats.posts import OOV_WORD, POST_RECORDS, Format, Part, Post, user_name

SPLITS = {"train": "train", "val": "heldout", "test": "test"}
LARGEST_VOCABULARY = 10**6
MOST_SLASHES = 100  # slashes in a token; each is a nested group


@dataclass(frozen=True)
class Words:
    """The vocabulary of a file: words by id, the ids that are words or OOV, and the ids of other tokens."""

    words: NDArray[np.object_]
    are_words: NDArray[np.bool_]
    pad: int
    bos: int
    eos: int


def pfl_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: ranges of users, first of train, then of val and test if these exist."""
    _vocabulary(data, source)
    return client_parts(data, source, columns, len(_users(data, source)))


def read_pfl(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield posts of up to 64 sentences of a user; ``<oov>`` replaces words outside the vocabulary.

    Dropped are ``users_not_utf8`` (the name), ``users_too_large`` (a million sentences, or a chunk of 256 MB) and
    ``records_without_words``.

    Raises:
        InputError: libhdf5 cannot read the part, a user lacks valid inputs and targets, or an id is not in the
            vocabulary.
    """
    vocabulary = _vocabulary(part.path, part.source)
    with hdf5(part.path, part.source) as file:
        for split, name in _users(part.path, part.source)[part.first : part.last]:
            user = user_name(name)
            inputs, targets = _datasets(child(child(file, split), name), f"{part.source}: user {client_label(name)}")
            if user is None:
                dropped["users_not_utf8"] += 1
            elif too_large(inputs) or too_large(targets):
                dropped["users_too_large"] += 1
            else:
                for before, after in zip(slices(inputs), slices(targets), strict=True):
                    texts = _sentences(before, after, vocabulary, f"{part.source}: user {client_label(name)}")
                    sentences = [sentence for sentence in texts if sentence]
                    dropped["records_without_words"] += len(texts) - len(sentences)
                    for first in range(0, len(sentences), POST_RECORDS):
                        yield Post(user, sentences[first : first + POST_RECORDS], SPLITS[split])
    dropped += Counter()  # no zeros


def _users(data: Path, source: Path) -> list[tuple[str, str | bytes]]:
    return [(split, name) for split, names in members(data, source, *SPLITS).items() for name in names]


def _datasets(user: Any, where: str) -> tuple[Any, Any]:
    if not is_group(user) or "inputs" not in user or "targets" not in user:
        raise InputError(f"{where} has no inputs and targets")
    inputs, targets = child(user, "inputs"), child(user, "targets")
    if not plain(inputs) or not plain(targets) or inputs.dtype.kind not in "iu" or targets.dtype.kind not in "iu":
        raise InputError(f"{where}: inputs and targets are not integers in this file")
    if len(inputs.shape) != 2 or inputs.shape != targets.shape or not inputs.shape[1]:
        raise InputError(f"{where}: inputs of shape {inputs.shape}, but targets of shape {targets.shape}")
    return inputs, targets


def _sentences(inputs: NDArray[Any], targets: NDArray[Any], vocabulary: Words, where: str) -> list[str]:
    """Return the words of sentences: from BOS to EOS, PAD or the end, which are excluded."""
    if targets.min(initial=0) < 0 or targets.max(initial=0) >= len(vocabulary.words):
        raise InputError(f"{where}: a token id outside of the vocabulary of {len(vocabulary.words):,}")
    if (inputs[:, 0] != vocabulary.bos).any() or (inputs[:, 1:] != targets[:, :-1]).any():
        raise InputError(f"{where}: inputs must be BOS followed by all targets except the last")
    words = vocabulary.are_words[targets]
    lengths = words.sum(axis=1)
    position = np.arange(targets.shape[1])
    ended = (targets == vocabulary.pad) | ((targets == vocabulary.eos) & (position == lengths[:, None]))
    if (words != (position < lengths[:, None])).any() or not (words | ended).all():
        raise InputError(f"{where}: a sentence continues after its end token")
    flat = vocabulary.words[targets[words]].tolist()
    ends = np.cumsum(lengths).tolist()
    return [" ".join(flat[first:last]) for first, last in zip([0, *ends], ends, strict=False)]


def _vocabulary(data: Path, source: Path) -> Words:
    status = data.stat()
    return _read_vocabulary(data, source, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read_vocabulary(data: Path, source: Path, _size: int, _changed: int) -> Words:
    with hdf5(data, source) as file:
        metadata = child(file, "metadata")
        size, unk, pad = (int(child(metadata, name)[()]) for name in ("vocabulary_size", "unk_symbol", "pad_symbol"))
        if not 0 < size <= LARGEST_VOCABULARY:
            raise InputError(f"{source}: vocabulary_size {size:,}")
        ids: dict[str, int] = {}
        for path, token in _leaves(child(metadata, "vocabulary"), ""):
            ids[path[1:-1]] = int(token[()])  # without the quotes
            if len(ids) > size:
                break
    if sorted(ids.values()) != list(range(size)):
        raise InputError(f"{source}: the vocabulary is not one token for each id below vocabulary_size {size:,}")
    if (
        not {"BOS", "EOS"} <= ids.keys()
        or len({unk, pad, ids["BOS"], ids["EOS"]}) < 4
        or not {unk, pad} <= {*range(size)}
    ):
        raise InputError(f"{source}: the vocabulary lacks BOS, EOS, unk_symbol and pad_symbol as different tokens")
    words = np.empty(size, object)
    for token, number in ids.items():
        words[number] = OOV_WORD if number == unk else token
    are_words = np.ones(size, bool)
    are_words[[pad, ids["BOS"], ids["EOS"]]] = False
    wrong = [word for word in words[are_words] if word.split() != [word]]
    if wrong:
        raise InputError(f"{source}: {wrong[0]!r:.40} of the vocabulary is not a word")
    return Words(words, are_words, pad, ids["BOS"], ids["EOS"])


def _leaves(group: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > MOST_SLASHES:
        raise ValueError("groups are nested without end")
    for name in group:
        if user_name(name) is None or isinstance(name, bytes):
            raise ValueError("a token that is not UTF-8")
        member = child(group, name)
        if is_group(member):
            yield from _leaves(member, f"{path}{name}/", depth + 1)
        else:
            yield f"{path}{name}", member


def check_pfl(data: Path, source: Path) -> list[str]:
    """Return a warning for each split that does not have as many users as the metadata counts."""
    warnings = []
    with hdf5(data, source) as file:
        for split, names in members(data, source, *SPLITS).items():
            counted = f"metadata/num_tokens/{split}"
            users = len(json.loads(file[counted][()])) if counted in file else len(names)
            if users != len(names):
                warnings.append(f"{source}: num_tokens counts {users:,} users of {split}, but there are {len(names):,}")
    return warnings


PFL = Format(
    "pfl-hdf5",
    pfl_parts,
    read_pfl,
    check_pfl,
    "sentences are cut at 20 words; words outside the vocabulary, dates, scores, tags and titles are missing",
    fragile=True,
)
