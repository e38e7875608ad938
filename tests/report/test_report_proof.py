"""The section of a report on what an attacker can prove: curves on logarithmic scales, and canary users."""

import re

import numpy as np
from helpers import TESTED, Trained

from flsim.attacks.audit.audit import audit_subject
from flsim.attacks.audit.subject import subject_of
from flsim.report.gather import gather
from flsim.report.page import render
from flsim.show.figure import HEIGHT, WIDTH


def points(svg: str) -> list[tuple[float, float]]:
    """All points of the lines of a panel, in pixels."""
    return [
        (float(x), float(y))
        for path in re.findall(r'<path d="([^"]*)"', svg)
        for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)
    ]


def placed(x: float, y: float, low: tuple[float, float]) -> tuple[float, float]:
    """The pixels of a point on logarithmic scales that end at 1, within the margins of a panel."""
    (left, right, top, bottom), (wide, high) = (40, 10, 20, 34), (WIDTH, HEIGHT)
    shares = [1 - np.log(value) / np.log(end) for value, end in zip((x, y), low, strict=True)]
    return left + (wide - left - right) * shares[0], high - bottom - (high - top - bottom) * shares[1]


def is_drawn(svg: str, point: tuple[float, float]) -> bool:
    return bool((np.abs(np.array(points(svg)) - point).max(axis=1) < 0.11).any())


def test_a_report_draws_what_is_found_and_what_the_ledger_allows(trained_here: Trained) -> None:
    """Each corner of the staircase is read back from its pixels, and the line of the ledger from its own curve."""
    run = trained_here(*TESTED)
    subject = subject_of(run)
    page = render(gather([run]))
    section = page.partition("What an attacker can prove</h2>")[2].partition("</section>")[0]
    assert "the largest share that the ledger allows" in section
    of_ranks, of_users = re.findall(r"<svg role=.*?</svg>", section, re.DOTALL)
    references, canaries = subject.references, len(subject.ranks)
    low = 1 / (references + 1)
    for rank in sorted(set(subject.ranks.tolist())):
        found = float((subject.ranks <= rank).mean())
        assert is_drawn(of_ranks, placed(rank / (references + 1), found, (low, min(low, 1 / canaries) / 2)))
    users, claim = subject.canary_users, subject.claim
    assert users is not None
    assert claim is not None
    low = 1 / len(users.others)
    for rate in (low, 1.0):
        assert is_drawn(of_users, placed(rate, claim.curve.tpr(rate), (low, min(low, 1 / len(users.members)) / 2)))
    assert "epsilon, canary users by coins" in section


def test_a_report_has_the_rows_of_the_audit(trained_here: Trained) -> None:
    run = trained_here("canaries.coins=true", "canaries.count=10", "canaries.p_u=[0.05]")
    (row,) = [
        row for row in audit_subject(subject_of(run)).frame.to_dict("records") if row["method"] == "epsilon, coins"
    ]
    table = render(gather([run])).partition("Statements about epsilon")[2].partition("epsilon, coins</td>")[2]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table.partition("</tr>")[0])
    values = [row["kind"], f"{row['detected']}", f"{row['trials']}", "–", f"{row['low']:.2f}", f"{row['delta']:.2g}"]
    assert [cell for cell in cells if cell != "–"] == [value for value in values if value != "–"]
