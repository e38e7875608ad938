"""The section of a report on what an attacker can prove: curves on logarithmic scales, and canary users."""

import re

import numpy as np
from helpers import TESTED, Trained
from hypothesis import given
from hypothesis import strategies as st

from flsim.audits.audit import audit
from flsim.audits.ranks import curve
from flsim.audits.subject import subject_of
from flsim.report.gather import gather
from flsim.report.page import render
from flsim.report.svg import Axis, Panel, labels


@given(st.lists(st.integers(1, 21), min_size=1, max_size=30))
def test_a_curve_of_ranks_counts_those_up_to_each_rank(observed: list[int]) -> None:
    ranks = np.array(observed, float)
    fpr, tpr = curve(ranks, 20)
    assert np.round(fpr * 21).astype(int).tolist() == sorted(set(observed))
    assert tpr.tolist() == [np.mean(ranks <= rank) for rank in sorted(set(observed))]


def test_ticks_of_small_shares_are_told_apart() -> None:
    assert labels([1e-5, 1e-4, 0.01, 1]) == ["1e-05", "0.0001", "0.01", "1"]
    assert labels([0.0, 0.5, 1.0]) == ["0.0", "0.5", "1.0"]


def pixels(svg: str, kind: str) -> list[tuple[float, float]]:
    """The points of the only line of a style."""
    (path,) = re.findall(rf'<g class="s{kind}"><path class="l" d="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]


def test_a_report_draws_what_is_found_and_what_the_ledger_allows(trained_here: Trained) -> None:
    """Each corner of the staircase is read back from its pixels, and the line of the ledger from its own curve."""
    run = trained_here(*TESTED)
    subject = subject_of(run)
    page = render(gather([run]))
    section = page.partition("What an attacker can prove</h2>")[2].partition("</section>")[0]
    assert "the most that the ledger allows" in section
    first, of_users = re.findall(r"<svg role=.*?</svg>", section, re.DOTALL)
    references, canaries = subject.references, len(subject.ranks)
    low = 1 / (references + 1)
    panel = Panel(Axis(low, 1.0, is_log=True), Axis(min(low, 1 / canaries) / 2, 1.0, is_log=True))
    drawn = {(x, y) for x, y in pixels(first, "0")}
    for rank in sorted(set(subject.ranks.tolist())):
        x, y = panel.place(rank / (references + 1), float((subject.ranks <= rank).mean()))
        assert (round(x, 1), round(y, 1)) in drawn
    assert subject.claim is not None
    users = subject.canary_users
    assert users is not None
    low = 1 / len(users.others)
    panel = Panel(Axis(low, 1.0, is_log=True), Axis(min(low, 1 / len(users.members)) / 2, 1.0, is_log=True))
    line = pixels(of_users, "2")
    for rate, (x, y) in zip(np.geomspace(low, 1.0, len(line)), line, strict=True):
        expected = panel.place(float(rate), subject.claim.curve.tpr(float(rate)))
        assert abs(x - expected[0]) < 0.1
        assert abs(y - expected[1]) < 0.1
    assert "What canary users with random updates show" in section
    assert f"{len(users.members)} of 60" in section


def test_a_report_has_the_bound_of_coins(trained_here: Trained) -> None:
    run = trained_here("canaries.coins=true", "canaries.count=10", "canaries.p_u=[0.05]")
    (row,) = [row for row in audit(subject_of(run)).to_dict("records") if row["method"] == "epsilon, coins"]
    section = render(gather([run])).partition("What guesses of coins prove")[2].partition("</table>")[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section)
    assert f"{row['n_in']} of {row['n_in'] + row['n_out']}" in cells
    assert f"{row['detected']} of {2 * row['threshold']}" in cells
    assert f"{row['low']:.2f}" in cells


def test_a_run_with_nothing_to_prove_has_no_section(trained_here: Trained) -> None:
    assert "What an attacker can prove</h2>" not in render(gather([trained_here("canaries.count=0")]))
