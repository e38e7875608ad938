"""Creation of corpora with code: built-in and custom makers."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flsim.base.errors import InputError
from flsim.base.extensions import is_custom, parts, refuse_unknown
from flsim.base.settings import input_error
from flsim.data.corpus import Corpus
from flsim.data.formats.own import maker_of
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.synthetic import SyntheticHParams, make_synthetic


@dataclass(frozen=True)
class Maker:
    """A built-in maker of corpora.

    Attributes:
        options: a dataclass of the maker's options.
        make: function of (folder of the new corpus, options, seed) that returns the corpus.
    """

    options: type
    make: Callable[[Path, Any, int], Corpus]


MAKERS = {"synthetic": Maker(SyntheticHParams, make_synthetic)}
WHOLE: dict[str, Any] = {"words_per_user": None}  # users as the maker yields them


def make_corpus(
    name: str,
    out: Path,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    writing: Mapping[str, Any] | None = None,
) -> Corpus:
    """Write a corpus that code generates, which is a function of the code and these arguments.

    The posts of a custom maker are imported like any other source: users are cut if `words_per_user` is set, splits are
    drawn if the maker names none, and the vocabulary is counted. An interrupted call continues when it is repeated.

    Args:
        name: a key of `MAKERS`, or ``path/to/file.py:NAME``; see `flsim.data.formats.own`.
        out: folder of the new corpus.
        seed: seed of everything that is drawn.
        options: options of the maker, by name.
        writing: fields of `flsim.data.importing.gather.ImportHParams`, by name. A built-in maker accepts only fields
            that are also its options.

    Raises:
        InputError: there is no such maker, it does not take an option, its code failed, or `out` exists.
    """
    refuse_unknown(name, MAKERS, "maker")
    options, writing = options or {}, writing or {}
    if is_custom(name):
        hparams = ImportHParams(**{**WHOLE, **writing}, seed=seed)
        is_free = "vocabulary_size" not in writing
        return import_corpus([parts(name)[0]], out, hparams, maker_of(name, seed, options), fit_vocabulary=is_free)
    maker = MAKERS[name]
    return maker.make(out, _validated(name, maker.options, {**writing, **options}), seed)


def _validated(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(kind)]
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise InputError(f"{name}: unknown option {key}; did you mean {close}?")
    try:
        return TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        raise input_error(error, kind, name) from error
