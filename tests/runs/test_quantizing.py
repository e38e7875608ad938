"""`flsim quantize`: a run beside the one that it was, measured by its rounded weights; and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment, Trained, rows
from runs.test_measuring import checkpoint_of

from flsim.algorithms.checkpoint import load
from flsim.base.errors import InputError
from flsim.evaluation.evaluate import evaluate
from flsim.models.cifg import CIFGLanguageModel
from flsim.models.quantization import quantized
from flsim.results.rows import Row
from flsim.results.store import read_run
from flsim.runs import measuring
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint, quantize_run


def evaluated(experiment: Experiment) -> tuple[Run, Path]:
    run, path = checkpoint_of(experiment, "run")
    evaluate_checkpoint(run.path, path)
    run.mark("completed")
    return run, path


def test_the_new_run_is_measured_by_rounded_weights(experiment: Experiment) -> None:
    run, path = evaluated(experiment)
    before = rows(run.path)
    out = experiment.folder / "run-3bit"
    made = quantize_run(run.path, out, 3)
    (state, about), (trained, _) = load(out / "checkpoints" / path.name), load(path)
    assert all(torch.equal(value, trained.params[name]) for name, value in state.params.items())
    assert about.config == made.config.digest != run.config.digest
    coarse = quantized(CIFGLanguageModel.from_params(trained.params), 3)
    hparams = replace(run.config.evaluation, weight_bits=None)
    expected = evaluate(coarse, run.canaries, run.corpus.split("test"), hparams, run.config.seed, "run-3bit", 2)
    found = read_run(out)
    assert {(row.metric, row.canary): row.value for row in expected} == {
        (metric, canary): value
        for metric, canary, value in zip(found.rows["metric"], found.rows["canary"], found.rows["value"], strict=True)
    }
    assert (found.setting, found.status) == (f"{run.config.setting}, 3-bit weights", "completed")
    assert rows(run.path).equals(before)
    assert not rows(out).equals(before)
    assert Run.open(out).unevaluated() == []
    with pytest.raises(InputError, match="is already measured with 3 bits"):
        quantize_run(made.path, experiment.folder / "again", 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--out", "new", "--bits", "1"), "weight_bits must be at least 2, found 1"),
        (("nothing", "--out", "new"), "nothing: not a run folder"),
        (("run", "--out", "run"), "run: already exists"),
        (("bare", "--out", "new"), "bare: the run has no evaluated checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    experiment: Experiment, arguments: tuple[str, ...], message: str
) -> None:
    evaluated(experiment)
    checkpoint_of(experiment, "bare")
    done = experiment.call("quantize", *arguments, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
    assert not (experiment.folder / "new").exists()


def test_the_command_prints_both(experiment: Experiment) -> None:
    evaluated(experiment)
    said = experiment.call("quantize", "run", "--out", "run-8bit").stdout
    assert ["8-bit" in line for line in said.splitlines()[:4]] == [False, False, False, True]


def test_a_quantization_that_fails_leaves_no_folder(
    experiment: Experiment, trained_here: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two checkpoints fails, as where memory runs out, or Ctrl-C ends the command."""
    run, rounded = trained_here(), experiment.folder / "rounded"
    measured: list[Path] = []

    def fails(folder: Path, path: Path, device: str) -> list[Row]:
        measured.append(path)
        if len(measured) == 2:
            raise error
        return evaluate_checkpoint(folder, path, device)

    monkeypatch.setattr(measuring, "evaluate_checkpoint", fails)
    before = sorted(rounded.parent.iterdir())
    for error in (MemoryError(), KeyboardInterrupt()):
        measured.clear()
        with pytest.raises(type(error)):
            quantize_run(run, rounded, 8)
        assert len(measured) == 2
        assert sorted(rounded.parent.iterdir()) == before
