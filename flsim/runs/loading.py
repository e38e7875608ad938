"""The network of a checkpoint, or another model, for code that reads its parameters or measures it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flsim.algorithms import checkpoint
from flsim.base.errors import InputError
from flsim.base.extensions import by_content, custom_code_errors, is_custom, short_name
from flsim.evaluation.loading import model_of_factory
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import TrainableModel
from flsim.runs.config import load
from flsim.training.own_model import frozen_digest


def load_model(model: Path | str, device: str = "cpu") -> Any:
    """Return the network of a checkpoint, or the result of a factory, whose code is executed.

    Args:
        model: a checkpoint's file (.safetensors), whose run's corpus is not needed; or ``package.module:factory``, or
            ``path/to/model.py:factory``, a function without arguments that returns a model.
        device: torch device of a checkpoint's network, such as "cuda".

    Returns:
        For a checkpoint a `flsim.models.language_model.TrainableModel`, a torch module in evaluation mode; for a
        factory, what the factory returned.

    Raises:
        InputError: the file is no checkpoint; the checkpoint is of a custom network whose run folder is not around it,
            or whose files have changed; or there is no such factory, or it failed.

    Examples:
        >>> network = flsim.load_model("runs/iid/checkpoints/round-000200.safetensors")            # doctest: +SKIP
        >>> torch.save(network.state_dict(), "weights.pt")                     # doctest: +SKIP
        >>> model = flsim.load_model("my_model.py:factory")                    # doctest: +SKIP
        >>> flsim.evaluate(model, users, references=20_000)                    # doctest: +SKIP
    """
    is_checkpoint = str(model).endswith(checkpoint.SUFFIX)
    return _of_checkpoint(Path(model), device) if is_checkpoint else model_of_factory(str(model))


def _of_checkpoint(path: Path, device: str) -> TrainableModel:
    state, provenance = checkpoint.load(path)
    if is_custom(provenance.model.architecture):
        provenance = replace(provenance, model=_own_model(path, provenance.model))
    with custom_code_errors(InputError):
        model = checkpoint.model_of(provenance).load(state.params)
        frozen = frozen_digest(provenance.vocabulary_size, provenance.model)
    if frozen != provenance.frozen:
        raise InputError(f"{path}: frozen parameters of its network changed; restore their files")
    return model.to(torch.device(device))


def _own_model(path: Path, saved: ModelHParams) -> ModelHParams:
    """Return the settings of a custom network, which name the copy of its file in the run folder."""
    settings = path.resolve().parent.parent / "config.toml"
    if not settings.is_file():
        name = short_name(saved.architecture)
        raise InputError(f"{path}: needs the code of {name}; put it back in its run folder")
    model = load(settings).model
    if replace(model, architecture=by_content(model.architecture)) != saved:
        raise InputError(f"{path}: is of another network than {settings}; put it in its run folder")
    return model
