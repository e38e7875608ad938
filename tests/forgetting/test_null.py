"""The level of the tests of `flsim forgetting` in the sweeps of `experiments/`, where nothing is memorized."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from documents import ROOT
from scipy.stats import binom

from flsim.attacks.forgetting.measure import measure, observations
from flsim.data.synthetic import make_synthetic
from flsim.results.rows import Row, frame
from flsim.results.store import read_run
from flsim.runs.folder import Run, participation
from flsim.runs.sweeps.definition import load, planned_runs, tier_of

LEVEL, SURE = 0.05, 0.999
SWEEPS = ("forgetting", "sharers", "recency", "decay", "order", "dp-forgetting")
DESIGNS = [
    *(pytest.param(name, "smoke", marks=pytest.mark.nightly) for name in SWEEPS),
    *(pytest.param(name, "small", marks=pytest.mark.nightly) for name in SWEEPS if name != "sharers"),
]
TEXT = (250, 1_000)  # words per user and vocabulary: which users hold a copy does not depend on the text
SMALL_MODEL = ("model.embedding=4", "model.units=4")  # no model is trained


def design(name: str, tier: str, folder: Path, skipped: str = "") -> pd.DataFrame:
    """Return the observations of runs of arm IN of a sweep, but a partition, whose canaries all have rank 1."""
    source = ROOT / "experiments" / f"{name}.toml"
    definition = load(source)
    chosen = tier_of(definition, tier, str(source))
    assert chosen.corpus.synthetic is not None
    words, vocabulary = TEXT
    small = replace(chosen.corpus.synthetic, words_per_user=words, vocabulary_size=vocabulary)
    make_synthetic(folder / "corpus", small, 0)
    tables = []
    for planned in planned_runs(definition, chosen, folder / "corpus", str(source), overrides=SMALL_MODEL):
        if planned.config.canaries.arm == "out" or planned.config.canaries.source == "heldout":
            continue  # natural text has no p-values by rank
        if planned.config.data.partition == skipped:
            continue
        run = Run.create(planned.config, folder / planned.name)
        evaluated = [round_ for round_ in range(1, run.rounds + 1) if run.is_evaluated_at(round_)]
        rows = [Row("", round_, "references", "", planned.config.evaluation.references) for round_ in evaluated]
        rows += [Row("", round_, "rank", canary.id, 1.0) for round_ in evaluated for canary in run.canaries]
        results = replace(read_run(run.path), rows=frame(rows))
        tables.append(observations(results, None, participation(run, run.rounds)))
    return pd.concat(tables, ignore_index=True)


def drawn_tests(observed: pd.DataFrame, draws: int) -> list[pd.DataFrame]:
    """Return the tests of so many draws in which each rank is uniform, whatever was planted."""
    rng, possible = np.random.default_rng(0), round(1 / observed["p_in"].min())
    tables = []
    for _ in range(draws):
        p = rng.integers(1, possible, len(observed), endpoint=True) / possible
        tables.append(measure(observed.assign(p_in=p, bits_in=-np.log2(p))).tests)
    return tables


def most(trials: int, families: int = 1) -> float:
    """Return how many of so many tests at 5% may find a difference, with a chance of one in 1,000 of any family."""
    return float(binom.ppf(1 - (1 - SURE) / families, trials, LEVEL))


def test_copies_do_not_differ_where_nothing_is_memorized(tmp_path: Path) -> None:
    """Groups of 1 and of 10 copies: the last use of one copy is earlier by rounds."""
    observed = design("forgetting", "smoke", tmp_path, skipped="iid")
    drawn = drawn_tests(observed[observed["copies"] != 4], 10)
    of_copies = [table.loc[table["differs"] == "copies", "p"] for table in drawn]
    assert {len(p) for p in of_copies} == {1}
    assert sum((p <= LEVEL).sum() for p in of_copies) <= most(len(drawn))


@pytest.mark.parametrize(("name", "tier"), DESIGNS)
def test_the_level_holds_in_every_shipped_design(name: str, tier: str, tmp_path: Path) -> None:
    """Of each pair of groups, and of all pairs after Holm's correction; a pair that is tested is so in each draw."""
    drawn = drawn_tests(design(name, tier, tmp_path), 60 if tier == "smoke" else 30)
    p = np.array([table["p"].to_numpy("float64", na_value=np.nan) for table in drawn])
    is_tested = np.isfinite(p).any(axis=0)
    assert is_tested.any()
    assert np.isfinite(p[:, is_tested]).all()
    wrong = (p[:, is_tested] <= LEVEL).sum(axis=0)
    assert wrong.max() <= most(len(drawn), is_tested.sum())
    assert sum((table["p_holm"] <= LEVEL).any() for table in drawn) <= most(len(drawn))
