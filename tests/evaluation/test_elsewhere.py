"""Models that were trained elsewhere: their canaries, folders of measurements, and what those prove."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import Flsim, rows

from flsim.runs.folder import Run
from flsim.runs.loading import load_model

Trained = Callable[..., Path]

OF_OURS = """
from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams

def ours(vocabulary, embedding, units):
    return build(vocabulary, ModelHParams(embedding, units))
"""


@pytest.fixture
def copied(trained_here: Trained, tmp_path: Path) -> Run:
    """A run, and foreign copies in weights/ of all its evaluated checkpoints, beside a listing of its canaries."""
    run = Run.open(trained_here("evaluation.every=2"))
    (tmp_path / "ours.py").write_text(OF_OURS)
    (tmp_path / "weights").mkdir()
    for path in (run.path / "rows").glob("*.parquet"):
        network = load_model(run.path / "checkpoints" / f"{path.stem}.safetensors")
        torch.save({"model": network.state_dict()}, tmp_path / "weights" / f"{path.stem}.pt")
    roster = pd.read_parquet(run.path / "planted" / "roster.parquet")
    listed = [
        {"id": canary.id, "tokens": list(canary.tokens), "p_u": canary.p_u, "p_e": canary.p_e, "copies": int(copies)}
        for canary, copies in zip(run.canaries, roster["insertions"], strict=True)
    ]
    (tmp_path / "canaries.json").write_text(json.dumps(listed))
    return run


def measured(copied: Run, flsim: Flsim, folder: Path, *options: object) -> tuple[int, str, str]:
    """Measure the copies as somebody else's model."""
    model, evaluation = copied.config.model, copied.config.evaluation
    arguments = {"vocabulary": copied.corpus.layout.vocabulary_size, "embedding": model.embedding, "units": model.units}
    sets = [part for name, value in arguments.items() for part in ("--set", f"{name}={value}")]
    about = {"seed": copied.config.seed, "references": evaluation.references, "beam-width": evaluation.beam_width}
    sets += [part for name, value in about.items() for part in (f"--{name}", str(value))]
    where = ("--canaries", folder / "canaries.json", "--corpus", copied.config.data.corpus, "--out", folder / "theirs")
    return flsim("evaluate", "--model", f"{folder / 'ours.py'}:ours", *sets, *where, *options)


def test_rows_of_a_copy_are_those_of_the_run(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """A folder of checkpoints gives all rounds at once; utility too, since the corpus is named."""
    code, _, err = measured(copied, flsim, tmp_path, "--state", tmp_path / "weights")
    assert code == 0, err
    own, theirs = rows(copied.path), rows(tmp_path / "theirs")
    assert own["round"].nunique() > 1
    pd.testing.assert_frame_equal(theirs, own, check_exact=False, rtol=0, atol=1e-6)
