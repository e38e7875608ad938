"""A run's checkpoint, measured in more ways than its configuration asks for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment, MakeCorpus

from flsim.algorithms.checkpoint import model_of
from flsim.base.errors import InputError
from flsim.measures.built_in import ALSO
from flsim.measures.memorization.random_sampling import references
from flsim.measures.memorization.score import log_perplexity
from flsim.results.store import read_run
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint


def checkpoint_of(experiment: Experiment, name: str, seed: int = 0) -> tuple[Run, Path]:
    """A run of two rounds that was not trained: its model says something, loudly."""
    run = Run.create(load(experiment.config, [f"seed={seed}", "training.rounds=2"]), experiment.folder / name)
    state = run.latest_state()
    loud = {key: value * 4 for key, value in state.params.items()}
    return run, run.save(replace(state, round=2, params=loud))


def test_more_is_measured_where_asked_and_the_rest_is_as_ever(experiment: Experiment) -> None:
    run, path = checkpoint_of(experiment, "run")
    plain = evaluate_checkpoint(run.path, path)
    more = evaluate_checkpoint(run.path, path, also=tuple(ALSO), samples=200, nodes=500)
    assert set(plain) < set(more)
    added = {row.metric for row in more} - {row.metric for row in plain}
    assert {"space_exposure", "extrapolated_exposure", "path_nodes", "generation_hits"} < added
    assert set(read_run(run.path).rows["metric"]) == {row.metric for row in more}


def test_calibrated_ranks_are_those_of_differences_of_scores(experiment: Experiment) -> None:
    """From both models' scores of all references, in full."""
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
        clear = (differences[1:] - differences[0]).abs() > 1e-3  # float32 cannot tell the others apart
        at_least = 1 + int((clear & (differences[1:] < differences[0])).sum())
        assert at_least <= found["calibrated_rank", canary.id] <= at_least + int((~clear).sum())


def test_models_that_cannot_calibrate_are_refused(
    experiment: Experiment, make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]
) -> None:
    run, path = checkpoint_of(experiment, "run")
    with pytest.raises(InputError, match="trained with 4 of the measured canaries; calibrate with a run of"):
        evaluate_checkpoint(run.path, path, calibrate=[path])
    with pytest.raises(InputError, match="nowhere: no such checkpoint"):
        evaluate_checkpoint(run.path, path, calibrate=[Path("nowhere")])
    make_corpus(random_users(24, 8, 36, seed=5), test=random_users(4, 8, 36), vocabulary_size=40, name="elsewhere")
    text = experiment.config.read_text().replace('corpus = "corpus"', 'corpus = "elsewhere"')
    (experiment.folder / "tiny.toml").write_text(text)
    _, other = checkpoint_of(experiment, "other", seed=1)
    with pytest.raises(InputError, match=r"trained on another corpus than .*; calibrate with runs on the same corpus"):
        evaluate_checkpoint(run.path, path, calibrate=[other])


def test_the_command_says_what_the_columns_are(experiment: Experiment) -> None:
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
