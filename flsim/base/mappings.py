"""Nested mappings, such as the settings of a run."""

from collections.abc import Iterator, Mapping
from typing import Any


def flat(values: Mapping[str, Any], between: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield names and values of a nested mapping, such as ``training.cohort``, without values that are None."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{between}{inner}", item) for inner, item in flat(value, between))
        elif value is not None:
            yield name, value
