"""Curves of an attacker's success on logarithmic scales, beside the most that the ledger allows."""

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from flsim.audits import ranks
from flsim.audits.subject import Subject
from flsim.base.statistics import roc
from flsim.report.blocks import Block, Cell, Figure, Fold, Group
from flsim.report.gather import Setting
from flsim.report.svg import Axis, Panel, Point

SHOWN = 4  # panels; more are folded
STEPS = 60  # points of the line that the ledger allows
FOUND, ALLOWED = 0, 2  # styles of lines
LEGEND = {FOUND: "found", ALLOWED: "the most that the ledger allows"}
CAPTION = (
    "Share that an attacker finds (TPR) at each false-positive rate (FPR), both on logarithmic scales. Dashed: chance. "
    "A curve far above the line that the ledger allows contradicts the ledger. Few canaries lift it there by chance, "
    "too; the tests of the tables account for that."
)
Floats = NDArray[np.float64]


def curves(audited: Sequence[tuple[Setting, Sequence[Subject]]]) -> list[Block]:
    """Return a figure with a panel for each setting's canaries, all seeds together, and one for its canary users."""
    panels: list[tuple[Cell, Markup]] = []
    has_claims = False
    for index, (setting, subjects) in enumerate(audited):
        ranked = [subject for subject in subjects if len(subject.ranks)]
        users = [subject for subject in subjects if subject.canary_users]
        has_claims |= any(subject.claim for subject in subjects)
        if ranked:
            panels.append((setting.label, _of_ranks(setting.label, ranked, f"proof-{index}")))
        if users:
            name = f"{setting.label}: canary users"
            panels.append((name, _of_users(name, users, f"proof-users-{index}")))
    legend = [(style, text) for style, text in LEGEND.items() if style == FOUND or has_claims]
    blocks: list[Block] = [Figure(CAPTION, [Group(panels[:SHOWN])], legend)] if panels else []
    if len(panels) > SHOWN:
        rest = Figure(f"{CAPTION} (continued)", [Group(panels[SHOWN:])], legend)
        blocks.append(Fold(f"{len(panels) - SHOWN} more panels", [rest]))
    return blocks


def _of_ranks(label: str, subjects: Sequence[Subject], id_: str) -> Markup:
    references = min(subject.references for subject in subjects)
    every = np.concatenate([subject.ranks for subject in subjects])
    fpr, tpr = ranks.curve(every.clip(max=references + 1), references)
    claim, largest = subjects[0].claim, max(int(subject.groups.max()) for subject in subjects)
    allowed = None
    if claim is not None:
        least = claim.least_of_group(largest)
        allowed = lambda rate: 1 - least(1 - rate)  # noqa: E731 (a function of one line)
    return _panel(label, (fpr, tpr), (1 / (references + 1), 1 / len(every)), allowed, id_)


def _of_users(label: str, subjects: Sequence[Subject], id_: str) -> Markup:
    every = [subject.canary_users for subject in subjects if subject.canary_users]
    members, others = (np.concatenate(side) for side in zip(*((one.members, one.others) for one in every), strict=True))
    claim = subjects[0].claim
    allowed = None if claim is None else claim.curve.tpr
    if not len(members) or not len(others):
        return _panel(label, (np.ones(1), np.ones(1)), (0.1, 0.1), allowed, id_)
    points = roc(members, others)
    return _panel(label, (points.fpr, points.tpr), (1 / len(others), 1 / len(members)), allowed, id_)


def _panel(
    label: str,
    points: tuple[Floats, Floats],
    lowest: tuple[float, float],
    allowed: Callable[[float], float] | None,
    id_: str,
) -> Markup:
    """Return a panel with steps through the points, from the lowest rates that there can be."""
    left, floor = lowest[0], min(lowest) / 2
    panel = Panel(Axis(left, 1.0, "FPR", is_log=True), Axis(floor, 1.0, "TPR", is_log=True))
    panel.threads([[(left, left), (1.0, 1.0)]], "no")
    if allowed is not None:
        rates = np.geomspace(left, 1.0, STEPS)
        panel.line([(rate, min(1.0, max(floor, allowed(rate)))) for rate in rates.tolist()], ALLOWED, has_markers=False)
    panel.line(_steps(*points, left, floor), FOUND, has_markers=False)
    told = ", ".join(
        f"{_share(points, level):.0%} at an FPR of {level:g}" for level in (0.001, 0.01, 0.1) if level >= left
    )
    return panel.render(id_, f"Share found at each false-positive rate, {label}", f"Found: {told}." if told else label)


def _share(points: tuple[Floats, Floats], level: float) -> float:
    """Return the share at the last point whose false-positive rate is at most the level."""
    fpr, tpr = points
    place = int(np.searchsorted(fpr, level * (1 + 1e-12), side="right"))
    return float(tpr[place - 1]) if place else 0.0


def _steps(fpr: Floats, tpr: Floats, left: float, floor: float) -> list[Point]:
    """Return a staircase through ascending points, cut at the left and the lower end of the panel."""
    steps: list[Point] = [(left, floor)]
    for x, y in zip(fpr.tolist(), tpr.tolist(), strict=True):
        place = max(x, left)
        steps += [(place, steps[-1][1]), (place, max(y, floor))]
    return [*steps, (1.0, steps[-1][1])]
