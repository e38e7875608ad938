"""Reading a configuration from a TOML file, writing it, and the list of all settings; an unknown key is an error."""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName
from flsim.data.stores import located
from flsim.models.architectures import BUILT_IN
from flsim.models.hf import FILES
from flsim.runs.config import custom_code, toml
from flsim.runs.config.base import Config, FederatedConfig
from flsim.runs.config.central import CentralConfig

KINDS: dict[str, type[Config]] = {"federated": FederatedConfig, "central": CentralConfig}

# Settings with another name in another kind of training: (kind, key of the other kind) -> key of this kind.
OTHERWISE = {("federated", "system.device"): "system.gpus_per_client"}


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file; paths in `overrides`, ``section.key=value``, are relative to the working directory.

    Values are as in TOML, and a bare word is a string. Paths in the file are relative to its folder. Raises InputError
    if the file is missing, not TOML, or a sweep; a key is unknown (the message names the closest key); or a value is
    not allowed. A message about a key that an override sets names this override, not the file.
    """
    overrides = tuple(overrides)
    values = toml.read(path, overrides, from_working_directory)
    if "grids" in values:
        raise InputError(f"{path}: this file is a sweep, not the configuration of a run; train it with `flsim sweep`")
    try:
        config = parse(values, str(path), path.parent)
    except InputError as error:
        about = str(error).removeprefix(f"{path}: ")
        for override in overrides:
            if re.match(rf"(unknown key )?{re.escape(override.partition('=')[0].strip())}(?![\w.])", about):
                raise InputError(f"{override}: {about}") from error
        raise
    return replace(config, data=replace(config.data, corpus=located(config.data.corpus, path.parent)))


def from_working_directory(key: str, value: Any) -> Any:
    """Return the value of an override with absolute paths, of the corpus and of custom files."""
    if key in {"data", "model"} and isinstance(value, dict):
        return {name: from_working_directory(f"{key}.{name}", part) for name, part in value.items()}
    if key == "data.corpus" and isinstance(value, str):
        return str(located(value))
    if key.startswith("model.") and key.partition(".")[2] in FILES and isinstance(value, str):
        return str(Path(value).resolve())
    return custom_code.relocated(value, Path())


def parse(values: Mapping[str, Any], source: str, base: Path = Path()) -> Config:
    """Return the configuration of `values`, whose files of custom code and of a base model are relative to `base`."""
    training = values.get("training")
    name = training.get("kind", "federated") if isinstance(training, Mapping) else "federated"
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(f"{source}: training.kind must be 'federated' or 'central', found {name!r}")
    system = values.get("system")
    if name == "central" and isinstance(system, Mapping) and system.get("workers") == 1:  # of older runs
        values = {**values, "system": {key: value for key, value in system.items() if key != "workers"}}
    _refuse_unknown(name, values, source)
    values = custom_code.renamed(kind, values, lambda name: custom_code.located(name, base))
    model = values.get("model")
    if isinstance(model, Mapping):
        files = {name: model[name] for name in FILES if isinstance(model.get(name), str)}
        values["model"] = {**model, **{name: str((base / file).resolve()) for name, file in files.items()}}
    return toml.validate(kind, values, source)


def dump(config: Config, path: Path) -> None:
    """Write all settings, including defaults, as TOML for `load`."""
    settings = custom_code.renamed(type(config), asdict(config), lambda name: custom_code.relative(name, path.parent))
    values = {
        name: {key: value for key, value in section.items() if value not in (None, {})}
        if isinstance(section, dict)
        else section
        for name, section in settings.items()
    }
    values["data"]["corpus"] = str(config.data.corpus)
    if config.model.tokens is not None:  # a copy in the run folder, which can be moved
        values["model"]["tokens"] = custom_code.below(config.model.tokens, path.parent)
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _refuse_unknown(name: str, values: Mapping[str, Any], source: str) -> None:
    """Raise InputError for an unknown key, with the closest known key, and for keys of the other kind of training."""
    other = next(kind for kind in KINDS if kind != name)
    unknown = dict(toml.unknown_keys(KINDS[name], values))
    unknown_there = tuple(f"{key}." for key, _ in toml.unknown_keys(KINDS[other], values))
    meant = {key: list(toml.places_of(KINDS[name], key.rpartition(".")[2])) for key in unknown}
    meant |= {key: [OTHERWISE[name, key]] for key in unknown if (name, key) in OTHERWISE}
    for key, close in unknown.items():
        if f"{key}.".startswith(unknown_there):
            hint = f"did you mean {' or '.join(meant[key])}?" if meant[key] else close
            raise InputError(f"{source}: unknown key {key}; {hint}")
    if unknown:
        elsewhere = [place for places in meant.values() for place in places]
        hint = f", or did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        raise InputError(
            f'{source}: {", ".join(unknown)}: of {other} training, but training.kind is "{name}"; remove these '
            f"settings{hint}"
        )


# The list of all settings, from the dataclasses of a configuration and their docstrings.
#
# The `Attributes` section of a docstring describes each field; ``Unit: X.`` at its end is the unit of a number.

FORM = "path/to/file.py:NAME"
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "text"}


@dataclass(frozen=True)
class ListedSetting:
    name: str
    type: str
    default: str
    unit: str
    description: str


@dataclass(frozen=True)
class ListedSection:
    """One section of a configuration file, for one kind of training if the kinds differ."""

    name: str
    kind: str
    description: str
    settings: tuple[ListedSetting, ...]

    @property
    def title(self) -> str:
        kind = f" of {self.kind} training" if self.kind in KINDS else f": {self.kind}" if self.kind else ""
        return (f"[{self.name}]" if self.name else "Outside of sections") + kind

    def key(self, setting: ListedSetting) -> str:
        """Return the key of a setting, e.g. "training.rounds"."""
        return f"{self.name}.{setting.name}".lstrip(".")


def sections() -> list[ListedSection]:
    """Return all sections, keys outside of sections first; keys of all kinds of training make one section."""
    listed: dict[str, list[ListedSection]] = {"": []}
    for kind, config in KINDS.items():
        hints, descriptions = get_type_hints(config, include_extras=True), _descriptions(config)
        for item in fields(config):
            name, hint = item.name, hints[item.name]
            has_keys = is_dataclass(hint)
            settings = _settings(hint) if has_keys else (_setting(item, hint, descriptions[name]),)
            section = ListedSection(name if has_keys else "", kind, descriptions[name] if has_keys else "", settings)
            listed.setdefault(section.name, []).append(section)
            for inner, of_inner in _inner_sections(hint) if has_keys else ():
                part = ListedSection(f"{name}.{inner}", kind, _descriptions(hint)[inner], _settings(of_inner))
                listed.setdefault(part.name, []).append(part)
    merged = [part for of_kinds in listed.values() for part in _merged(of_kinds)]
    after_model = 1 + [section.name for section in merged].index("model")
    return [*merged[:after_model], _architectures(), *merged[after_model:]]


def _inner_sections(section: type) -> list[tuple[str, type]]:
    """Return the settings of a section that are sections themselves, with their dataclasses."""
    hints = get_type_hints(section)
    of_hints = {name: [kind for kind in get_args(hint) if is_dataclass(kind)] for name, hint in hints.items()}
    return [(name, kinds[0]) for name, kinds in of_hints.items() if kinds]  # type: ignore[misc]


def _merged(of_kinds: Sequence[ListedSection]) -> list[ListedSection]:
    """Return the keys that all kinds share, then those of each kind; sections without keys are omitted."""
    first = of_kinds[0]
    is_shared = len(of_kinds) == len(KINDS)
    common = [key for key in first.settings if is_shared and all(key in section.settings for section in of_kinds)]
    shared = replace(first, kind="", settings=tuple(common))
    specific = [
        replace(section, settings=tuple(key for key in section.settings if key not in common)) for section in of_kinds
    ]
    return [section for section in (shared, *specific) if section.settings]


def _architectures() -> ListedSection:
    """Return the built-in networks, the values of `model.architecture`, each with the first paragraph about it."""
    paragraphs = {name: inspect.cleandoc(network.__doc__ or "").split("\n\n")[0] for name, network in BUILT_IN.items()}
    described = {name: " ".join(text.split()).replace("`", "") for name, text in paragraphs.items()}
    listed = tuple(ListedSetting(name, "architecture", "", "", text) for name, text in described.items())
    return ListedSection("model", "architectures", "Built-in networks.", listed)


def _settings(section: type) -> tuple[ListedSetting, ...]:
    hints, descriptions = get_type_hints(section, include_extras=True), _descriptions(section)
    inner = dict(_inner_sections(section))
    listed = [item for item in fields(section) if item.name not in inner]
    return tuple(_setting(item, hints[item.name], descriptions[item.name]) for item in listed)


def _setting(item: "Field[Any]", hint: Any, description: str) -> ListedSetting:
    sentences, _, unit = description.partition(" Unit: ")
    type_, choices = _type(hint)
    unit = unit.removesuffix(".").removeprefix("none")
    return ListedSetting(item.name, type_, _default(item), unit, f"{sentences} {choices}".strip())


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
