"""Reading a configuration from a TOML file, and writing it; an unknown key is an error."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w

from flsim.base.errors import InputError
from flsim.data.stores import located
from flsim.models.hf import FILES
from flsim.runs.config import custom_code, toml
from flsim.runs.config.base import Config
from flsim.runs.config.central import CentralConfig
from flsim.runs.config.federated import FederatedConfig

KINDS: dict[str, type[Config]] = {"federated": FederatedConfig, "central": CentralConfig}

# Settings with another name in another kind of training: (kind, key of the other kind) -> key of this kind.
OTHERWISE = {("federated", "system.device"): "system.gpus_per_client"}


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file; paths in `overrides`, ``section.key=value``, are relative to the working directory.

    Values are as in TOML, and a bare word is a string. Paths in the file are relative to its folder. Raises InputError
    if the file is missing, not TOML, or a sweep; a key is unknown (the message names the closest key); or a value is
    not allowed.
    """
    values = toml.read(path, overrides, from_working_directory)
    if "grids" in values:
        raise InputError(f"{path}: this file is a sweep, not the configuration of a run; train it with `flsim sweep`")
    config = parse(values, str(path), path.parent)
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
            raise InputError(f"{source}: unknown key {key}; did you mean {' or '.join(meant[key]) or close}?")
    if unknown:
        elsewhere = [place for places in meant.values() for place in places]
        hint = f", or did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        raise InputError(
            f'{source}: {", ".join(unknown)}: of {other} training, but training.kind is "{name}"; remove these '
            f"settings{hint}"
        )
