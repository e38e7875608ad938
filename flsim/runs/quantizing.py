"""Measurement of a trained run with weights of few bits, as a new run: one training gives two rows of a table."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

from flsim.algorithms import checkpoint
from flsim.base.errors import InputError
from flsim.base.files import new_folder
from flsim.base.machine import refuse_missing_device
from flsim.base.progress import tracked
from flsim.results.store import read_run
from flsim.runs.config import dump
from flsim.runs.folder import Run, Status, with_copies
from flsim.runs.measuring import announce_evaluation, evaluate_checkpoint


def quantize_run(source: Path, out: Path, bits: int, device: str = "cpu") -> Run:
    """Copy a run's evaluated checkpoints to a new run, and measure them with weights of `bits` bits.

    The checkpoints of the new run contain the original weights. Weights are rounded only for the measurement.

    Raises:
        InputError: `out` exists, `bits` is out of range, the run has no evaluated checkpoint, or is already quantized;
            or torch has no such device. After any error, there is no new folder.
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
    kept = [name for name in names if (source / "checkpoints" / name).is_file()]
    if not kept:
        raise InputError(f"{source}: the run has no evaluated checkpoint; wait for the first evaluation")
    announce_evaluation(settings)
    with new_folder(out) as folder:
        dump(with_copies(settings, folder), folder / "config.toml")
        shutil.copytree(source / "planted", folder / "planted")
        (folder / "checkpoints").mkdir()
        (folder / "rows").mkdir()
        provenance = replace(run.provenance, config=settings.digest)
        for name in kept:
            checkpoint.save(folder / "checkpoints", run.load(source / "checkpoints" / name), provenance)
        for name in tracked(f"{out.name}: evaluating", kept):  # the folder is removed if an evaluation fails
            evaluate_checkpoint(folder, folder / "checkpoints" / name, device)
    quantized = Run(out, with_copies(settings, out))
    quantized.mark(cast(Status, results.status), results.reason)
    return quantized
