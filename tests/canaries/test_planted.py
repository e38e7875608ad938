"""A run over a corpus with canaries in place trains on exactly what a run that plants them itself does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Experiment, MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.canaries.in_corpus import Planted, plant_corpus
from flsim.canaries.planting import Overlay, Planting
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus
from flsim.data.records import Users
from flsim.runs.config import Config, load
from flsim.runs.folder import Run

HPARAMS = CanaryHParams(p_u=(0.2,), p_e=(0.5, 1.0), count=2)


@pytest.fixture
def planted(experiment: Experiment) -> Corpus:
    corpus = Corpus.open(experiment.folder / "corpus")
    return plant_corpus(corpus, experiment.folder / "planted", HPARAMS, 3)


def settings_of(experiment: Experiment, *overrides: str) -> Config:
    return load(experiment.config, ["seed=3", *overrides])


def without_canaries(experiment: Experiment, corpus: str) -> Path:
    """The configuration over that corpus, with no [canaries]."""
    before, after = experiment.config.read_text().split("[canaries]")
    path = experiment.folder / "absent.toml"
    path.write_text(before.replace('"corpus"', f'"{corpus}"') + after[after.index("[model]") :])
    return path


def texts(users: Users) -> list[list[list[int]]]:
    return [[record.tolist() for record in users[user]] for user in range(len(users))]


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_it_is_the_population_that_is_planted_lazily(experiment: Experiment, planted: Corpus, partition: str) -> None:
    """Record by record, in either partition, with the same roster."""
    runs = [
        Run.create(
            settings_of(experiment, f"data.partition={partition}", f"data.corpus={experiment.folder / corpus}"),
            experiment.folder / name,
        )
        for corpus, name in (("corpus", "lazy"), ("planted", "eager"))
    ]
    lazy, eager = (texts(run.users) for run in runs)
    assert lazy == eager
    assert runs[0].canaries == runs[1].canaries
    rosters = [pd.read_parquet(run.path / "planted" / "roster.parquet") for run in runs]
    assert rosters[0]["insertions"].sum() > 0
    pd.testing.assert_frame_equal(rosters[0], rosters[1])
    assert runs[0].config.digest == runs[1].config.digest
    if partition == "non-iid":
        assert texts(planted.split("train")) == lazy


def test_a_run_without_canaries_of_its_own_has_the_planted_ones_and_resumes(
    experiment: Experiment, planted: Corpus
) -> None:
    config = load(without_canaries(experiment, "planted"), ["seed=7"])
    run = Run.create(config, experiment.folder / "run")
    assert load(run.path / "config.toml").canaries == HPARAMS
    found = Planted.read(planted)
    assert found is not None
    assert run.canaries == found.planting.canaries  # whatever the run's seed
    assert texts(run.users) == texts(planted.split("train"))
    assert Run.reopen(config, run.path).config.canaries == HPARAMS


def test_the_command_plants_what_the_configuration_says_and_only_once(experiment: Experiment, planted: Corpus) -> None:
    command = ["--config", "tiny.toml", "--set", "seed=3", "--json"]
    about = json.loads(experiment.call("data", "plant", "corpus", "--out", "made", *command).stdout)
    assert about["digest"] == planted.digest
    done = experiment.call("data", "plant", "made", "--out", "again", *command, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "flsim: made: this corpus already has canaries; use the original corpus\n"
    assert not (experiment.folder / "again").exists()


@pytest.mark.parametrize(
    ("file", "content"), [("planting.json", b"{}"), ("roster.parquet", b"?"), ("overlay.u16", b"")]
)
def test_damage_is_refused(experiment: Experiment, planted: Corpus, file: str, content: bytes) -> None:
    (planted.path / "planted" / file).write_bytes(content)
    with pytest.raises(InputError, match="its planted canaries cannot be read"):
        Planted.read(planted)


@pytest.mark.parametrize("hparams", [HPARAMS, replace(HPARAMS, controls=3), replace(HPARAMS, coins=True)], ids=repr)
def test_what_is_written_is_read(
    make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]], tmp_path: Path, hparams: CanaryHParams
) -> None:
    corpus = make_corpus(random_users(12, 6, 96), vocabulary_size=100)
    assert Planted.read(corpus) is None
    made = plant_corpus(corpus, tmp_path / "planted", hparams, 5)
    found = Planted.read(made)
    assert found is not None
    assert (found.hparams, found.seed) == (hparams, 5)
    again = tmp_path / "again"
    again.mkdir()
    found.write(again, corpus.vocabulary)
    for path in (made.path / "planted").iterdir():
        assert path.read_bytes() == (again / "planted" / path.name).read_bytes()
    about = json.loads((again / "planted" / "planting.json").read_text())
    assert about["copies"] == found.copies == int(found.planting.insertions.sum())


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    data=st.data(),
)
def test_a_selection_counts_what_is_left(sizes: list[int], data: st.DataObject) -> None:
    """Against lists: each record is a canary or none, kept or not."""
    records = sum(sizes)
    canary = data.draw(st.lists(st.none() | st.integers(0, 2), min_size=records, max_size=records))
    kept = data.draw(st.lists(st.booleans(), min_size=records, max_size=records))
    at = [record for record in range(records) if canary[record] is not None]
    overlay = Overlay(np.array(at, np.int64), np.array([canary[record] for record in at], np.uint16))
    planned = np.array([9, 9, 9])
    planting = Planting(
        tuple(Canary(f"c{i}", (i,), 1, 1) for i in range(3)), overlay, planned, planned, planned, planned
    )
    user_offsets = np.cumsum([0, *sizes])
    left = planting.select(np.array(kept, bool), user_offsets)
    expected = [which for which, stays in zip(canary, kept, strict=True) if stays]
    owners = [user for user, size in enumerate(sizes) for _ in range(size)]
    held = [{canary[r] for r in range(records) if kept[r] and owners[r] == user} for user in range(len(sizes))]
    assert left.overlay.records.tolist() == [i for i, which in enumerate(expected) if which is not None]
    assert left.overlay.canaries.tolist() == [which for which in expected if which is not None]
    assert left.insertions.tolist() == [expected.count(i) for i in range(3)]
    assert left.sharers.tolist() == [sum(i in each for each in held) for i in range(3)]
    assert left.planned_sharers.tolist() == left.planned_insertions.tolist() == [9, 9, 9]
    whole = replace(planting).select(np.ones(records, bool), user_offsets)
    assert whole.overlay.records.tolist() == at
