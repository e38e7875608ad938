"""Loading of a model that was trained elsewhere: the code that makes it, its weights, and a folder of checkpoints."""

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flsim.base.errors import InputError, Terminated, in_one_line
from flsim.base.extensions import add_own_file, execute, place
from flsim.base.files import file_digest, from_json
from flsim.models.architectures import ModelHParams
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import digest_of
from flsim.runs.evaluate import ForwardModel, from_forward

Made = TypeVar("Made")
Weights = dict[str, Tensor]
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npz")
IN_FOLDER = ("model.safetensors", "pytorch_model.bin", "model.pt")  # of a folder that is one checkpoint
NESTED = ("state_dict", "model_state_dict", "model")  # keys of weights in files with further content
ADAPTER = "adapter_config.json"
WRAPPED = ("module.", "_orig_mod.")  # before names, by DistributedDataParallel and torch.compile
POINT = re.compile(r"(?:round|epoch|step|iter|checkpoint)[a-z]*[-_ ]?(\d+)", re.IGNORECASE)


def load_other(
    spec: str, arguments: Mapping[str, Any], weights: Path | None = None, context: int | None = None, option: str = ""
) -> Any:
    """Return a model that a factory makes, with weights from a file; see `flsim.runs.evaluate.audit`.

    Without weights, the factory loads them. `context` is the number of tokens that a module without `start` and `step`
    reads; see `from_forward`. `option` begins messages about the factory. Raises InputError if the factory failed, or
    the weights are not those of the module.
    """
    model = model_of_factory(spec, option, arguments)
    if weights is not None:
        module = model.module if isinstance(model, ForwardModel) else model
        if not isinstance(module, nn.Module):
            raise InputError(f"{option}{spec}: made a {type(module).__name__}; --state needs a torch.nn.Module")
        values = read_weights(weights, list(module.state_dict()))
        try:
            module.load_state_dict(values)
        except RuntimeError as error:
            raise InputError(
                f"{weights}: not the weights of {spec} ({in_one_line(error):.300}); name the weights of this model, or "
                "correct the model"
            ) from error
    is_bare = isinstance(model, nn.Module) and not callable(getattr(model, "start", None))
    return from_forward(model, context) if context is not None and is_bare else model


def is_folder_of_model(path: Path) -> bool:
    """Return whether a folder contains a model of transformers or an adapter of peft."""
    return (path / "config.json").is_file() or (path / ADAPTER).is_file()


def load_folder(path: Path, vocabulary_size: int, tokens: Path | None) -> HuggingFaceModel:
    """Return the model of a folder of transformers; for a folder of peft, the base with the adapter merged into it.

    No code or pickle is executed, and nothing is downloaded. Raises InputError if a package or a file is missing or
    unfit.
    """
    base, adapter = path, path / ADAPTER
    if adapter.is_file():
        if not (path / "adapter_model.safetensors").is_file():
            raise InputError(f"{path}: has no adapter_model.safetensors; save the adapter with safe_serialization")
        named = from_json(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        base = path / str(named)  # an absolute path stays as it is
        if not base.is_dir():
            raise InputError(f"{adapter}: the base {named} is not a folder; write the folder of the base there")
    hparams = ModelHParams(architecture="hf", path=str(base), tokens=None if tokens is None else str(tokens))
    model = HuggingFaceModel(vocabulary_size, hparams).initialize(0)
    if adapter.is_file():
        from peft import PeftModel

        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # peft would leave them as they are drawn
            try:
                merged = PeftModel.from_pretrained(model.network, str(path)).merge_and_unload()
                model.network = merged.requires_grad_()
            except (ValueError, RuntimeError, TypeError, KeyError, UserWarning) as error:
                raise InputError(f"{path}: peft refuses the adapter ({in_one_line(error):.200})") from error
    return model


def read_weights(path: Path, names: list[str]) -> Weights:
    """Return the state dict in a file, without executing code in the file.

    The state dict can be the value of a key of `NESTED`. Prefixes that DistributedDataParallel or torch.compile add to
    names are removed. An .npz file of a Flower server has the arrays without names, in the order of the module.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = list(arrays) if set(arrays) == set(names) else names
                if len(arrays) != len(names):
                    raise ValueError(f"it has {len(arrays)} arrays, and the module has {len(names)}")
                values: Any = {
                    name: torch.from_numpy(arrays[key]) for name, key in zip(found, arrays.files, strict=True)
                }
        elif path.suffix == ".safetensors":
            values = load_file(path)
        else:
            values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickles, any
        # The text of torch recommends to execute the file.
        refused = type(error).__name__ == "UnpicklingError"
        why = "a pickle of other objects than tensors" if refused else in_one_line(error)
        raise InputError(f"{path}: weights cannot be read ({why:.100}); save model.state_dict() again") from error
    for name in NESTED:
        if isinstance(values, Mapping) and isinstance(values.get(name), Mapping):
            values = values[name]
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise InputError(f"{path}: has no state dict; save model.state_dict()")
    return {reduce(str.removeprefix, WRAPPED, str(name)): value for name, value in values.items()}


def checkpoints_in(path: Path, round: int | None = None) -> list[tuple[int, Path]]:
    """Return the checkpoints of a file or a folder with the rounds in their names, in the order of rounds.

    A folder has files, or folders with a file of `IN_FOLDER`; names without a number, such as best.pt, are omitted.
    `round` is that of one file, whatever its name. Raises InputError if there is none, or a round is not unique.
    """
    if path.is_file():
        return [(_round_in(path.stem) or 0 if round is None else round, path)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder of checkpoints")
    if round is not None:
        raise InputError(f"{path}: this is a folder, whose names have the rounds; name one file, or remove --round")
    found: dict[int, Path] = {}
    for entry in sorted(path.iterdir()):
        inner = next((entry / name for name in IN_FOLDER if (entry / name).is_file()), None)
        inner = entry if entry.is_dir() and is_folder_of_model(entry) else inner
        number = _round_in(entry.name if entry.is_dir() else entry.stem)
        if number is None or (inner is None and (entry.is_dir() or entry.suffix not in SUFFIXES)):
            continue
        if number in found:
            raise InputError(f"{found[number]} and {entry}: both are of round {number}; move one of them away")
        found[number] = inner or entry
    if not found:
        raise InputError(f"{path}: has no checkpoint with a round in its name, such as round-10.pt; rename the files")
    return sorted(found.items())


def _round_in(name: str) -> int | None:
    """Return the number after a word such as round or epoch, or else the only number; None without a number."""
    numbers = POINT.findall(name) or re.findall(r"\d+", name)
    if len(numbers) > 1:
        raise InputError(f"{name}: has several numbers; name the round, as in round-{numbers[-1]}, or give --round")
    return int(numbers[0]) if numbers else None


def model_of_factory(spec: str, option: str = "", arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the result of a factory, whose code is executed; prints go to standard error.

    It is ``package.module:factory``, importable from the current folder or installed, or ``path/to/model.py:factory``,
    which can import files of its folder. Messages begin with `option`, such as "--model ".
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        what = "a factory" if option else "a checkpoint (.safetensors), or a factory"
        raise InputError(f"{option}{spec}: name {what}, as package.module:factory or path/to/model.py:factory")
    with redirect_stdout(sys.stderr):
        module = _run(where, option, lambda: execute(Path(where)) if _is_path(where) else _import(where))
        factory = getattr(module, name, None)
        if not callable(factory):
            raise InputError(f"{option}{spec}: {where} has no function {name}")
        return _run(spec, option, lambda: factory(**(arguments or {})))


def weights_digest(model: Any) -> str | None:
    """Return the sha256 of a module's parameters and buffers; None for a model that is not a module."""
    module = model.module if isinstance(model, ForwardModel) else model
    return digest_of(module.state_dict()) if isinstance(module, nn.Module) else None


def code_file(spec: str, option: str = "") -> Path:
    """Return the file of a factory (`model_of_factory`), without executing it."""
    where = spec.rpartition(":")[0]
    if not _is_path(where):
        sys.path.insert(0, str(Path.cwd()))
        found = _run(where, option, lambda: importlib.util.find_spec(where))
        where = str(found.origin if found else where)
    if not Path(where).is_file():
        raise InputError(f"{option}{spec}: {where} is not a file; name a factory in a file")
    return Path(where).resolve()


def code_digests(file: Path) -> dict[str, str]:
    """Return the digests, by relative path, of an executed file and of imported files below its folder."""
    named = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    imported = {Path(name).resolve() for name in named if name and "site-packages" not in name}
    files = {file, *(path for path in imported if path.is_relative_to(file.parent) and path.is_file())}
    return {path.relative_to(file.parent).as_posix(): file_digest(path) for path in sorted(files)}


def _run(what: str, option: str, work: Callable[[], Made]) -> Made:
    try:
        return work()
    except InputError as error:
        raise InputError(f"{option}{error}") from error
    except Terminated:
        raise
    except (Exception, SystemExit) as error:
        line = f" ({where})" if (where := place(error)) else ""
        raise InputError(f"{option}{what}: failed with {type(error).__name__}: {error}{line}") from error


def _is_path(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _import(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(name)
    add_own_file(str(module.__file__))
    return module
