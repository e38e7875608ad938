"""Settings that no run could train or measure are refused in a line before anything is made, and at once."""

import re

import pytest
from helpers import Experiment

from flsim.base import machine
from flsim.base.errors import InputError
from flsim.data.vocabulary import Layout
from flsim.measures.memorization.random_sampling import references
from flsim.models.architectures import BUILT_IN, ModelHParams, build, weights_of
from flsim.runs.config import load
from flsim.runs.folder import Run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seed=-1"], "seed must be at least 0, found -1"),
        (
            ["canaries.p_u=[0.5]", "canaries.p_e=[0.5, 1.0]", "canaries.count=4"],
            "8 canaries would replace about 576 records, and the training users have 192; set a smaller canaries.count",
        ),
        (
            ["canaries.p_u=[1e-9]", "canaries.p_e=[1.0]", "canaries.count=100000"],
            "100,000 canaries, but a run can have at most",
        ),
        (["evaluation.references=99999999999999"], "evaluation.references = 99,999,999,999,999 needs"),
        (["evaluation.beam_width=100000000000", "canaries.length=20"], "evaluation.beam_width = 100,000,000,000 needs"),
        (["canaries.length=1000000000"], "canaries of 1,000,000,000 words would be cut"),
        (["model.embedding=1000000000"], "set a smaller model.embedding or model.units"),
        (["model.units=1000000000"], "weights needs"),
    ],
)
def test_impossible_settings_are_refused(experiment: Experiment, settings: list[str], message: str) -> None:
    """The corpus has 192 training records: (0.5 * 0.5 + 0.5 * 1.0) * 4 of them are 576."""
    (experiment.folder / "bare.toml").write_text('[data]\ncorpus = "corpus"\n[training]\ncohort = 6\n')
    with pytest.raises(InputError, match=f"^[^\n]*{re.escape(message)}[^\n]*$"):
        Run.create(load(experiment.folder / "bare.toml", settings), experiment.folder / "run")
    assert not list(experiment.folder.glob("*run*"))


def test_references_that_do_not_fit_are_refused_before_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """R is drawn and sorted: two tables of 8 bytes a word, so 1,000 references of 4 words take 64,000 bytes."""
    monkeypatch.setattr(machine, "machine_memory", lambda: 63_999)
    with pytest.raises(InputError, match=r"evaluation\.references = 1,000 needs"):
        references(0, 1_000, 4, Layout(12))
    monkeypatch.setattr(machine, "machine_memory", lambda: 64_000)
    assert references(0, 1_000, 4, Layout(12)).shape == (1_000, 4)


@pytest.mark.parametrize("architecture", [name for name in BUILT_IN if name != "hf"])  # whose sizes are of a base
def test_weights_are_counted_without_memory_for_them(architecture: str) -> None:
    hparams = ModelHParams(8, 12, architecture=architecture)
    assert weights_of(50, hparams) == sum(value.numel() for value in build(50, hparams).trainable.values())
    assert weights_of(50, ModelHParams(10**8, 16, architecture=architecture)) > 50 * 10**8


def test_sizes_beyond_64_bits_are_refused() -> None:
    with pytest.raises(InputError, match=r"^model: a tensor is too large .*; set smaller sizes$"):
        weights_of(50, ModelHParams(10**12, 16, architecture="transformer"))
