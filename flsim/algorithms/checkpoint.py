"""A state of training on disk: one safetensors file, written, then renamed; loading the file executes no code.

Tensors      the parameters under their names; the optimizer's moments as "m/embedding", "v/embedding", ...
Metadata     round, values (JSON, such as the clip), ledger (JSON), the digest of the state, the fields of `Provenance`
             and of its model, and the seal, which is the digest of all other metadata.

Older checkpoints have the clip ("" without one), or for central training the step, under their own names, defaults for
missing settings of a model, and no seal; the oldest have no digest.
"""

import errno
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flsim.base.errors import InputError, first_line
from flsim.base.extensions import by_content, is_custom
from flsim.base.files import digest, from_json, new_file
from flsim.models.architectures import ModelHParams, build
from flsim.models.hf import OF_BASE, RECORDED
from flsim.models.language_model import SIZES_OF_ONE, LoraHParams, Params, TrainableModel
from flsim.privacy.ledger import Ledger
from flsim.training.update import State, by_slot, flat

SUFFIX = ".safetensors"
DAMAGED = "{}: the file is damaged, because {}; restore the file, or use another checkpoint"
NAME = re.compile(r"round-(\d{6,18})\.safetensors", re.ASCII)


class ForeignCheckpointError(InputError):
    """The error about an undamaged checkpoint that belongs to another model, corpus or configuration."""


@dataclass(frozen=True)
class Provenance:
    """The run, corpus, model and frozen values that a checkpoint belongs to, by digests; `frozen` may be empty."""

    config: str
    corpus: str
    vocabulary_size: int
    model: ModelHParams
    frozen: str = ""

    @property
    def by_content(self) -> "Provenance":
        """Return the provenance with files of its network named by content, independent of the place of the files."""
        return replace(self, model=by_content_of(self.model))

    @property
    def sizes(self) -> str:
        model = self.model
        if model.architecture == "hf":
            return f"{model.label}, vocabulary_size {self.vocabulary_size:,}, frozen {self.frozen[:12] or 'nothing'}"
        kind = f"{model.architecture}, layers {model.layers}, " if model.label else ""
        further = [name for name, architecture in SIZES_OF_ONE.items() if architecture == model.architecture]
        sizes = f"vocabulary_size {self.vocabulary_size:,}, embedding {model.embedding:,}, units {model.units:,}"
        numbers = {name: getattr(model, name) for name in further} | dict(model.options)
        options = "".join(
            f", {name} {value}" if isinstance(value, str) else f", {name} {value:g}" for name, value in numbers.items()
        )
        return kind + sizes + options + (f", frozen {self.frozen[:12]}" if self.frozen else "")


def by_content_of(model: ModelHParams) -> ModelHParams:
    """Return the settings of a network without the places of its files; `digest` identifies a base model's contents."""
    model = replace(model, architecture=by_content(model.architecture), tokens=None)
    return model if model.path is None else replace(model, path="")


def checkpoint_name(round_: int) -> str:
    return f"round-{round_:06d}{SUFFIX}"


def round_of(path: Path) -> int:
    """Return the round in a checkpoint's name; raise InputError if the name has none."""
    round_ = _round_named(path)
    if round_ is None:
        raise InputError(f"{path}: this is not the name of a checkpoint, such as {checkpoint_name(10)}; rename it")
    return round_


def _round_named(path: Path) -> int | None:
    named = NAME.fullmatch(path.name)
    return int(named[1]) if named and path.name == checkpoint_name(int(named[1])) else None


def save(folder: Path, state: State, provenance: Provenance) -> Path:
    """Write a state as ``folder/round-000010.safetensors``, atomically, and return the path."""
    path = folder / checkpoint_name(state.round)
    description = asdict(provenance.by_content)
    model = description.pop("model")
    of_base = {name: model.pop(name) for name in (*OF_BASE, *RECORDED)}
    description |= model
    description["options"] = json.dumps(description["options"]) if description["options"] else ""
    description["base"] = json.dumps(of_base) if description["architecture"] == "hf" else ""
    metadata = {
        name: str(value) for name, value in description.items() if name not in ("options", "frozen", "base") or value
    }
    values = json.dumps(dict(state.values))  # JSON keeps every bit of a float
    metadata |= {"round": str(state.round), "values": values}
    metadata |= {"ledger": state.ledger.to_json(), "digest": digest_of(state)}
    metadata["seal"] = _seal_of(metadata)
    with new_file(path) as partial:
        try:
            save_file(_tensors(state), partial, metadata)
        except SafetensorError as error:  # for example on a full disk
            raise OSError(errno.EIO, f"the checkpoint cannot be written ({first_line(error)})", str(path)) from error
    return path


def _seal_of(metadata: dict[str, str]) -> str:
    """Return the digest of all metadata except the seal, names included, in the order of the names."""
    return digest(*(part for name in sorted(metadata.keys() - {"seal"}) for part in (name, metadata[name])))


def digest_of(state: State) -> str:
    """Return the sha256, in hexadecimal, of everything in a state: equal digests train to equal bits."""
    fields = (state.round, state.clip, state.ledger.to_json())  # this form keeps older digests valid
    whole = hashlib.sha256(repr(fields).encode())
    for name in sorted(state.values.keys() - {"clip"}):
        whole.update(f"{name} {state.values[name]!r} ".encode())
    for name, value in sorted(_tensors(state).items()):
        array = value.detach().cpu().numpy()
        whole.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        whole.update(array.data if array.ndim else array.tobytes())
    return whole.hexdigest()


def _tensors(state: State) -> Params:
    return {name: value.contiguous() for name, value in (state.params | flat(state.moments)).items()}


def load(path: Path) -> tuple[State, Provenance]:
    """Read a state and the provenance of its checkpoint, or raise InputError if the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if "seal" in metadata and metadata["seal"] != _seal_of(metadata):
            raise ValueError("its metadata do not match its seal")
        size, frozen = int(metadata["vocabulary_size"]), metadata.get("frozen", "")
        provenance = Provenance(metadata["config"], metadata["corpus"], size, _model_named_in(metadata), frozen)
        moments = dict(sorted(by_slot(tensors).items()))
        params = moments.pop("", {})
        state = _state_of(metadata, params, moments)
        expected, actual = _shapes(provenance, params), digest_of(state)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise InputError(f"{path}: not a checkpoint of flsim, or damaged ({first_line(error)})") from error
    counts = dict.fromkeys(expected, ())  # torch's Adam and RMSProp count their steps once for each parameter
    for slot, values in {"": params, **moments}.items():
        shapes = {name: value.shape for name, value in values.items()}
        if shapes != (counts if slot == "step" else expected):
            raise InputError(DAMAGED.format(path, "its tensors do not fit the model that it names"))
    if "digest" in metadata and metadata["digest"] != actual:
        raise InputError(DAMAGED.format(path, "its digest differs from the stored digest"))
    if _round_named(path) not in (None, state.round):
        raise InputError(f"{path}: the file has round {state.round}, but its name has another round; rename it")
    return state, provenance


def _shapes(provenance: Provenance, params: Params) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's model, without memory; raise ValueError if tensors do not fit.

    A custom model is not executed here, and a base model is not read; the digest shows whether tensors are undamaged.
    """
    if is_custom(provenance.model.architecture) or provenance.model.architecture == "hf":
        return {name: value.shape for name, value in params.items()}
    model, most = provenance.model, sum(value.numel() for value in params.values())
    sizes = (provenance.vocabulary_size, model.embedding, model.units)
    if not all(0 < size <= most for size in sizes) or model.layers > len(params):
        raise ValueError("its tensors do not fit the model that it names")
    with torch.device("meta"):
        return {name: value.shape for name, value in model_of(provenance).trainable.items()}


def _model_named_in(metadata: dict[str, str]) -> ModelHParams:
    sizes: dict[str, Any] = {name: int(metadata[name]) for name in ("layers", *SIZES_OF_ONE) if name in metadata}
    embedding, units, architecture = metadata["embedding"], metadata["units"], metadata.get("architecture", "cifg")
    options = from_json(metadata.get("options", "{}"))
    base = from_json(metadata.get("base", "{}"))
    if lora := base.get("lora"):
        base["lora"] = LoraHParams(**lora)
    return ModelHParams(int(embedding), int(units), architecture, **sizes, options=options, **base)


def _state_of(metadata: dict[str, str], params: Params, moments: dict[str, Params]) -> State:
    ledger = Ledger.from_json(metadata["ledger"])
    round_ = int(metadata["step"] if "step" in metadata else metadata["round"])
    if not 0 <= round_ < 2**63:
        raise ValueError(f"its round {round_} is out of range")
    if "values" in metadata:
        values = from_json(metadata["values"])
    else:
        values = {"clip": float(metadata["clip"])} if metadata.get("clip") else {}
    if not isinstance(values, dict) or not all(type(value) in (int, float) for value in values.values()):
        raise ValueError("its values are not numbers by name")
    if not all(math.isfinite(value) for value in values.values()) or values.get("clip", 1.0) <= 0:
        raise ValueError(f"its values are {values}")
    return State(round_, params, moments, values, ledger)


def model_of(provenance: Provenance) -> TrainableModel:
    """Return a model of a run's settings before `initialize`; built-in models are all zeros."""
    return build(provenance.vocabulary_size, provenance.model)


def all_in(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, by round, without files that have other names."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if _round_named(path) is not None), key=round_of)


def strangers_in(folder: Path) -> list[Path]:
    """Return files that resemble checkpoints but have other names, such as copies; flsim does not read them."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if _round_named(path) is None and path.name[0] != ".")


def latest(folder: Path) -> Path | None:
    """Return the checkpoint of the last round in a folder; None without checkpoints."""
    return max(all_in(folder), default=None, key=round_of)
