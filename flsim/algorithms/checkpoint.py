"""A state of training on disk: one safetensors file, written then renamed; loading it executes no code.

Tensors      the parameters under their names; the optimizer's moments as "m/embedding", "v/embedding", ...
Metadata     round, values (JSON, such as the clip), ledger (JSON), digest of all that, and the fields of `Provenance`
             and of its model, where a user's own is named by the digest of its source. Older checkpoints have the clip
             ("" without one), or, of central training, the step by their own names; what a model's settings lack is at
             its default; the oldest have no digest
"""

import errno
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flsim.base.errors import InputError
from flsim.base.extensions import by_content, is_own
from flsim.base.files import from_json, new_file
from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params, TrainableModel
from flsim.privacy.ledger import Ledger
from flsim.training.state import State

SUFFIX = ".safetensors"
NAME = re.compile(r"round-(\d{6,18})\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Provenance:
    """What a checkpoint belongs to.

    Attributes:
        config: digest of the configuration.
        corpus: digest of the corpus.
        vocabulary_size: V.
        model: the network's settings.
        frozen: digest of what training leaves alone in a user's own network; empty where there is nothing.
    """

    config: str
    corpus: str
    vocabulary_size: int
    model: ModelHParams
    frozen: str = ""

    @property
    def by_content(self) -> "Provenance":
        """Return it with a user's own network named by its content, which is the same wherever the file lies."""
        return replace(self, model=replace(self.model, architecture=by_content(self.model.architecture)))

    @property
    def sizes(self) -> str:
        """Of the network, in words."""
        model = self.model
        kind = f"{model.architecture}, layers {model.layers}, " if model.label else ""
        heads = f", heads {model.heads}" if model.architecture == "transformer" else ""
        sizes = f"vocabulary_size {self.vocabulary_size:,}, embedding {model.embedding:,}, units {model.units:,}"
        options = "".join(f", {name} {value:g}" for name, value in model.options.items())
        return kind + sizes + heads + options + (f", frozen {self.frozen[:12]}" if self.frozen else "")


def checkpoint_name(round_: int) -> str:
    return f"round-{round_:06d}{SUFFIX}"


def round_of(path: Path) -> int:
    """The round that a checkpoint's name says. Raises InputError where it says none."""
    round_ = _round_named(path)
    if round_ is None:
        raise InputError(f"{path}: is not named as a checkpoint is, such as {checkpoint_name(10)}; rename it")
    return round_


def _round_named(path: Path) -> int | None:
    named = NAME.fullmatch(path.name)
    is_ours = named and path.name == checkpoint_name(int(named[1]))
    return int(named[1]) if named and is_ours else None


def save(folder: Path, state: State, provenance: Provenance) -> Path:
    """Write a state as ``folder/round-000010.safetensors``; it is whole or absent. Returns the path."""
    path = folder / checkpoint_name(state.round)
    about = asdict(provenance.by_content)
    about |= about.pop("model")
    about["options"] = json.dumps(about["options"]) if about["options"] else ""
    metadata = {name: str(value) for name, value in about.items() if name not in ("options", "frozen") or value}
    values = json.dumps(dict(state.values))  # a float that is written so reads back bit for bit
    metadata |= {"round": str(state.round), "values": values}
    metadata |= {"ledger": state.ledger.to_json(), "digest": digest_of(state)}
    with new_file(path) as partial:
        try:
            partial.touch()  # as any other file of the run, while safetensors makes one that only its owner can read
            mode = partial.stat().st_mode
            save_file(_tensors(state), partial, metadata)
            partial.chmod(mode)
        except SafetensorError as error:  # of a disk that is full, too
            raise OSError(errno.EIO, f"the checkpoint cannot be written ({_first_line(error)})", str(path)) from error
    return path


def digest_of(state: State) -> str:
    """sha256, in hexadecimal, of everything in a state: two states that train on to the same bits have the same."""
    about = (state.round, state.clip, state.ledger.to_json())  # as before there were other values
    whole = hashlib.sha256(repr(about).encode())
    for name in sorted(state.values.keys() - {"clip"}):
        whole.update(f"{name} {state.values[name]!r} ".encode())
    for name, value in sorted(_tensors(state).items()):
        array = value.detach().cpu().numpy()
        whole.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        whole.update(array.data if array.ndim else array.tobytes())
    return whole.hexdigest()


def _tensors(state: State) -> Params:
    moments = {f"{moment}/{name}": value for moment, of in state.moments.items() for name, value in of.items()}
    return {name: value.contiguous() for name, value in (state.params | moments).items()}


def load(path: Path) -> tuple[State, Provenance]:
    """Read a state.

    Raises:
        InputError: there is no such file, it is not a whole checkpoint of ours, or its name is that of another round.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        provenance = Provenance(
            metadata["config"],
            metadata["corpus"],
            int(metadata["vocabulary_size"]),
            _model_named_in(metadata),
            metadata.get("frozen", ""),
        )
        params = _tensors_under("", tensors)
        moments = {name: _tensors_under(name, tensors) for name in sorted({_prefix(key) for key in tensors} - {""})}
        state = _state_of(metadata, params, moments)
        expected = _shapes(provenance, params)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise InputError(f"{path}: not a checkpoint of flsim, or damaged ({_first_line(error)})") from error
    counts = dict.fromkeys(expected, ())  # torch's Adam and RMSProp count their steps once for each parameter
    for slot, of in {"": params, **moments}.items():
        shapes = {name: value.shape for name, value in of.items()}
        if shapes != (counts if slot == "step" else expected):
            raise InputError(f"{path}: its tensors are not those of the model that it names; it is damaged")
    if "digest" in metadata and metadata["digest"] != digest_of(state):
        raise InputError(f"{path}: its digest is not the one that it was written with; it is damaged")
    if _round_named(path) not in (None, state.round):
        raise InputError(f"{path}: holds round {state.round}, which is not the one in its name; rename it")
    return state, provenance


def _shapes(provenance: Provenance, params: Params) -> dict[str, torch.Size]:
    """Return the shapes of a checkpoint's model, without its memory. Raises ValueError where these cannot be its own.

    A user's own is not executed here; its digest says that its tensors are whole.
    """
    if is_own(provenance.model.architecture):
        return {name: value.shape for name, value in params.items()}
    model, most = provenance.model, sum(value.numel() for value in params.values())
    sizes = (provenance.vocabulary_size, model.embedding, model.units)
    if not all(0 < size <= most for size in sizes) or model.layers > len(params):
        raise ValueError("its tensors are not those of the model that it names")
    with torch.device("meta"):
        return {name: value.shape for name, value in model_of(provenance).trainable.items()}


def _model_named_in(metadata: dict[str, str]) -> ModelHParams:
    sizes = {name: int(metadata[name]) for name in ("layers", "heads") if name in metadata}
    embedding, units, architecture = metadata["embedding"], metadata["units"], metadata.get("architecture", "cifg")
    options = from_json(metadata.get("options", "{}"))
    return ModelHParams(int(embedding), int(units), architecture, **sizes, options=options)


def _state_of(metadata: dict[str, str], params: Params, moments: dict[str, Params]) -> State:
    ledger = Ledger.from_json(metadata["ledger"])
    round_ = int(metadata["step"] if "step" in metadata else metadata["round"])
    if not 0 <= round_ < 2**63:
        raise ValueError("its round cannot be")
    if "values" in metadata:
        values = from_json(metadata["values"])
    else:
        values = {"clip": float(metadata["clip"])} if metadata.get("clip") else {}
    if not isinstance(values, dict) or not all(type(value) in (int, float) for value in values.values()):
        raise ValueError("its values are no numbers by name")
    if not all(math.isfinite(value) for value in values.values()) or values.get("clip", 1.0) <= 0:
        raise ValueError(f"its values are {values}")
    return State(round_, params, moments, values, ledger)


def _prefix(name: str) -> str:
    return name.rpartition("/")[0]


def _tensors_under(prefix: str, tensors: Params) -> Params:
    return {name.rpartition("/")[2]: value for name, value in tensors.items() if _prefix(name) == prefix}


def model_of(provenance: Provenance) -> TrainableModel:
    """A model of a run's settings, not initialized: ours are all zeros."""
    return build(provenance.vocabulary_size, provenance.model)


def all_in(folder: Path) -> list[Path]:
    """All checkpoints, by their rounds; files of other names are none."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if _round_named(path) is not None), key=round_of)


def strangers_in(folder: Path) -> list[Path]:
    """Files that look like checkpoints and are named otherwise, such as copies; nothing reads them."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if _round_named(path) is None and path.name[0] != ".")


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most rounds, if there is any."""
    return max(all_in(folder), default=None, key=round_of)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
