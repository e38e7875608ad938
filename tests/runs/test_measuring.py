"""Additional measures of a run's checkpoint, and `flsim quantize`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment, MakeCorpus, Trained, rows

from flsim.algorithms.checkpoint import load as load_checkpoint
from flsim.algorithms.checkpoint import model_of
from flsim.base.errors import InputError
from flsim.measures.built_in import ALSO
from flsim.measures.memorization.score import log_perplexity, references
from flsim.models.architectures import CIFGLanguageModel
from flsim.models.language_model import quantized
from flsim.results.rows import Row, read_run
from flsim.runs import folder
from flsim.runs.config import load
from flsim.runs.evaluate import evaluate
from flsim.runs.folder import Run, evaluate_checkpoint, quantize_run


def checkpoint_of(experiment: Experiment, name: str, seed: int = 0) -> tuple[Run, Path]:
    """Return an untrained run of two rounds, whose weights are scaled by 4 so that predictions are distinct."""
    run = Run.create(load(experiment.config, [f"seed={seed}", "training.rounds=2"]), experiment.folder / name)
    state = run.latest_state()
    loud = {key: value * 4 for key, value in state.params.items()}
    return run, run.save(replace(state, round=2, params=loud))


def test_additional_measures_are_added_to_the_others(experiment: Experiment) -> None:
    run, path = checkpoint_of(experiment, "run")
    plain = evaluate_checkpoint(run.path, path)
    more = evaluate_checkpoint(run.path, path, also=tuple(ALSO), samples=200, nodes=500)
    assert set(plain) < set(more)
    added = {row.metric for row in more} - {row.metric for row in plain}
    assert {"space_exposure", "extrapolated_exposure", "path_nodes", "generation_hits"} < added
    assert set(read_run(run.path).rows["metric"]) == {row.metric for row in more}
    evaluate_checkpoint(run.path, path, utility_only=True)
    assert set(read_run(run.path).rows["metric"]) == {row.metric for row in more}


def test_calibrated_ranks_are_those_of_differences_of_scores(experiment: Experiment) -> None:
    """Expected: the scores of all references under all three models."""
    run, path = checkpoint_of(experiment, "run")
    others = [checkpoint_of(experiment, f"other{seed}", seed) for seed in (1, 2)]
    rows = evaluate_checkpoint(run.path, path, calibrate=[other for _, other in others])
    found = {(row.metric, row.canary): row.value for row in rows}
    models = []
    for each, checkpoint in [(run, path), *others]:
        models.append(model_of(each.provenance))
        models[-1].load_state_dict(each.load(checkpoint).params)
    layout, hparams = run.corpus.layout, run.config.evaluation
    for canary in run.canaries:
        tokens = torch.tensor((layout.bos, *canary.tokens))
        prefix, secret = tokens[: 1 + hparams.prefix], tokens[1 + hparams.prefix :]
        among = torch.cat([secret[None], references(run.config.seed, hparams.references, len(secret), layout)])
        own, *means = (log_perplexity(model, prefix, among) for model in models)
        differences = own - torch.stack(means).mean(0)
        assert found["calibrated_score", canary.id] == pytest.approx(float(differences[0]), abs=1e-4)
        clear = (differences[1:] - differences[0]).abs() > 1e-3  # float32 cannot distinguish the others
        at_least = 1 + int((clear & (differences[1:] < differences[0])).sum())
        assert at_least <= found["calibrated_rank", canary.id] <= at_least + int((~clear).sum())


def test_models_that_cannot_calibrate_are_refused(
    experiment: Experiment, make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]
) -> None:
    run, path = checkpoint_of(experiment, "run")
    with pytest.raises(InputError, match="trained with 4 of the measured canaries; calibrate with a run of"):
        evaluate_checkpoint(run.path, path, calibrate=[path])
    with pytest.raises(InputError, match="--calibrate nowhere: no such checkpoint; name a"):
        evaluate_checkpoint(run.path, path, calibrate=[Path("nowhere")])
    make_corpus(random_users(24, 8, 36, seed=5), test=random_users(4, 8, 36), vocabulary_size=40, name="elsewhere")
    text = experiment.config.read_text().replace('corpus = "corpus"', 'corpus = "elsewhere"')
    (experiment.folder / "tiny.toml").write_text(text)
    _, other = checkpoint_of(experiment, "other", seed=1)
    with pytest.raises(InputError, match=r"trained on another corpus than .*; calibrate with runs on the same corpus"):
        evaluate_checkpoint(run.path, path, calibrate=[other])


def test_the_command_explains_its_columns(experiment: Experiment) -> None:
    _, path = checkpoint_of(experiment, "run")
    _, other = checkpoint_of(experiment, "other", seed=1)
    also = [part for name in ALSO for part in ("--also", name)]
    done = experiment.call("evaluate", path, *also, "--samples", "200", "--nodes", "500", "--calibrate", other)
    headings = {cell.strip() for line in done.stdout.splitlines() for cell in line.split("|") if "|" in line}
    measured = {"space", "fit", "p", "fitted", "path", "hits", "calib.", "0+0", "0+1", "1+0", "1+1"}
    assert {"Canary", "Rank", "Bits", "RS", "BS", *measured} <= headings
    assert "space: bits over the complete space" in done.stdout
    decided = experiment.call("evaluate", path, "--decide").stdout
    assert ("| RS " in decided, "| Rank " in decided) == (True, False)
    refused = experiment.call("evaluate", path, "--also", "pace", check=False)
    assert refused.returncode == 2
    assert "also must be one of space" in refused.stderr


def evaluated(experiment: Experiment) -> tuple[Run, Path]:
    run, path = checkpoint_of(experiment, "run")
    evaluate_checkpoint(run.path, path)
    run.mark("completed")
    return run, path


def test_the_new_run_is_measured_with_rounded_weights(experiment: Experiment) -> None:
    run, path = evaluated(experiment)
    before = rows(run.path)
    out = experiment.folder / "run-3bit"
    made = quantize_run(run.path, out, 3)
    (state, about), (trained, _) = load_checkpoint(out / "checkpoints" / path.name), load_checkpoint(path)
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


def test_the_command_prints_both_runs_and_errors_are_one_line_and_leave_nothing(experiment: Experiment) -> None:
    evaluated(experiment)
    said = experiment.call("quantize", "run", "--out", "run-8bit").stdout
    assert ["8-bit" in line for line in said.splitlines()[:4]] == [False, False, False, True]
    checkpoint_of(experiment, "bare")
    for arguments, message in (
        (("run", "--out", "new", "--bits", "1"), "weight_bits must be at least 2, found 1"),
        (("nothing", "--out", "new"), "nothing: not a run folder"),
        (("run", "--out", "run"), "run: already exists"),
        (("bare", "--out", "new"), "bare: the run has no evaluated checkpoint"),
    ):
        done = experiment.call("quantize", *arguments, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert message in done.stderr
        assert not (experiment.folder / "new").exists()


def test_a_failed_quantization_leaves_nothing(
    experiment: Experiment, trained_here: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two checkpoints fails, because memory runs out or Ctrl-C ends the command."""
    run, rounded = trained_here(), experiment.folder / "rounded"
    measured: list[Path] = []

    def fails(folder: Path, path: Path, device: str) -> list[Row]:
        measured.append(path)
        if len(measured) == 2:
            raise error
        return evaluate_checkpoint(folder, path, device)

    monkeypatch.setattr(folder, "evaluate_checkpoint", fails)
    before = sorted(rounded.parent.iterdir())
    for error in (MemoryError(), KeyboardInterrupt()):
        measured.clear()
        with pytest.raises(type(error)):
            quantize_run(run, rounded, 8)
        assert len(measured) == 2
        assert sorted(rounded.parent.iterdir()) == before
