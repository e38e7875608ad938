"""Canaries of an exact number of copies: every copy is there, each in a record of its own, any of them as likely."""

import json
import math
import re
from pathlib import Path

import numpy as np
import populations
import pytest
from helpers import Experiment, MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flsim import cli
from flsim.base.errors import InputError
from flsim.canaries.in_corpus import Planted, plant_corpus, settled
from flsim.canaries.planting import plant
from flsim.canaries.population import Population, make_twin
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Users
from flsim.defences.deduplication import DeduplicationHParams, deduplicate
from flsim.runs.config import load
from flsim.runs.folder import Run

EXACT = "canaries.insertions=[1, 4, 2]"


def split_of(sizes: list[int]) -> Split:
    """Users of so many records, each of three words that no canary has."""
    places = iter(range(sum(sizes)))
    return populations.split_of([[[1 + next(places) % 40, 2, 3] for _ in range(size)] for size in sizes])


def canaries_of(*copies: int) -> tuple[Canary, ...]:
    return tuple(Canary(f"c{i}", (50 + i, 60 + i), math.nan, math.nan, number) for i, number in enumerate(copies))


def held(users: Users, canaries: tuple[Canary, ...]) -> list[list[int]]:
    """For each canary, the user of each of its copies, from the users' own records."""
    owners = [(tuple(record.tolist()), user) for user in range(len(users)) for record in users[user]]
    return [[user for phrase, user in owners if phrase == canary.tokens] for canary in canaries]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)


@settings(max_examples=200)
@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 999))
def test_users_hold_exactly_as_many_copies_or_it_is_refused(sizes: list[int], copies: list[int], seed: int) -> None:
    """No two copies share a record, planned and actual counts agree, and the twin keeps every copy."""
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
    again = plant(split, canaries, seed).overlay
    assert again.records.tolist() == planting.overlay.records.tolist()
    assert again.canaries.tolist() == planting.overlay.canaries.tolist()


@pytest.mark.parametrize("sizes", [[1, 3, 0, 20, 6], [10_010, 10_010]], ids=["small", "large"])
def test_any_record_is_as_likely(sizes: list[int]) -> None:
    """Chi-squared over 10 equal bins of records and 500 seeds, each false once in 10,000; the seeds are fixed.

    Of a canary's only copy, whose bins are independent; and of all seven, whose bins are negatively correlated, as they
    are drawn without replacement from n: the statistic of multinomial counts is then (n - 1) / (n - 7) too small. Large
    is where numpy draws by another algorithm.
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


def create(experiment: Experiment, name: str, *overrides: str) -> Run:
    text = experiment.config.read_text().replace("p_u = [0.2]\np_e = [0.5, 1.0]\n", "")
    (experiment.folder / "exact.toml").write_text(text)
    return Run.create(load(experiment.folder / "exact.toml", [EXACT, *overrides]), experiment.folder / name)


def test_a_planted_corpus_is_what_a_run_would_plant_and_a_defence_counts_what_is_left(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted by the command, in this process."""
    corpus = Corpus.open(experiment.folder / "corpus")
    lazy = create(experiment, "lazy", "seed=3")
    monkeypatch.chdir(experiment.folder)
    command = "flsim data plant corpus --out made --config exact.toml --set seed=3 --set"
    monkeypatch.setattr("sys.argv", [*command.split(), EXACT])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    made = Corpus.open(experiment.folder / "made", verify=True)
    found = Planted.read(made)
    assert found is not None
    assert (found.hparams, found.copies, found.present) == (lazy.config.canaries, 14, 6)
    assert found.planting.canaries == lazy.canaries
    assert held(made.split("train"), lazy.canaries) == held(lazy.users, lazy.canaries)
    assert settled(made, CanaryHParams()) == lazy.config.canaries
    with pytest.raises(InputError, match=r"canaries.count is 10, but .* planted with 2"):
        settled(made, CanaryHParams(insertions=(1, 4, 2)))
    with pytest.raises(InputError, match=r"canaries.insertions is \[7\], but .* planted with \[1, 4, 2\]"):
        settled(made, CanaryHParams(count=2, insertions=(7,)))
    left = Planted.read(deduplicate(made, experiment.folder / "left", DeduplicationHParams()))
    assert left is not None
    assert left.planting.insertions.tolist() == [1] * 6
    assert left.planting.planned_insertions.tolist() == [1, 1, 4, 4, 2, 2]
    assert left.planting.canaries == lazy.canaries
    assert Planted.read(corpus) is None


def test_what_is_planted_by_probability_is_described_as_ever(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """So that a corpus that is planted again has the digest that it had before there were numbers of copies."""
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
        (["insertions=[2]", "p_u=[0.5]"], "insertions and p_u, p_e both set how often canaries occur"),
        (["insertions=[2]", "p_e=[0.5]"], "insertions and p_u, p_e both set how often canaries occur"),
        (["insertions=[1000]"], "10,000 copies of canaries do not fit into 192 training records; set fewer"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(experiment: Experiment, settings: list[str], message: str) -> None:
    (experiment.folder / "bare.toml").write_text('[data]\ncorpus = "corpus"\n[training]\ncohort = 6\n')
    overrides = [f"canaries.{setting}" for setting in settings]
    with pytest.raises(InputError, match=f"^.*{re.escape(message)}.*$"):
        Run.create(load(experiment.folder / "bare.toml", overrides), experiment.folder / "run")
    assert not (experiment.folder / "run").exists()
