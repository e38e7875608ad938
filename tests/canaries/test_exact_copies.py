"""Canaries of an exact number of copies: every copy is there, each in a record of its own, any of them as likely."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Experiment, MakeCorpus
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flsim import cli
from flsim.base.errors import InputError
from flsim.canaries.in_corpus import Planted, plant_corpus, settled
from flsim.canaries.planting import plant
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary, CanaryHParams, configurations
from flsim.canaries.twin import make_twin
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Records, Users
from flsim.data.vocabulary import Layout
from flsim.defences.deduplication import DeduplicationHParams, deduplicate
from flsim.runs.config import dump, load
from flsim.runs.folder import Run

EXACT = "canaries.insertions=[1, 4, 2]"


def split_of(sizes: list[int]) -> Split:
    """Users of so many records, each of three words that no canary has."""
    count = sum(sizes)
    flat = Records.from_lists([[1 + index % 40, 2, 3] for index in range(count)])
    return Split(Layout(100), flat.tokens, flat.offsets, np.cumsum([0, *sizes]), Path("nowhere"))


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


def test_other_seeds_choose_other_records() -> None:
    drawn = {tuple(plant(split_of([50] * 20), canaries_of(3, 5), seed).overlay.records.tolist()) for seed in range(50)}
    assert len(drawn) == 50  # of 1,000 over 8, more than 10^19: a false failure is less likely than 10^-16


@pytest.mark.parametrize("sizes", [[1, 3, 0, 20, 6], [10_010, 10_010]], ids=["small", "large"])
def test_any_record_is_as_likely(sizes: list[int]) -> None:
    """Chi-squared over 10 equal bins of records and 2,000 seeds, each false once in 10,000; the seeds are fixed.

    Of a canary's only copy, whose bins are independent; and of all seven, whose bins are negatively correlated, as they
    are drawn without replacement from n: the statistic of multinomial counts is then (n - 1) / (n - 7) too small. Large
    is where numpy draws by another algorithm.
    """
    split, records, seeds = split_of(sizes), sum(sizes), 2_000
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


def test_runs_hold_them_in_both_worlds_and_read_back_what_they_are(experiment: Experiment) -> None:
    """Two canaries of each of three numbers; the roster has no p_u nor p_e."""
    copies = [1, 1, 4, 4, 2, 2]
    for world in ("iid", "non-iid"):
        run = create(experiment, world, f"data.world={world}")
        assert [len(of) for of in held(run.users, run.canaries)] == copies
        assert [(canary.copies, canary.p_u, canary.p_e) for canary in run.canaries] == [
            (number, math.nan, math.nan)
            for number in copies  # the one NaN, so that canaries compare
        ]
        roster = pd.read_parquet(run.path / "planted" / "roster.parquet")
        assert roster["planned_insertions"].tolist() == roster["insertions"].tolist() == copies
        assert roster["planned_sharers"].tolist() == roster["sharers"].tolist()
        assert roster[["p_u", "p_e"]].isna().all(axis=None)
        assert Run.open(run.path).config.canaries == CanaryHParams(count=2, insertions=(1, 4, 2))
        assert Run.reopen(run.config, run.path).config == run.config


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
    ("kind", "digest", "series"),
    [
        (
            "federated",
            "3a6ca425865abb84a617b9daa2a37033f4012e4c00ba552e7aa287603d630f70",
            "6350b92fa21a7ba2b60c1684ef8774695b99aee89e788c9c67b339298288600c",
        ),
        (
            "central",
            "60ad27c060441954349d446724920767d8ae809ee6d498fdfd97d0c66efc4f76",
            "fbe6eeb4d7da8cfbfa1bdad7536a741620e2354f1c0ce8071260376d0d8fc434",
        ),
    ],
)
def test_runs_without_them_keep_their_digests(tmp_path: Path, kind: str, digest: str, series: str) -> None:
    """Those of the defaults at commit 463129d, before there were numbers of copies."""
    path = tmp_path / "run.toml"
    path.write_text(f'[data]\ncorpus = "corpus"\n[training]\nkind = "{kind}"\n')
    plain, exact = load(path), load(path, [EXACT])
    assert (plain.digest, plain.series) == (digest, series)
    assert exact.digest != plain.digest
    assert exact.digest != load(path, ["canaries.insertions=[1, 4]"]).digest
    dump(exact, tmp_path / "dumped.toml")
    assert load(tmp_path / "dumped.toml") == exact


def test_each_number_is_a_configuration() -> None:
    wanted = configurations(CanaryHParams(count=3, insertions=(9, 1)))
    assert Counter(copies for _, _, copies, *_ in wanted) == {9: 3, 1: 3}
    assert [copies for _, _, copies, *_ in wanted] == [9, 9, 9, 1, 1, 1]
    assert all(math.isnan(p_u) and math.isnan(p_e) for p_u, p_e, *_ in wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["insertions=[0]"], "insertions must be at least 1, found 0"),
        (["insertions=[2, 2]"], "insertions must list different values, found [2, 2]"),
        (["insertions=[2]", "p_u=[0.5]"], "insertions and p_u, p_e both say how often canaries occur"),
        (["insertions=[2]", "p_e=[0.5]"], "insertions and p_u, p_e both say how often canaries occur"),
        (["insertions=[1000]"], "10,000 copies of canaries do not fit into 192 training records; set fewer"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(experiment: Experiment, settings: list[str], message: str) -> None:
    (experiment.folder / "bare.toml").write_text('[data]\ncorpus = "corpus"\n[training]\ncohort = 6\n')
    overrides = [f"canaries.{setting}" for setting in settings]
    with pytest.raises(InputError, match=f"^.*{re.escape(message)}.*$"):
        Run.create(load(experiment.folder / "bare.toml", overrides), experiment.folder / "run")
    assert not (experiment.folder / "run").exists()
