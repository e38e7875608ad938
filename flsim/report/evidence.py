"""Sections of a report on evidence: results of attacks, claims of the ledger, and forgetting of canaries."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes

from flsim.attacks.audit import ranks
from flsim.attacks.audit.audit import audit_subject, pooled, tables
from flsim.attacks.audit.canary_users import CanaryUsers
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.subject import Subject, subject_of
from flsim.attacks.forgetting import plot as forgotten
from flsim.attacks.forgetting.measure import Forgetting, measure_forgetting
from flsim.attacks.forgetting.tables import success_table, summary_of, times_table
from flsim.attacks.membership import tables as attacks
from flsim.attacks.membership.plot import draw_attacks, names_of
from flsim.attacks.membership.stored import newest_rows
from flsim.base.arrays import Floats
from flsim.base.errors import InputError
from flsim.base.statistics import roc
from flsim.privacy.conventions import CONVENTIONS
from flsim.report.blocks import Block, Figure, Note, folded, listed, shown
from flsim.report.gather import Gathered, RunView, Setting
from flsim.show import figure as show
from flsim.show.plots import draw_roc
from flsim.show.table import Field

LABEL = Field("Setting", "label")
SIDES = (Field("In", "n_in", "{:,}"), Field("Out", "n_out", "{:,}"))
PROVEN = (
    "In and Out: canaries or canary users that were in training and that were not, or references of ranks. All figures "
    "are for one user, or one record. A canary of g users bounds the epsilon of one user by a g-th of the "
    "bound, so canaries of IID data, which many users share, prove little. A bound of 0 does not show privacy. All "
    "seeds: the ranks of the canaries of all seeds together. `flsim audit` has more."
)
ROC = (
    "Share that an attacker finds (TPR) at each false-positive rate (FPR), both on logarithmic scales. Dashed: chance. "
    "Dotted: the largest share that the ledger allows. A curve far above it contradicts the ledger; with few canaries, "
    "a curve can also be above it by chance, which the tests of the table account for."
)
MEMBERS = (
    "Members are records of training users that took part; non-members are records of authors who are held out, of "
    "equal lengths. Blind: AUROC of an attack that reads no model; yes: it is above 0.55, so the comparison is "
    "confounded. `flsim membership` has more."
)
NAMED = (
    "Share of members that each attack finds (TPR), by the share of false alarms among non-members (FPR), on "
    "logarithmic scales. Dashed: chance. Dotted: the largest share that the ledger allows. Shaded: the 95% interval of "
    "the attack with the largest area, which treats records as independent."
)
BLIND = (Field("Blind", "control_auroc", "{:.3f}"), Field("Confounded", "confounded"))
EXPOSURES = (
    "Median exposure against the rounds since a sharer of a canary last took part. Shaded: 95% intervals over seeds, "
    "or over canaries for one seed. Arm OUT is the twin run that plants no canaries."
)
ADVANTAGE = (
    "Log-perplexity of canaries in arm OUT minus that in arm IN after the same round, which is the effect of "
    "training on them: mean over canaries, then over seeds, with the 95% interval over seeds. Shaded: rounds in which "
    "canaries are planted."
)
CONVENTION = (
    "An ε has no meaning without its convention. “paper” is the paper’s: it takes S as the sensitivity to "
    "replacing a user, which can be 2S; the other convention is correct. No convention accounts for choosing "
    "settings on the same data, and the noise of a simulation is a function of its seed."
)
EPSILONS = (
    *(LABEL, Field("Convention", "convention"), Field("ε", "value", "{:.4g}"), Field("δ", "delta", "{:.3g}")),
    Field("Of one", "unit"),
    *(Field(name.capitalize(), name) for name in ("sampler", "relation", "sensitivity", "accountant", "conversion")),
    *(Field("Noise z", "noise", "{:g}"), Field("Rounds", "round", "{:,}")),
)


def proof(gathered: Gathered) -> list[Block]:
    """Return the tables of `flsim audit` and ROC curves, with the canaries of all seeds of a setting together."""
    audited, images = list[pd.DataFrame](), list[tuple[str, Markup]]()
    for index, setting in enumerate(gathered.settings):
        subjects = list[tuple[str, Subject]]()
        for run, round_ in setting.shown_runs:
            with suppress(InputError):  # an older run has no row
                subjects.append((_label(setting, run), subject_of(run.path, round_)))
        ranked = [subject for _, subject in subjects if len(subject.ranks)]
        users = [subject.canary_users for _, subject in subjects if subject.canary_users]
        users = [one for one in users if len(one.members) and len(one.others)]
        if ranked:
            images.append((setting.label, _roc_of_ranks(pooled(ranked), f"proof-{index}")))
        if users:
            claim = subjects[0][1].claim
            images.append((f"{setting.label}: canary users", _roc_of_users(users, claim, f"proof-users-{index}")))
        if len(ranked) > 1:
            subjects = [(name, replace(subject, ranks=subject.ranks[:0])) for name, subject in subjects]
            subjects.insert(0, (f"{setting.label}, all seeds", pooled(ranked)))
        audited += [audit_subject(subject).frame.assign(label=name) for name, subject in subjects]
    rows = pd.concat(audited, ignore_index=True) if audited else pd.DataFrame()
    if rows.empty:
        return []
    blocks = [block for title, table in tables(rows, [LABEL, *SIDES]).items() for block in shown(table, title, most=12)]
    return [*blocks, Note(PROVEN), *folded(Figure(ROC, images), "ROC curves", most=4)]


def _label(setting: Setting, run: RunView) -> str:
    return setting.label + (f", seed {run.results.seed}" if len(setting.shown_runs) > 1 else "")


def _roc_of_ranks(subject: Subject, id_: str) -> Markup:
    references, claim = subject.references, subject.claim
    curve = ranks.curve(subject.ranks.clip(max=references + 1), references)
    rates = np.geomspace(1 / (references + 1), 1.0, 60)
    least = claim.least_of_group(int(subject.groups.max())) if claim else None
    allowed = (rates, np.array([1 - least(1 - rate) for rate in rates])) if least else None
    return _roc(curve, (1 / (references + 1), 1 / len(subject.ranks)), allowed, id_)


def _roc_of_users(users: Sequence[CanaryUsers], claim: Claim | None, id_: str) -> Markup:
    members, others = np.concatenate([one.members for one in users]), np.concatenate([one.others for one in users])
    rates, points = np.geomspace(1 / len(others), 1.0, 60), roc(members, others)
    allowed = (rates, np.array([claim.curve.tpr(rate) for rate in rates])) if claim else None
    return _roc((points.fpr, points.tpr), (1 / len(others), 1 / len(members)), allowed, id_)


def _roc(
    points: tuple[Floats, Floats], lowest: tuple[float, float], allowed: tuple[Floats, Floats] | None, id_: str
) -> Markup:
    """Return a panel with steps through the points, from the lowest possible rates."""
    left, floor = lowest[0], min(lowest) / 2
    fpr, tpr = np.r_[left, points[0], 1.0], np.r_[floor, points[1], points[1][-1:]]
    steps = np.repeat(fpr, 2)[1:], np.repeat(tpr, 2)[:-1]
    found = {level: points[1][points[0] <= level * (1 + 1e-12)] for level in (0.001, 0.01, 0.1) if level >= left}
    rates = ", ".join(f"{max(tpr, default=0.0):.0%} at an FPR of {level:g}" for level, tpr in found.items())
    draw = partial(draw_roc, curves=[(0, *steps, "found")], lowest=(left, floor), allowed=allowed)
    return _rates(draw, id_, "Share found at each false-positive rate", f"Found: {rates or 'as drawn'}.")


def _rates(draw: Callable[[Axes], None], id_: str, title: str, description: str) -> Markup:
    """Return a panel with a drawing of rates."""
    figure, (axes,) = show.panels()
    draw(axes)
    axes.set_xlabel("FPR", loc="right", labelpad=2)
    show.label_above(axes, "TPR")
    return show.inline(figure, id_, title, description)


def membership(gathered: Gathered) -> list[Block]:
    """Return the table of `flsim membership` over the shown runs, and a figure of ROC curves; empty without rows."""
    stored = [
        (_label(setting, run), newest_rows(run.path, run.results.identity))
        for setting in gathered.settings
        for run, _ in setting.shown_runs
    ]
    attacked = [(name, rows) for name, rows in stored if len(rows)]
    if not attacked:
        return []
    every = pd.concat([rows.assign(label=name) for name, rows in attacked], ignore_index=True)
    every["confounded"] = every["is_confounded"].map({True: "yes", False: "no"})
    names, images = list(dict.fromkeys(names_of(every))), list[tuple[str, Markup]]()
    for index, (label, rows) in enumerate(attacked):
        draw = partial(draw_attacks, rows=rows, names=names)
        areas = zip(names_of(rows), rows["auroc"], strict=True)
        description = " ".join(f"{name}: area {area:.3f}." for name, area in areas)
        title = "True-positive rate by false-positive rate"
        images.append((label, _rates(draw, f"membership-{index}", title, description)))
    table = attacks.table(every, [LABEL], (*attacks.CONTROLS, *BLIND))
    shadows = [Note(attacks.SHADOWS)] if every["attack"].isin(["lira", "rmia"]).any() else []
    title = "How well attacks distinguish training records from other records"
    curves = folded(Figure(NAMED, images, list(enumerate(names))), "ROC curves of attacks", most=4)
    return [*shown(table, title, most=16), Note(MEMBERS), *shadows, *curves]


def privacy(gathered: Gathered) -> list[Block]:
    """Return the section on the mechanism of each setting, and on each epsilon with its convention."""
    spent = list[pd.DataFrame]()
    for setting in gathered.settings:
        for run, round_ in setting.shown_runs[:1]:
            rows = run.results.rows[(run.results.rows["round"] == round_) & (run.results.rows["canary"] == "")]
            named = rows["metric"].str.extract(r"^(?P<unit>record )?epsilon (?P<convention>.+)$").fillna({"unit": ""})
            rows = rows.assign(unit=named["unit"], convention=named["convention"]).dropna(subset="convention")
            rows["delta"] = [run.results.of_model(f"{unit}delta", round_) for unit in rows["unit"]]
            rows["unit"] = rows["unit"].str.strip().replace("", "user")
            noise = math.nan if run.config is None else run.config.privacy.noise_multiplier
            spent += [rows.assign(label=setting.label, noise=noise)] if len(rows) else []
    if not spent:
        return [Note("No run added noise, so no ε is finite: none of these runs is differentially private.")]
    table = pd.concat(spent, ignore_index=True)
    known = pd.DataFrame([asdict(convention) | {"convention": convention.name} for convention in CONVENTIONS])
    without = [setting.label for setting in gathered.settings if setting.label not in {*table["label"]}]
    configs = [run.config for setting in gathered.settings for run, _ in setting.shown_runs if run.config]
    notes = sorted({config.canaries.about_injections or "" for config in configs if config.privacy.mechanism == "dp"})
    notes += [f"Without noise, ε is infinite for: {'; '.join(without)}."] if without else []
    records = table.merge(known, "left", "convention").to_dict("records")
    caption = "ε at the last evaluation, by convention"
    return [*listed(caption, records, EPSILONS, CONVENTION), *(Note(text) for text in notes if text)]


def forgetting(gathered: Gathered) -> list[Block]:
    """Return the tables and figures of `flsim forgetting`; empty if canaries have no windows."""
    windowed = [run.path for run in gathered.runs if {"first_round", "last_round"} & {*run.results.roster}]
    if not windowed:
        return []
    try:
        measured = measure_forgetting(*windowed)
    except InputError as error:  # there is no arm IN yet, or the sampler is custom
        return [Note(f"Forgetting is not shown: {error}.")]
    blocks = shown(times_table(measured), "Forgetting of canaries after their last use")
    blocks.append(Note(summary_of(measured)))
    if len(measured.success):
        blocks += shown(success_table(measured), "Success of attacks by rounds since last use")
    return [*blocks, *forgetting_figures(measured), *map(Note, measured.notes)]


def forgetting_figures(measured: Forgetting) -> list[Figure]:
    """Return exposure by rounds since last use, and the effect of training by round, which needs arm OUT."""
    if measured.success["bits_in"].isna().all():
        return []
    of_windows, names = forgotten.panels_of(measured)
    figures, legend = list[Figure](), list(enumerate(names))
    for caption, kind, label, unit in (
        (EXPOSURES, "exposures", "rounds since last use", "bits"),
        (ADVANTAGE, "advantages", "rounds", "nats"),
    ):
        lines, images = [getattr(panel, kind) for panel in of_windows], list[tuple[str, Markup]]()
        for index, (panel, by_name) in enumerate(zip(of_windows, lines, strict=True)):
            if any(by_name.values()):
                figure, (axes,) = show.panels()
                show.scale(axes.yaxis, 0, 1, unit)
                forgotten.draw_lines(axes, by_name, names, forgotten.top_of(lines))
                if unit == "bits":
                    forgotten.scale_rounds(axes, by_name)
                else:
                    forgotten.mark_window(axes, panel)
                axes.set_xlabel(label, loc="right", labelpad=2)
                ends = ((name, points[0], points[-1]) for name, points in by_name.items() if points)
                description = " ".join(
                    f"{name}: from {first[1]:.1f} {unit} at {first[0]:,.0f} to {last[1]:.1f} at {last[0]:,.0f} {label}."
                    for name, first, last in ends
                )
                title = f"{panel.row['setting']}: {panel.window}"
                images.append((title, show.inline(figure, f"forgetting-{unit}-{index}", title, description)))
        of_kind = [(forgotten.OUTSIDE, forgotten.OUT)] if unit == "bits" else []
        figures += [Figure(caption, images, [*legend, *of_kind])] if images else []
    return figures
