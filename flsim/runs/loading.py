"""The network of a checkpoint, or another model, for code that reads or measures it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flsim.algorithms import checkpoint
from flsim.base.errors import InputError
from flsim.base.extensions import custom_code_errors, is_custom, short_name
from flsim.base.files import new_folder
from flsim.base.machine import refuse_missing_device
from flsim.evaluation.loading import model_of_factory
from flsim.models.hf import HuggingFaceModel
from flsim.models.hparams import ModelHParams
from flsim.runs import measuring
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.measuring import newest_checkpoint
from flsim.training.own_model import frozen_digest


def load_model(model: Path | str, device: str = "cpu") -> Any:
    """Return the network of a checkpoint, or the result of a factory, whose code is executed.

    Args:
        model: a checkpoint file (.safetensors), which does not need the corpus of its run; or
            ``package.module:factory``, or ``path/to/model.py:factory``, a function without arguments that returns a
            model.
        device: torch device of a checkpoint's network, such as "cuda".

    Returns:
        For a checkpoint a `flsim.models.language_model.TrainableModel`, a torch module in evaluation mode; for a
        factory, the result of the factory.

    Raises:
        InputError: the file is not a checkpoint; the checkpoint has a custom network and is not in its run folder, or
            files of the network changed; or the factory does not exist, or failed.

    Examples:
        >>> network = flsim.load_model("runs/iid/checkpoints/round-000200.safetensors")            # doctest: +SKIP
        >>> torch.save(network.state_dict(), "weights.pt")                     # doctest: +SKIP
        >>> model = flsim.load_model("my_model.py:factory")                    # doctest: +SKIP
        >>> flsim.evaluate(model, users, references=20_000)                    # doctest: +SKIP
    """
    refuse_missing_device(device, "device")
    if not str(model).endswith(checkpoint.SUFFIX):
        return model_of_factory(str(model))
    path = Path(model)
    state, provenance = checkpoint.load(path)
    if is_custom(provenance.model.architecture) or provenance.model.architecture == "hf":
        provenance = replace(provenance, model=_own_model(path, provenance.model))
    with custom_code_errors(InputError):
        network = checkpoint.model_of(provenance).load(state.params)
        frozen = frozen_digest(provenance.vocabulary_size, provenance.model)
    if frozen != provenance.frozen:
        raise InputError(f"{path}: frozen parameters of the network changed; restore their files")
    return network.to(torch.device(device))


def export_network(run: Path, out: Path, round_: int | None = None, merge: bool = False) -> None:
    """Write a checkpoint of architecture "hf" as a folder for peft or transformers; InputError if `out` exists."""
    opened = Run.open(run)
    path = newest_checkpoint(run) if round_ is None else run / "checkpoints" / checkpoint.checkpoint_name(round_)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint; name another --round, or leave it out for the newest one")
    if opened.config.model.architecture != "hf":
        raise InputError(f'{run}: is of architecture "{opened.config.model.architecture}"; only "hf" is exported')
    if (bits := opened.config.evaluation.weight_bits) is not None:
        raise InputError(
            f"{run}: was measured with weights of {bits} bits, and its checkpoints have all bits; export the "
            "run that it is made from"
        )
    _, model = measuring.load_model(opened, path, "cpu")
    lora, tokens = opened.config.model.lora, opened.corpus.token_map
    with new_folder(out) as folder:
        if isinstance(model, HuggingFaceModel):
            model.export(folder, merge)
        if tokens is not None and (merge or lora is None):
            for file in tokens.folder.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())


def _own_model(path: Path, saved: ModelHParams) -> ModelHParams:
    """Return the settings of a custom network or a base model, whose files the run's settings name."""
    settings = path.resolve().parent.parent / "config.toml"
    if not settings.is_file():
        name = short_name(saved.architecture)
        raise InputError(f"{path}: this checkpoint needs the files of {name}; move it back to its run folder")
    model = load(settings).model
    if checkpoint.by_content_of(model) != saved:
        raise InputError(f"{path}: the network differs from that of {settings}; move the checkpoint to its run folder")
    return model
