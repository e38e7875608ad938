"""Reading TOML into frozen dataclasses, with overrides; each error is one line that names the key."""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from flsim.base.errors import InputError
from flsim.base.settings import input_error, with_present_names

Kind = TypeVar("Kind")
DEEPEST = 64  # levels of tables and lists; settings have four


def unchanged(_key: str, value: Any) -> Any:
    return value


def read(path: Path, overrides: Iterable[str] = (), change: Callable[[str, Any], Any] = unchanged) -> dict[str, Any]:
    """Return the values of a TOML file, with overrides; InputError if something cannot be read, or is too large."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also of integers of thousands of digits
        raise InputError(f"{path}: not TOML: {error}") from error
    _refuse_large(values, str(path))
    try:
        values = dict(with_present_names(values))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    for override in overrides:
        override_value(values, override, change)
    return values


def _refuse_large(values: Any, source: str, key: str = "", depth: int = 0) -> None:
    """Raise InputError for integers of more than 64 bits, null characters, and values nested too deep.

    A key with dots, such as the axis of a sweep, has a level for each of its parts.
    """
    where = ": ".join(filter(None, (source, key)))
    if depth > DEEPEST:
        raise InputError(f"{source}: its values are nested too deeply; use at most {DEEPEST} levels")
    if isinstance(values, Mapping):
        for name, value in values.items():
            _refuse_large(value, source, f"{key}.{name}".lstrip("."), depth + 1 + name.count("."))
    elif isinstance(values, list):
        for value in values:
            _refuse_large(value, source, key, depth + 1)
    elif isinstance(values, str) and "\0" in values:
        raise InputError(f"{where}: contains a null character; remove it")
    elif isinstance(values, int) and not -(2**63) <= values < 2**63:
        raise InputError(f"{where}: found {values!s:.20}..., an integer of more than 64 bits; name a smaller one")


def validate(kind: type[Kind], values: Mapping[str, Any], source: str) -> Kind:
    """Return values that were read from `source` as a dataclass; InputError if a value is not allowed."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise input_error(error, kind, source) from error


def close_to(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return a hint for a wrong name: the closest name as a question, or the command that lists all names."""
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"did you mean {prefix}{close[0]}?" if close else "`flsim settings` lists all settings"


def unknown_keys(kind: type, values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key without a field in a dataclass, at any depth, with the text of `close_to`."""
    if not isinstance(values, Mapping):
        return  # the validator reports a wrong type
    known = {item.name for item in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            yield f"{prefix}{key}", close_to(key, known, prefix)
        elif is_dataclass(hints[key]):
            yield from unknown_keys(hints[key], value, f"{prefix}{key}.")


def places_of(kind: type, name: str, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a dataclass, at any depth, whose last part is `name`."""
    for item, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from places_of(hint, name, f"{prefix}{item}.")  # type: ignore[arg-type]
        elif item == name:
            yield f"{prefix}{item}"


def replaced_by(override: str) -> str:
    """Return the present name of the setting or section that an override such as ``section.key=value`` sets."""
    values: Any = {}
    override_value(values, override)
    names = list[str]()
    for _ in override.partition("=")[0].split("."):
        ((name, values),) = values.items()
        names.append(name)
    return ".".join(names)


def replaces(override: str, setting: str) -> bool:
    """Return whether an override sets a setting, or the section of the setting."""
    return f"{setting}.".startswith(f"{replaced_by(override)}.")


def override_value(values: dict[str, Any], override: str, change: Callable[[str, Any], Any] = unchanged) -> None:
    """Set a value from a text such as ``section.key=value``, in place, after `change`; InputError if it is wrong."""
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not all([*sections, name]):
        raise InputError(f"{override}: write a setting as NAME=VALUE, e.g. training.rounds=100")
    try:
        value, *more = tomllib.loads(f"value = {text}").values()
    except tomllib.TOMLDecodeError:
        value, more = text.strip(), []
    except (ValueError, RecursionError) as error:
        raise InputError(f"{override:.60}: not TOML: {error}") from error
    if more:
        raise InputError(f"{override!r:.60}: sets more than one setting; give each its own --set")
    _refuse_large({key.strip(): value}, f"{override:.60}")
    ((name, value),) = with_present_names({name: value}, section=".".join(sections)).items()
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"{override}: {section} is a value, not a section")
    values[name] = change(key.strip(), value)
