"""A server state on disk: one safetensors file, written then renamed; loading it executes no code."""

from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flsim.errors import InputError
from flsim.federated import ServerState
from flsim.files import new_file
from flsim.model.cifg import CIFGLanguageModel, ModelHParams

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Provenance:
    """What a checkpoint belongs to.

    Attributes:
        run: the run's name.
        config: digest of the configuration.
        corpus: digest of the corpus.
        vocabulary_size, embedding, units: sizes of the model.
    """

    run: str
    config: str
    corpus: str
    vocabulary_size: int
    embedding: int
    units: int


def checkpoint_name(round_: int) -> str:
    return f"round-{round_:06d}{SUFFIX}"


def round_of(path: Path) -> int:
    """The round that a checkpoint's name says."""
    return int(path.stem.removeprefix("round-"))


def save(folder: Path, state: ServerState, provenance: Provenance) -> Path:
    """Write a state as ``folder/round-000010.safetensors``; it is whole or absent. Returns the path."""
    path = folder / checkpoint_name(state.round)
    metadata = {name: str(value) for name, value in asdict(provenance).items()}
    with new_file(path) as partial:
        save_file(
            {name: value.contiguous() for name, value in state.params.items()},
            partial,
            {**metadata, "round": str(state.round)},
        )
    return path


def load(path: Path) -> tuple[ServerState, Provenance]:
    """Read a state.

    Raises:
        InputError: there is no such file, or it is not a whole checkpoint of ours.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            params = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        provenance = Provenance(
            metadata["run"],
            metadata["config"],
            metadata["corpus"],
            *(int(metadata[name]) for name in ("vocabulary_size", "embedding", "units")),
        )
        state = ServerState(int(metadata["round"]), params)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path}: not a checkpoint of flsim, or damaged ({_first_line(error)})") from error
    expected = {name: value.shape for name, value in model_of(provenance).named_parameters()}
    if expected != {name: value.shape for name, value in params.items()}:
        raise InputError(f"{path}: its tensors are not those of the model that it names; it is damaged")
    return state, provenance


def model_of(provenance: Provenance) -> CIFGLanguageModel:
    """A model of the checkpoint's sizes, all zeros."""
    return CIFGLanguageModel(provenance.vocabulary_size, ModelHParams(provenance.embedding, provenance.units))


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most rounds, if there is any."""
    return max(folder.glob(f"round-*{SUFFIX}"), default=None)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
