"""The benchmark of scale measures what it reports, at a size that a test can afford."""

import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.scale import PAPER_USERS, PUBLISHED, bench_scale, describe, drawn_extremes
from flsim.canaries.spec import Canary


@pytest.mark.nightly
def test_figures_of_a_small_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    measured = bench_scale(users=30)
    assert not list(tmp_path.iterdir())
    assert measured["users"] == measured["cohort"] == 30
    assert measured["canaries"] == 90
    # four bytes for each record, eight for each user, and two digests
    order = measured["bytes"]["iid"] - measured["bytes"]["non-iid"]
    assert order == pytest.approx(4 * measured["records"] + 8 * 31 + 2 * 84, abs=30)
    assert all(step["seconds"] > 0 for step in measured["steps"].values())
    assert all(name in describe(measured) for name in measured["steps"])


def test_published_extremes_are_within_the_law_at_the_papers_size() -> None:
    """The paper has 392,000 users with 237 records each. The largest number of sharers is that of 30 binomials."""
    canaries = [
        Canary(f"c{index}", (1, 2, 3, 4, 5), p_u, p_e)
        for index, (p_u, p_e) in enumerate(product((1 / 5_000, 3 / 50_000, 1 / 50_000), (0.01, 0.1, 1.0)))
        for _ in range(10)
    ]
    drawn = drawn_extremes(canaries, PAPER_USERS, 237 * PAPER_USERS, draws=3_000)
    low, high = np.quantile(drawn, [0.005, 0.995], axis=1)
    published = np.array(list(PUBLISHED.values()))
    assert (low <= published).all()
    assert (published <= high).all()
    law = stats.binom(PAPER_USERS, 1 / 5_000)  # for the 30 canaries with the most sharers
    assert law.ppf(0.005 ** (1 / 30)) == pytest.approx(low[1], abs=1)
    assert law.ppf(0.995 ** (1 / 30)) == pytest.approx(high[1], abs=2)
