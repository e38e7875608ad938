"""A run over a planted corpus trains on exactly the same records as a run that plants the canaries itself."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import populations
import pytest
from helpers import Experiment, MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flsim.base.errors import InputError
from flsim.canaries.defences import DeduplicationHParams, deduplicate
from flsim.canaries.planting import Overlay, Planting, plant
from flsim.canaries.population import PlantedCorpus, Population, make_twin, plant_corpus, settled
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Users
from flsim.runs.config import load
from flsim.runs.folder import Run

HPARAMS = CanaryHParams(p_u=(0.2,), p_e=(0.5, 1.0), count=2)


@pytest.fixture
def planted(experiment: Experiment) -> Corpus:
    corpus = Corpus.open(experiment.folder / "corpus")
    return plant_corpus(corpus, experiment.folder / "planted", HPARAMS, 3)


def without_canaries(experiment: Experiment, corpus: str) -> Path:
    """Write the configuration over that corpus, without [canaries], and return its path."""
    before, after = experiment.config.read_text().split("[canaries]")
    path = experiment.folder / "absent.toml"
    path.write_text(before.replace('"corpus"', f'"{corpus}"') + after[after.index("[model]") :])
    return path


def texts(users: Users) -> list[list[list[int]]]:
    return [[record.tolist() for record in users[user]] for user in range(len(users))]


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_a_planted_corpus_equals_a_runs_population(experiment: Experiment, planted: Corpus, partition: str) -> None:
    """All records and the rosters are equal, in both partitions."""
    runs, settings = [], ["seed=3", f"data.partition={partition}"]
    for corpus, name in (("corpus", "lazy"), ("planted", "eager")):
        config = load(experiment.config, [*settings, f"data.corpus={experiment.folder / corpus}"])
        runs.append(Run.create(config, experiment.folder / name))
    lazy, eager = (texts(run.users) for run in runs)
    assert lazy == eager
    assert runs[0].canaries == runs[1].canaries
    rosters = [pd.read_parquet(run.path / "planted" / "roster.parquet") for run in runs]
    assert rosters[0]["insertions"].sum() > 0
    pd.testing.assert_frame_equal(rosters[0], rosters[1])
    assert runs[0].config.digest == runs[1].config.digest
    if partition == "non-iid":
        assert texts(planted.split("train")) == lazy


def test_a_run_without_canary_settings_has_the_planted_canaries_and_resumes(
    experiment: Experiment, planted: Corpus
) -> None:
    config = load(without_canaries(experiment, "planted"), ["seed=7"])
    run = Run.create(config, experiment.folder / "run")
    assert load(run.path / "config.toml").canaries == HPARAMS
    found = PlantedCorpus.read(planted)
    assert found is not None
    assert run.canaries == found.planting.canaries  # for any seed of the run
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
        PlantedCorpus.read(planted)


@pytest.mark.parametrize("hparams", [HPARAMS, replace(HPARAMS, controls=3), replace(HPARAMS, coins=True)], ids=repr)
def test_what_is_written_is_read(
    make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]], tmp_path: Path, hparams: CanaryHParams
) -> None:
    corpus = make_corpus(random_users(12, 6, 96), vocabulary_size=100)
    assert PlantedCorpus.read(corpus) is None
    made = plant_corpus(corpus, tmp_path / "planted", hparams, 5)
    found = PlantedCorpus.read(made)
    assert found is not None
    assert (found.hparams, found.seed) == (hparams, 5)
    again = tmp_path / "again"
    again.mkdir()
    found.write(again, corpus.vocabulary)
    for path in (made.path / "planted").iterdir():
        assert path.read_bytes() == (again / "planted" / path.name).read_bytes()
    about = json.loads((again / "planted" / "planting.json").read_text())
    assert about["copies"] == found.copies == int(found.planting.insertions.sum())


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
def test_a_selection_counts_the_remaining_copies(sizes: list[int], data: st.DataObject) -> None:
    """Counts equal those of lists in which each record is a canary or not, and kept or not."""
    records = sum(sizes)
    canary = data.draw(st.lists(st.none() | st.integers(0, 2), min_size=records, max_size=records))
    kept = data.draw(st.lists(st.booleans(), min_size=records, max_size=records))
    at = [record for record in range(records) if canary[record] is not None]
    overlay = Overlay(np.array(at, np.int64), np.array([canary[record] for record in at], np.uint16))
    planned = np.array([9, 9, 9])
    canaries = tuple(Canary(f"c{i}", (i,), 1, 1) for i in range(3))
    planting = Planting(canaries, overlay, planned, planned, planned, planned)
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


# Canaries with exact numbers of copies: all copies are planted, in different and equally likely records.


def split_of(sizes: list[int]) -> Split:
    """Return users with so many records, each of three words that no canary has."""
    places = iter(range(sum(sizes)))
    return populations.split_of([[[1 + next(places) % 40, 2, 3] for _ in range(size)] for size in sizes])


def canaries_of(*copies: int) -> tuple[Canary, ...]:
    return tuple(Canary(f"c{i}", (50 + i, 60 + i), math.nan, math.nan, number) for i, number in enumerate(copies))


def held(users: Users, canaries: tuple[Canary, ...]) -> list[list[int]]:
    """Return, for each canary, the user of each copy, from the records of the users."""
    owners = [(tuple(record.tolist()), user) for user in range(len(users)) for record in users[user]]
    return [[user for phrase, user in owners if phrase == canary.tokens] for canary in canaries]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)


@settings(max_examples=60)
@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 999))
def test_users_hold_the_exact_copies_or_planting_is_refused(sizes: list[int], copies: list[int], seed: int) -> None:
    """No two copies share a record, planned and actual counts are equal, and the twin keeps every copy."""
    split, canaries, records = split_of(sizes), canaries_of(*copies), sum(sizes)
    if sum(copies) > records:
        with pytest.raises(InputError, match=f"^{sum(copies)} copies of canaries do not fit into {records} training"):
            plant(split, canaries, seed)
        return
    planting = plant(split, canaries, seed)
    phrases = tuple(np.array(canary.tokens, np.uint16) for canary in canaries)
    twin, overlay = make_twin(split, planting, seed)
    real = held(Population(split, phrases, planting.overlay), canaries)
    assert [len(of) for of in real] == copies
    assert [len(of) for of in held(Population(split, phrases, overlay, twin), canaries)] == copies
    assert len(set(planting.overlay.records.tolist())) == sum(copies)
    assert planting.insertions.tolist() == planting.planned_insertions.tolist() == copies
    assert planting.sharers.tolist() == planting.planned_sharers.tolist() == [len(set(of)) for of in real]
    assert [canary.copies for canary in canaries] == copies


@pytest.mark.parametrize("sizes", [[1, 3, 0, 20, 6], [10_010, 10_010]], ids=["small", "large"])
def test_all_records_are_equally_likely(sizes: list[int]) -> None:
    """Two chi-squared tests over 10 equal bins of records and 500 fixed seeds each fail falsely once in 10,000.

    The first test is of a canary's only copy, whose bins are independent. The second is of all seven copies: their bins
    are negatively correlated, because they are drawn without replacement from n records. The statistic of multinomial
    counts is then too small by the factor (n - 7) / (n - 1). In the case "large", numpy draws by another algorithm.
    """
    split, records, seeds = split_of(sizes), sum(sizes), 500
    bins = np.zeros((3, 10))
    for seed in range(seeds):
        overlay = plant(split, canaries_of(1, 4, 2), seed).overlay
        np.add.at(bins, (overlay.canaries, overlay.records * 10 // records), 1)
    assert bins.sum(axis=1).tolist() == [seeds, 4 * seeds, 2 * seeds]
    assert stats.chisquare(bins[0]).pvalue > 1e-4
    statistic = stats.chisquare(bins.sum(axis=0)).statistic * (records - 1) / (records - 7)
    assert stats.chi2.sf(statistic, 9) > 1e-4


def test_exact_copies_are_counted_in_a_corpus_and_after_deduplication(experiment: Experiment) -> None:
    corpus, hparams = Corpus.open(experiment.folder / "corpus"), CanaryHParams(insertions=(1, 4, 2), count=2)
    made = plant_corpus(corpus, experiment.folder / "made", hparams, 3)
    found = PlantedCorpus.read(made)
    assert found is not None
    assert (found.hparams, found.copies, found.present) == (hparams, 14, 6)
    assert [len(of) for of in held(made.split("train"), found.planting.canaries)] == [1, 1, 4, 4, 2, 2]
    assert settled(made, CanaryHParams()) == hparams
    with pytest.raises(InputError, match=r"canaries.count is 10, but .* planted with 2"):
        settled(made, CanaryHParams(insertions=(1, 4, 2)))
    with pytest.raises(InputError, match=r"canaries.insertions is \[7\], but .* planted with \[1, 4, 2\]"):
        settled(made, CanaryHParams(count=2, insertions=(7,)))
    left = PlantedCorpus.read(deduplicate(made, experiment.folder / "left", DeduplicationHParams()))
    assert left is not None
    assert left.planting.insertions.tolist() == [1] * 6
    assert left.planting.planned_insertions.tolist() == [1, 1, 4, 4, 2, 2]
    assert left.planting.canaries == found.planting.canaries
    assert PlantedCorpus.read(corpus) is None


def test_canaries_with_probabilities_keep_their_description(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """A corpus that is planted again keeps its digest: its description has no setting of exact copies."""
    corpus = make_corpus([[[1, 2], [3]]] * 3, vocabulary_size=100)
    made = plant_corpus(corpus, tmp_path / "made", CanaryHParams(p_u=(0.5,), p_e=(1.0,), count=1), 0)
    expected = {"p_u": [0.5], "p_e": [1.0], "count": 1, "length": 5}
    assert json.loads((made.path / "planted" / "planting.json").read_text())["canaries"] == expected
    assert made.manifest["parameters"]["steps"][-1]["canaries"] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["insertions=[0]"], "insertions must be at least 1, found 0"),
        (["insertions=[2, 2]"], "insertions must list different values, found [2, 2]"),
        (["insertions=[2]", "p_e=[0.5]"], "insertions and p_u, p_e both set how often canaries occur"),
        (["insertions=[1000]"], "10,000 copies of canaries do not fit into 192 training records; set fewer"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(experiment: Experiment, settings: list[str], message: str) -> None:
    (experiment.folder / "bare.toml").write_text('[data]\ncorpus = "corpus"\n[training]\ncohort = 6\n')
    overrides = [f"canaries.{setting}" for setting in settings]
    with pytest.raises(InputError, match=f"^.*{re.escape(message)}.*$"):
        Run.create(load(experiment.folder / "bare.toml", overrides), experiment.folder / "run")
    assert not (experiment.folder / "run").exists()
