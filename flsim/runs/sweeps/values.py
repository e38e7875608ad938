"""Settings of a sweep as nested tables, and parts of names that contain them."""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

Values = dict[str, Any]


def merge(into: Values, values: Mapping[str, Any]) -> None:
    """Merge sections, and replace all other values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            merge(into[key], value)
        else:
            into[key] = deepcopy(value)


def nested(key: str, value: Any) -> Values:
    """Return the nested tables of a key, such as ``local.learning_rate``, with its value."""
    *sections, name = key.split(".")
    tables: Values = {name: value}
    for section in reversed(sections):
        tables = {section: tables}
    return tables


def slug(key: str, value: Any) -> str:
    """Return a part of a folder's name: words unchanged, numbers after the name of the setting."""
    text = re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-")
    return text if isinstance(value, str) else f"{key.rpartition('.')[2]}{text}"


def flat(point: Iterable[tuple[str, Any]]) -> Values:
    """Return the values of axes, with those of a table as separate keys."""
    values: Values = {}
    for axis, value in point:
        values |= (
            {f"{axis}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {axis: value}
        )
    return values
