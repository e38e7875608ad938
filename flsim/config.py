"""A run's configuration: TOML in, the components' own settings out. An unknown key is an error, never ignored."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from flsim.canaries.population import World
from flsim.canaries.spec import CanaryHParams
from flsim.errors import InputError, at_least_one
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.federated import FedAvgHParams
from flsim.files import digest
from flsim.model.cifg import ModelHParams
from flsim.privacy.mechanism import PrivacyHParams
from flsim.train.local import LocalHParams


@dataclass(frozen=True)
class DataHParams:
    """Which users are trained on.

    Attributes:
        corpus: folder made by `flsim data import` or `flsim data synthetic`; relative to the configuration file.
        world: "non-iid" for the corpus' own users, "iid" for their shuffled twin.
    """

    corpus: Path
    world: World = "non-iid"


@dataclass(frozen=True)
class TrainingHParams(FedAvgHParams):
    """`FedAvgHParams`, and the kind of training.

    Attributes:
        kind: "federated".
    """

    kind: Literal["federated"] = "federated"


@dataclass(frozen=True)
class ScheduledEvaluationHParams(EvaluationHParams):
    """`EvaluationHParams`, and when.

    Attributes:
        every: rounds between two evaluations; the last round is always evaluated.
    """

    every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(every=self.every)


@dataclass(frozen=True)
class SystemHParams:
    """How the run uses the machines. Changes nothing in its results but float rounding.

    Attributes:
        shards: Flower nodes; each holds a contiguous range of users and replies once a round.
        cpus_per_client: CPU cores, and torch threads, of a client process.
        gpus_per_client: GPUs of a client process, e.g. 0.4 for two on one GPU beside the evaluator; 0 trains on CPUs.
            By default one client per GPU where the cluster has any.
        gpus_for_evaluation: GPUs of the evaluator, to be left over by the clients; 0 evaluates on a CPU. By default a
            small share where the cluster has GPUs.
        checkpoint_every: rounds between two checkpoints; only the newest and the evaluated ones are kept.
        deadline: seconds that a round may take before missing replies are asked for again.
        retries: times that a shard is asked again after an error or the deadline, before the run fails; with a pause
            of 1, 2, 4, ... seconds before each, in which a client process that died comes back.
    """

    shards: int = 2
    cpus_per_client: int = 1
    gpus_per_client: float | None = None
    gpus_for_evaluation: float | None = None
    checkpoint_every: int = 10
    deadline: float = 3600.0
    retries: int = 3

    def __post_init__(self) -> None:
        at_least_one(shards=self.shards, cpus_per_client=self.cpus_per_client, checkpoint_every=self.checkpoint_every)
        for name in ("gpus_per_client", "gpus_for_evaluation", "retries"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InputError(f"{name} must not be negative, found {value}")
        if not self.deadline > 0:
            raise InputError(f"deadline must be above 0 seconds, found {self.deadline}")


@dataclass(frozen=True)
class Config:
    """A run. Each section is documented by the settings it holds."""

    data: DataHParams
    seed: int = 0
    canaries: CanaryHParams = field(default_factory=CanaryHParams)
    model: ModelHParams = field(default_factory=ModelHParams)
    training: TrainingHParams = field(default_factory=TrainingHParams)
    local: LocalHParams = field(default_factory=LocalHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    evaluation: ScheduledEvaluationHParams = field(default_factory=ScheduledEvaluationHParams)
    system: SystemHParams = field(default_factory=SystemHParams)

    def __post_init__(self) -> None:
        if self.evaluation.prefix >= self.canaries.length:
            raise InputError(
                f"evaluation.prefix must be below canaries.length ({self.canaries.length}), "
                f"found {self.evaluation.prefix}"
            )
        self.privacy.update_noise_multiplier(self.training.cohort)  # raises where there is none

    @property
    def digest(self) -> str:
        """Stands for all settings that change results: not the system's, not how long, not where the corpus lies."""
        values = asdict(self)
        del values["system"], values["data"]["corpus"], values["training"]["rounds"], values["evaluation"]["every"]
        return digest(json.dumps(values, sort_keys=True))

    @property
    def setting(self) -> str:
        """The row's name in a table, as in the paper's."""
        world = {"iid": "IID", "non-iid": "Non-IID"}[self.data.world]
        training, privacy = self.training, self.privacy
        algorithm = {"none": "FedAvg", "clip": "FedAvg+Clip", "dp": "DP-FedAvg"}[privacy.mechanism]
        if training.server_optimizer != "sgd":
            algorithm += f"+{training.server_optimizer.capitalize()}"
        parts = [world, algorithm]
        if privacy.target_quantile is not None:
            parts.append(f"S=q{100 * privacy.target_quantile:g}%")
        elif privacy.clip is not None:
            parts.append(f"S={privacy.clip:g}")
        if privacy.noise_multiplier:
            parts.append(f"z={privacy.noise_multiplier:g}")
        parts.append(f"b_u={training.cohort}")
        if training.sampler == "poisson":
            parts.append("Poisson")
        return ", ".join(parts)


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file.

    Args:
        path: the file.
        overrides: ``section.key=value`` texts, values as in TOML (a bare word is a string).

    Raises:
        InputError: no such file, not TOML, an unknown key (the closest known one is named), or a value not allowed.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _set(values, override)
    config = parse(values, str(path))
    return replace(config, data=replace(config.data, corpus=(path.parent / config.data.corpus).resolve()))


def parse(values: Mapping[str, Any], source: str) -> Config:
    """Validate settings that were read from `source`."""
    _refuse_unknown(Config, values, source, "")
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        found = "" if "found" in what or first["type"] == "missing" else f", found {first['input']!r}"
        raise InputError(": ".join(filter(None, (source, where, what + found)))) from error


def dump(config: Config, path: Path) -> None:
    """Write all settings, defaults included, as TOML that `load` reads back."""
    values = {
        name: {key: value for key, value in section.items() if value is not None}
        if isinstance(section, dict)
        else section
        for name, section in asdict(config).items()
    }
    values["data"]["corpus"] = str(config.data.corpus)
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _set(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not all([*sections, name]):
        raise InputError(f"--set {override}: write it as section.key=value, e.g. training.rounds=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {override}: {section} is a value, not a section")
    values[name] = value


def _refuse_unknown(kind: type, values: Any, source: str, prefix: str) -> None:
    if not isinstance(values, Mapping):
        return  # a wrong type is the validator's to explain
    known = {item.name for item in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise InputError(f"{source}: unknown key {prefix}{key}; did you mean {prefix}{close}?")
        if is_dataclass(hints[key]):
            _refuse_unknown(hints[key], value, source, f"{prefix}{key}.")
