"""Measurement of a checkpoint with the settings of its run; results are stored as rows of the run.

A run can be measured with weights of few bits as a new run: one training then gives two rows of a table.
"""

import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from flsim.algorithms import checkpoint
from flsim.base.errors import Diverged, InputError
from flsim.base.extensions import custom_code_errors, is_custom, short_name
from flsim.base.files import new_folder, refuse_unwritable
from flsim.base.machine import refuse_missing_device
from flsim.base.progress import tracked
from flsim.evaluation.evaluate import evaluate, own_quantities, write_on
from flsim.evaluation.loading import model_of_factory
from flsim.measures.quantity import Quantity
from flsim.models.architectures import ModelHParams
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import TrainableModel
from flsim.results.rows import DIVERGED, Row, read_rows_of, write_rows
from flsim.results.store import read_run
from flsim.runs.config import Config, dump, load
from flsim.runs.config.custom_code import announce
from flsim.runs.folder import Run, Status, with_copies
from flsim.training.own_model import frozen_digest
from flsim.training.update import State

BASE = Path("base")  # in place of a checkpoint: the model before training


@custom_code_errors()
def evaluate_checkpoint(
    run: Path, path: str | Path, device: str = "cpu", calibrate: Sequence[Path] = (), **changes: Any
) -> list[Row]:
    """Measure a checkpoint and store its rows in the run; equal measurements store equal rows.

    `calibrate` are checkpoints of runs without these canaries, or `BASE`, whose mean scores calibrate the exposures;
    `changes` are of the run's `EvaluationHParams`. InputError if a checkpoint is not of its run, the corpus changed, or
    a run for calibration had one of the canaries; Diverged, which a row records, if parameters are not finite.
    """
    opened = Run.open(Path(run))
    state, model = restored_model(opened, Path(path), device)
    without = [_without(opened, other, device) for other in calibrate]
    hparams = replace(opened.config.evaluation, **changes)
    try:
        rows = evaluate(
            model,
            opened.canaries,
            opened.corpus.test_users,
            hparams,
            opened.config.seed,
            opened.identity,
            state.round,
            without,
        )
        if spent := opened.epsilons(state):
            prefix = "" if opened.config.unit == "user" else f"{opened.config.unit} "
            measured = {f"{prefix}epsilon {name}": value for name, value in spent.items()}
            measured[f"{prefix}delta"] = opened.delta
            rows += [Row(opened.identity, state.round, metric, "", value) for metric, value in measured.items()]
        opened.verify()  # measurements on other data must not be stored
        kept, own = _not_measured_again(opened, state.round, rows)
        write_rows(opened.path, state.round, [*rows, *kept], [*own_quantities(hparams.also), *own])
    except Diverged:
        write_rows(opened.path, state.round, [Row(opened.identity, state.round, DIVERGED, "", 1.0)])
        raise
    return rows


def _not_measured_again(run: Run, round: int, rows: Sequence[Row]) -> tuple[list[Row], list[Quantity]]:
    """Return the stored rows of a round whose metrics are not among `rows`, and the quantities of custom measures."""
    path, measured = run.path / "rows" / f"round-{round:06d}.parquet", {row.metric for row in rows}
    try:
        stored, own = read_rows_of(path, run.identity, [canary.id for canary in run.canaries])
    except (OSError, InputError):  # there are none, or they are damaged or of another run, and are replaced
        return [], []
    stored = stored.loc[~stored["metric"].isin({*measured, DIVERGED}), [field.name for field in fields(Row)]]
    kept = [Row(*values) for values in stored.itertuples(index=False)]
    return kept, [one for name, one in own.items() if name not in measured]


def evaluate_where_writable(
    run: Path, path: str | Path, device: str = "cpu", calibrate: Sequence[Path] = (), **changes: Any
) -> list[Row]:
    """Measure a checkpoint as `evaluate_checkpoint` for a user; InputError before that if rows cannot be stored."""
    refuse_unwritable(run, "rows")
    config = Run.open(run).config
    announce_evaluation(replace(config, evaluation=replace(config.evaluation, **changes)))
    return evaluate_checkpoint(run, path, device, calibrate, **changes)


def announce_evaluation(config: Config) -> None:
    """Print the files of custom code that evaluations with these settings will execute."""
    accounting = ("sampler", "noise") if config.privacy.mechanism == "dp" else ()
    announce(config, "architecture", "measure", *accounting)


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest undamaged checkpoint of a run folder; raise InputError if there is none."""
    path = checkpoint.latest(folder / "checkpoints")
    if path is None:
        raise InputError(f"{folder}: the run has no checkpoint yet; wait for the first checkpoint, or name another run")
    return path


def written_after(run: Run, round: int, device: str = "cpu") -> dict[str, tuple[int, ...]]:
    """Return the phrases that beam search generates with a round's checkpoint: token ids by canary id.

    Raises InputError if the checkpoint is missing or of another run, Diverged if its parameters are not finite.
    """
    path = run.path / "checkpoints" / checkpoint.checkpoint_name(round)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint, so the model cannot write text; remove --written")
    _, model = restored_model(run, path, device)
    return write_on(model, run.canaries, run.corpus.layout, run.config.evaluation)


def restored_model(run: Run, path: Path, device: str) -> tuple[State, TrainableModel]:
    """Return the state of a run's checkpoint and its model on a device; raise InputError for a foreign checkpoint."""
    state = run.load(path)
    model = checkpoint.model_of(run.provenance)
    return state, model.load(state.params).to(torch.device(device))


def base_of(run: Run, device: str) -> TrainableModel:
    """Return the base model of a run, as before training; raise InputError for runs without a base model."""
    if run.config.model.architecture != "hf":
        raise InputError(f'{run.path}: has no base; "{BASE}" is for runs of architecture "hf"; name a checkpoint')
    model = checkpoint.model_of(run.provenance).initialize(run.config.seed)
    return model.to(torch.device(device))


def _without(run: Run, path: Path, device: str) -> TrainableModel:
    """Return the model of another run without these canaries, which calibrates their scores."""
    if path == BASE:
        return base_of(run, device)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint")
    other = Run.open(path.resolve().parent.parent)
    if other.corpus.digest != run.corpus.digest:
        raise InputError(
            f"{path}: this checkpoint was trained on another corpus than {run.path}; calibrate with runs on the "
            "same corpus"
        )
    seen = {canary.tokens for canary in other.canaries} & {canary.tokens for canary in run.canaries}
    if seen:
        raise InputError(
            f"{path}: this checkpoint was trained with {len(seen)} of the measured canaries; calibrate with a "
            "run of another seed"
        )
    announce(other.config, "architecture")
    return restored_model(other, path, device)[1]


def quantize_run(source: Path, out: Path, bits: int, device: str = "cpu") -> Run:
    """Copy a run's evaluated checkpoints to a new run, and measure them with weights of `bits` bits.

    Weights are rounded only for the measurement, not in checkpoints. Raises InputError if `out` exists, `bits` is out
    of range, or the run has no evaluated checkpoint or is quantized; after any error, there is no new folder.
    """
    refuse_missing_device(device)
    run = Run.open(source)
    if run.config.evaluation.weight_bits is not None:
        raise InputError(
            f"{source}: this run is already measured with {run.config.evaluation.weight_bits} bits; name another run"
        )
    settings = replace(run.config, evaluation=replace(run.config.evaluation, weight_bits=bits))
    results = read_run(source)
    names = [checkpoint.checkpoint_name(round_) for round_ in results.evaluated]
    evaluated = [name for name in names if (source / "checkpoints" / name).is_file()]
    if not evaluated:
        raise InputError(f"{source}: the run has no evaluated checkpoint; wait for the first evaluation")
    run.verify()  # a message about damaged files then names the source, not the hidden new folder
    _ = run.canaries
    announce_evaluation(settings)
    with new_folder(out) as folder:
        dump(with_copies(settings, folder), folder / "config.toml")
        shutil.copytree(source / "planted", folder / "planted")
        (folder / "checkpoints").mkdir()
        (folder / "rows").mkdir()
        provenance = replace(run.provenance, config=settings.digest)
        for name in evaluated:
            checkpoint.save(folder / "checkpoints", run.load(source / "checkpoints" / name), provenance)
        for name in tracked(f"{out.name}: evaluating", evaluated):  # the folder is removed if an evaluation fails
            evaluate_checkpoint(folder, folder / "checkpoints" / name, device)
    quantized = Run(out, with_copies(settings, out))
    quantized.mark(cast(Status, results.status), results.reason)
    return quantized


# The network of a checkpoint, or another model, for code that reads or measures it.


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
    _, model = restored_model(opened, path, "cpu")
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
