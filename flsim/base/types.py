"""The check that the fields of settings hold values of the types that they declare.

TOML files are checked as they are read. Settings made in Python are not, and a wrong value would be ignored, or fail in
the middle of training.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName

KINDS: Mapping[Any, tuple[type, str]] = {  # numbers of numpy are numbers too
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
}


def refuse_other_types(settings: Any, **public: str) -> None:
    """Raise InputError for the first field of a dataclass whose value is not of the type that the field declares.

    Args:
        settings: the dataclass. A list may stand for a tuple.
        public: names of classes in `flsim` by field, for messages about fields that hold settings themselves.
    """
    kind: type = type(settings)
    hints = _hints(kind)
    for field in fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _fits(value, hint):
            expected = f"a flsim.{public[field.name]}" if field.name in public else _described(hint)
            raise InputError(f"{field.name} must be {expected}, found {text_of(value)}")


def text_of(value: object) -> str:
    """Return a value for a message: text, a number or a list as it is written, anything else by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value) if isinstance(value, str | Real | NoneType) else f"a {type(value).__name__}"


def refuse_other(kind: type | UnionType, expected: str, **values: object) -> None:
    """Raise InputError for the first argument that is of another kind.

    Args:
        kind: the class, or several.
        expected: what to give in its place, for the message.
        values: the arguments by name.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise InputError(f"{name} must be {expected}, found {text_of(value)}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: object, hint: Any) -> bool:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, inside[0])
    if origin is Literal:
        return isinstance(value, str) and value in inside
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inside)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        expected = inside[:1] * len(value) if inside[1:] == (...,) else inside
        return len(value) == len(expected) and all(map(_fits, value, expected))
    if hint in KINDS:
        return isinstance(value, KINDS[hint][0])
    return isinstance(value, origin or hint)


def _described(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        is_custom = any(isinstance(mark, CustomName) for mark in inside[1:])
        return "a name; name your own as 'path/to/file.py:NAME'" if is_custom else _described(inside[0])
    if origin is Literal:
        return f"one of {', '.join(inside)}"
    if origin in (Union, UnionType):
        return " or ".join(_described(one) for one in inside if one is not NoneType)
    if origin is tuple:
        return f"a list, with each item {_described(inside[0])}"
    return KINDS[hint][1] if hint in KINDS else f"a {(origin or hint).__name__}"
