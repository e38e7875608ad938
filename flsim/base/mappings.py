"""Nested mappings, such as the settings of a run, and old names of settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from flsim.base.errors import InputError

# Old names of settings, and their new names.
RENAMED = {"data.world": "data.partition"}


def flat(values: Mapping[str, Any], between: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield names and values of a nested mapping, such as ``training.cohort``, without values that are None."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{between}{inner}", item) for inner, item in flat(value, between))
        elif value is not None:
            yield name, value


def with_present_names(values: Any, names: Mapping[str, str] = RENAMED, section: str = "") -> Any:
    """Return values of TOML or JSON with the new names of settings by their old `names`; InputError if both occur.

    A setting is a key of its section, a key with a dot (the axis of a sweep), or a text in a list.
    """
    if isinstance(values, list | tuple):
        return [names.get(item, item) if isinstance(item, str) else with_present_names(item, names) for item in values]
    if not isinstance(values, Mapping):
        return values
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        new = names.get(key) or names.get(f"{section}.{key}", "").removeprefix(f"{section}.") or key
        if new != key and new in values:
            raise InputError(f"{key} is the old name of {new}, and both are set; remove {key}")
        renamed[new] = with_present_names(value, names, key)
    return renamed


def with_former_names(values: Any) -> Any:
    """Return values with the oldest names of settings, so that digests of older files do not change."""
    return with_present_names(values, {new: old for old, new in RENAMED.items()})
