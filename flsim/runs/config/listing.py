"""The list of all settings, from the dataclasses of a configuration and their docstrings.

The `Attributes` section of a docstring describes each field; ``Unit: X.`` at its end is the unit of a number.
"""

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName
from flsim.models.architectures import BUILT_IN, build
from flsim.models.hf import OF_BASE
from flsim.models.hparams import ModelHParams
from flsim.runs.config.files import KINDS

FORM = "path/to/file.py:NAME"
VOCABULARY = 10_000  # token ids of the paper, for which parameters of architectures are counted
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "text"}


@dataclass(frozen=True)
class Setting:
    name: str
    type: str
    default: str
    unit: str
    description: str


@dataclass(frozen=True)
class Section:
    """One section of a configuration file, for one kind of training if the kinds differ."""

    name: str
    kind: str
    description: str
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        kind = f" of {self.kind} training" if self.kind in KINDS else f": {self.kind}" if self.kind else ""
        return (f"[{self.name}]" if self.name else "Outside of sections") + kind

    def key(self, setting: Setting) -> str:
        """Return the key of a setting, e.g. "training.rounds"."""
        return f"{self.name}.{setting.name}".lstrip(".")


def sections() -> list[Section]:
    """Return all sections, keys outside of sections first; keys of all kinds of training make one section."""
    listed: dict[str, list[Section]] = {"": []}
    for kind, config in KINDS.items():
        hints, descriptions = get_type_hints(config, include_extras=True), _descriptions(config)
        for item in fields(config):
            name, hint = item.name, hints[item.name]
            has_keys = is_dataclass(hint)
            settings = _settings(hint) if has_keys else (_setting(item, hint, descriptions[name]),)
            section = Section(name if has_keys else "", kind, descriptions[name] if has_keys else "", settings)
            listed.setdefault(section.name, []).append(section)
            for inner, of_inner in _inner_sections(hint) if has_keys else ():
                part = Section(f"{name}.{inner}", kind, _descriptions(hint)[inner], _settings(of_inner))
                listed.setdefault(part.name, []).append(part)
    merged = [part for of_kinds in listed.values() for part in _merged(of_kinds)]
    after_model = 1 + [section.name for section in merged].index("model")
    return [*merged[:after_model], _architectures(), *merged[after_model:]]


def _inner_sections(section: type) -> list[tuple[str, type]]:
    """Return the settings of a section that are sections themselves, with their dataclasses."""
    hints = get_type_hints(section)
    of_hints = {name: [kind for kind in get_args(hint) if is_dataclass(kind)] for name, hint in hints.items()}
    return [(name, kinds[0]) for name, kinds in of_hints.items() if kinds]  # type: ignore[misc]


def _merged(of_kinds: Sequence[Section]) -> list[Section]:
    """Return the keys that all kinds share, then those of each kind; sections without keys are omitted."""
    first = of_kinds[0]
    is_shared = len(of_kinds) == len(KINDS)
    common = [key for key in first.settings if is_shared and all(key in section.settings for section in of_kinds)]
    shared = replace(first, kind="", settings=tuple(common))
    specific = [
        replace(section, settings=tuple(key for key in section.settings if key not in common)) for section in of_kinds
    ]
    return [section for section in (shared, *specific) if section.settings]


def _architectures() -> Section:
    """Return the built-in networks, the values of `model.architecture`, as a section."""
    about = f"Built-in networks. Parameters are counted at the default sizes, with {VOCABULARY:,} token ids."
    return Section("model", "architectures", about, tuple(map(_architecture, BUILT_IN)))


def _architecture(name: str) -> Setting:
    description = " ".join(inspect.cleandoc(BUILT_IN[name].__doc__ or "").split("\n\n")[0].split()).replace("`", "")
    sizes: tuple[str, ...] = OF_BASE
    count = ""
    if name != "hf":
        network = build(VOCABULARY, ModelHParams(architecture=name))
        count = f" {sum(value.numel() for value in network.trainable.values()):,} parameters."
        defaults = {item.name: item.default for item in fields(ModelHParams) if isinstance(item.default, int)}
        sizes = tuple(size for size, default in defaults.items() if _allows(name, **{size: 2 * default}))
    reads = f"Reads {', '.join(sizes[:-1])} and {sizes[-1]}."
    return Setting(name, "architecture", "", "", f"{description} {reads}{count}")


def _allows(architecture: str, **size: Any) -> bool:
    try:
        ModelHParams(architecture=architecture, **size)
    except InputError:
        return False
    return True


def _settings(section: type) -> tuple[Setting, ...]:
    hints, descriptions = get_type_hints(section, include_extras=True), _descriptions(section)
    inner = dict(_inner_sections(section))
    listed = [item for item in fields(section) if item.name not in inner]
    return tuple(_setting(item, hints[item.name], descriptions[item.name]) for item in listed)


def _setting(item: "Field[Any]", hint: Any, description: str) -> Setting:
    sentences, _, unit = description.partition(" Unit: ")
    type_, choices = _type(hint)
    unit = unit.removesuffix(".").removeprefix("none")
    return Setting(item.name, type_, _default(item), unit, f"{sentences} {choices}".strip())


def _descriptions(kind: type) -> dict[str, str]:
    """Return the text about each attribute, from the docstrings of a dataclass and of its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE):
            texts[name] = " ".join(text.split()).replace("`", "")
    return texts


def _default(item: "Field[Any]") -> str:
    if item.default_factory is not MISSING:
        return "{}"
    if item.default is MISSING:
        return "required"
    return "not set" if item.default is None else _toml(item.default)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _type(hint: Any) -> tuple[str, str]:
    """Return a type in words, and a sentence that lists the names that it allows; empty if it allows any value."""
    if get_origin(hint) in (Union, UnionType):
        return _type(next(kind for kind in get_args(hint) if kind is not NoneType))
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        custom = [mark for mark in marks if isinstance(mark, CustomName)]
        if custom:
            return "name", f"One of: {', '.join(custom[0].built_in)}, or custom code as {FORM}."
        type_, choices = _type(kind)
        return type_, f"{choices} {_bounds(marks)}".strip()
    if get_origin(hint) is Literal:
        names = get_args(hint)
        return "name", f"One of: {', '.join(names)}." if len(names) > 1 else ""
    if get_origin(hint) is tuple:
        kind, choices = _type(get_args(hint)[0])
        plural = f"lists of {kind.removeprefix('list of ')}" if kind.startswith("list of ") else f"{kind}s"
        return f"list of {plural}", choices.replace("One of", "Any of")
    return TYPES.get(hint, "table of numbers or text"), ""


def _bounds(marks: Sequence[Any]) -> str:
    """Return a sentence on the bounds of a number; empty without bounds."""
    limits = [limit for mark in marks for limit in getattr(mark, "metadata", ())]
    values = [(item.name, getattr(limit, item.name)) for limit in limits for item in fields(limit)]
    text = " and ".join(f"{BOUNDS[name]} {value:g}" for name, value in values if name in BOUNDS)
    return f"{text.capitalize()}." if text else ""
