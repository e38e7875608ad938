"""Sections of a report on evidence: results of attacks, claims of the ledger, and forgetting of canaries."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from flsim.attacks.audit import ranks
from flsim.attacks.audit.audit import of_canary_users, of_coins, of_ranks, pooled, rate_at
from flsim.attacks.audit.guesses import default_threshold
from flsim.attacks.audit.subject import Subject, subject_of
from flsim.attacks.audit.testing import in_words
from flsim.attacks.forgetting import advantage
from flsim.attacks.forgetting.measure import Forgetting, curve, measure_forgetting
from flsim.attacks.forgetting.tables import name_text, planted_text, rounds_text, time_text, window_text
from flsim.attacks.membership.stored import LEVELS, column, newest_rows
from flsim.base.errors import InputError
from flsim.base.statistics import roc
from flsim.privacy.conventions import CONVENTIONS
from flsim.report.blocks import Block, Cell, Figure, Note, Table, folded, number
from flsim.report.figures import roc_panel
from flsim.report.gather import Gathered, Setting
from flsim.show import figure as show

FOUND = (
    "Found: canaries up to the rank that a canary outside training has with the false-positive rate (FPR), of "
    "all canaries of all seeds. ε at least: a lower bound with 95% confidence for one user, or record, under "
    "replacing one and at δ = 0. For a canary of g users, the bound for one user is g times smaller. IID "
    "twins, whose canaries have many users, therefore prove little. A bound of 0 does not show privacy. "
    "`flsim audit` has more."
)
COINS = (
    "Coins decided which canaries were planted. Guessed: canaries with the highest and the lowest ranks; "
    "right: number of correct guesses. ε at least: a lower bound with 95% confidence at this δ, for replacing "
    "one user or record."
)
USERS = (
    "Canary users sent random updates as long as the clip norm. ε about: an estimate from the cosines of "
    "their vectors and the change of the model, which can exceed the true ε. ε at least: a lower bound with "
    "95% confidence, from guesses of the coins that decided who took part. Both are for one user, whose "
    "updates are in the sums or not."
)
ROC = (
    "Share that an attacker finds (TPR) at each false-positive rate (FPR), both on logarithmic scales. "
    "Dashed: chance. A curve far above the line that the ledger allows contradicts the ledger. With few "
    "canaries, a curve can also be above the line by chance; the tests of the tables account for this."
)
MEMBERS = (
    "Members are records of training users that took part; non-members are records of authors who are held "
    "out, of equal lengths. Attacks on users score records of the user that training did not read. AUROC: the "
    "probability that a member scores above a non-member, with a 95% interval by resampling authors. Named: "
    "share of members that score above all but this share of non-members. Untrained: the same attack on the "
    "model before training. Blind: an attack by length and word frequency only; above 0.55 the comparison is "
    "confounded. LiRA and RMIA: with the other seeds’ runs as shadow models, on targets that coins selected, "
    "with intervals by resampling targets. `flsim membership` has more."
)
NAMED = (
    "Share of members that each attack finds (TPR), by the share of false alarms among non-members (FPR), on "
    "logarithmic scales. Dashed: chance. Shaded: the 95% interval of the attack with the largest area, which "
    "treats records as independent."
)
ALLOWED = " Dotted: the largest share that the ledger of the run allows any attacker."
LEDGER = (
    " Ledger: whether the test refutes the ledger. At most: the largest ε at the ledger’s δ that "
    "the test can refute if all guesses are right. Cannot be tested: no outcome refutes the ledger."
)
Floats = NDArray[np.float64]
Audited = Mapping[Setting, Sequence[Subject]]


def proof(gathered: Gathered) -> list[Block]:
    """Return tables and ROC curves of each setting whose canaries were ranked, or that has canary users."""
    audited: dict[Setting, list[Subject]] = {setting: [] for setting in gathered.settings}
    for setting, of_setting in audited.items():
        for run, round_ in setting.shown_runs:
            with suppress(InputError):  # an older run has no row
                subject = subject_of(run.path, round_)
                of_setting += [subject] if len(subject.ranks) or subject.coins or subject.canary_users else []
    blocks = [*_ranks_table(audited), *_coins_table(audited), *_users_table(audited)]
    return [*blocks, *_roc_figures(audited)] if blocks else []


def _ranks_table(audited: Audited) -> list[Block]:
    of_settings = {setting: [one for one in subjects if len(one.ranks)] for setting, subjects in audited.items()}
    has_claims = any(subjects[0].claim for subjects in of_settings.values() if subjects)
    rows: list[list[Cell]] = []
    for setting, subjects in of_settings.items():
        if not subjects:
            continue
        subject = pooled(subjects)
        threshold = default_threshold(subject.references)
        rate = rate_at(subject, ranks.detection_at(subject.ranks, subject.references, threshold))
        proven = {row["method"]: row for row in of_ranks(subject, threshold)}
        share = f"{rate['estimate']:.0%} ({rate['low']:.0%} to {rate['high']:.0%})"
        low, epsilon = number(proven["epsilon"]["low"], "{:.2f}"), subject.claim and subject.claim.epsilon
        verdict = _verdict(proven.get("trade-off"))
        of_ledger = [number(rate["allowed"], "{:.1%}"), number(epsilon, "{:.3g}"), verdict]
        cells = [setting.label, f"{len(subjects)}", f"{rate['fpr']:.2g}", share, low]
        rows.append(cells + of_ledger * has_claims)
    headings = ["Setting", "Seeds", "FPR", "Found", "ε at least", *["Allowed", "Ledger’s ε", "Ledger"] * has_claims]
    title = "Detected canaries, and the resulting bounds"
    return [Table(title, headings, rows, FOUND + LEDGER * has_claims)] if rows else []


def _coins_table(audited: Audited) -> list[Block]:
    """Return a table with a row for each run whose planted canaries were selected by coins."""
    rows: list[list[Cell]] = []
    for setting, subject in _pairs(audited):
        proven = {row["method"]: row for row in of_coins(subject)}
        if (bound := proven.get("epsilon, coins")) is not None:
            planted = f"{bound['n_in']:,} of {bound['n_in'] + bound['n_out']:,}"
            guessed = f"{bound['detected']:,} of {2 * bound['threshold']:,}"
            cells = [planted, guessed, number(bound["delta"], "{:.2g}"), number(bound["low"], "{:.2f}")]
            rows.append(_tested(setting, subject, cells, proven.get("trade-off, coins")))
    headings = ["Run", "Planted", "Guessed right", "δ", "ε at least", "Ledger’s ε", "Ledger"]
    return [Table("Bounds from guesses of coins", headings, rows, COINS + LEDGER)] if rows else []


def _users_table(audited: Audited) -> list[Block]:
    """Return a table with a row for each run that has canary users."""
    rows: list[list[Cell]] = []
    for setting, subject in _pairs(audited):
        if users := subject.canary_users:
            proven = {row["method"]: row for row in of_canary_users(subject)}
            estimate = proven.get("epsilon, canary users", {}).get("estimate")
            bound = proven.get("epsilon, canary users by coins", {}).get("low")
            cells = [f"{len(users.members):,} of {len(users.cosines):,}", number(users.delta, "{:.2g}")]
            cells += [number(estimate, "{:.2f}"), number(bound, "{:.2f}")]
            rows.append(_tested(setting, subject, cells, proven.get("trade-off, canary users by coins")))
    headings = ["Run", "Canary users", "δ", "ε about", "ε at least", "Ledger’s ε", "Ledger"]
    return [Table("Evidence from canary users with random updates", headings, rows, USERS + LEDGER)] if rows else []


def _tested(setting: Setting, subject: Subject, cells: Sequence[Cell], test: Mapping[str, Any] | None) -> list[Cell]:
    """Return a row of a run: its name, cells, the ledger's epsilon, and whether the test refutes it."""
    epsilon = number(subject.claim and subject.claim.epsilon, "{:.3g}")
    return [_of_seed(setting.label, subject.results.seed), *cells, epsilon, _verdict(test)]


def _pairs(audited: Audited) -> list[tuple[Setting, Subject]]:
    return [(setting, subject) for setting, subjects in audited.items() for subject in subjects]


def _of_seed(label: str, seed: int | None) -> str:
    return label + ("" if seed is None else f", seed {seed}")


def _verdict(test: Mapping[str, Any] | None) -> str:
    return "–" if test is None else f"{in_words(test)} (at most {test['refutable']:.2f})"


def _roc_figures(audited: Audited) -> list[Block]:
    """Return a figure with a panel for the canaries of each setting, over all seeds, and for its canary users."""
    images: list[tuple[Cell, Markup]] = []
    for index, (setting, subjects) in enumerate(audited.items()):
        ranked = [subject for subject in subjects if len(subject.ranks)]
        users = [subject for subject in subjects if subject.canary_users]
        if ranked:
            images.append((setting.label, _roc_of_ranks(setting.label, ranked, f"proof-{index}")))
        if users:
            name = f"{setting.label}: canary users"
            images.append((name, _roc_of_users(name, users, f"proof-users-{index}")))
    has_claims = any(subject.claim for _, subject in _pairs(audited))
    legend = [(0, "found"), *[(2, "the largest rate that the ledger allows")] * has_claims]
    return folded(Figure(ROC, images, legend), "ROC curves", most=4)


def _roc_of_ranks(label: str, subjects: Sequence[Subject], id_: str) -> Markup:
    references = min(subject.references for subject in subjects)
    every = np.concatenate([subject.ranks for subject in subjects])
    points = ranks.curve(every.clip(max=references + 1), references)
    claim, largest = subjects[0].claim, max(int(subject.groups.max()) for subject in subjects)
    least = claim.least_of_group(largest) if claim else None
    allowed = (lambda rate: 1 - least(1 - rate)) if least else None
    return _roc(label, points, (1 / (references + 1), 1 / len(every)), allowed, id_)


def _roc_of_users(label: str, subjects: Sequence[Subject], id_: str) -> Markup:
    every = [subject.canary_users for subject in subjects if subject.canary_users]
    members, others = (np.concatenate(side) for side in zip(*((one.members, one.others) for one in every), strict=True))
    allowed = subjects[0].claim.curve.tpr if subjects[0].claim else None
    if not len(members) or not len(others):
        return _roc(label, (np.ones(1), np.ones(1)), (0.1, 0.1), allowed, id_)
    points = roc(members, others)
    return _roc(label, (points.fpr, points.tpr), (1 / len(others), 1 / len(members)), allowed, id_)


def _roc(
    label: str,
    points: tuple[Floats, Floats],
    lowest: tuple[float, float],
    allowed: Callable[[float], float] | None,
    id_: str,
) -> Markup:
    """Return a panel with steps through the points, from the lowest possible rates."""
    left, floor = lowest[0], min(lowest) / 2
    fpr, tpr = np.r_[left, points[0], 1.0], np.r_[floor, points[1], points[1][-1:]]
    steps = np.repeat(fpr, 2)[1:], np.repeat(tpr, 2)[:-1]

    def share(level: float) -> float:
        """Return the share at the last point whose false-positive rate is at most the level."""
        place = int(np.searchsorted(points[0], level * (1 + 1e-12), side="right"))
        return float(points[1][place - 1]) if place else 0.0

    rates = ", ".join(f"{share(level):.0%} at an FPR of {level:g}" for level in (0.001, 0.01, 0.1) if level >= left)
    title = f"Share found at each false-positive rate, {label}"
    most = np.vectorize(allowed, otypes=[float]) if allowed else None
    return roc_panel(title, id_, [(0, *steps)], (left, floor), f"Found: {rates}." if rates else label, allowed=most)


def membership(gathered: Gathered) -> list[Block]:
    """Return a table with a row for each attack on each shown run, and a figure of ROC curves; empty without rows."""
    attacked = [
        (setting.label if len(setting.shown_runs) == 1 else _of_seed(setting.label, run.results.seed), rows)
        for setting in gathered.settings
        for run, _ in setting.shown_runs
        if len(rows := _named_by_unit(newest_rows(run.path, run.results.identity)))
    ]
    if not attacked:
        return []
    every = pd.concat([rows for _, rows in attacked], ignore_index=True)
    areas = every.groupby("attack")["auroc"].mean().drop(["blind"], errors="ignore").sort_values(ascending=False)
    styles = {str(attack): style for style, attack in enumerate(areas.index[: len(show.LINES)])}
    has_claims = bool(every["epsilon"].notna().any())
    headings = ["Setting", "Attack", "In", "Out", "AUROC", *(f"Named at {100 * level:g}%" for level in LEVELS)]
    headings += [f"Allowed at {100 * level:g}%" for level in LEVELS if has_claims]
    cells = [_attack(name, row, has_claims) for name, rows in attacked for _, row in rows.iterrows()]
    table = Table(
        "How well attacks distinguish training records from other records",
        [*headings, "Untrained", "Blind"],
        cells,
        MEMBERS,
    )
    images: list[tuple[Cell, Markup]] = [
        (name, _attack_curves(rows, styles, index))
        for index, (name, rows) in enumerate(attacked)
        if rows["attack"].isin(styles).any()
    ]
    legend = [(style, attack) for attack, style in styles.items()]
    return [table, *folded(Figure(NAMED + ALLOWED * has_claims, images, legend), "ROC curves of attacks", most=4)]


def _named_by_unit(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows in which the names of attacks on users and authors contain the unit."""
    units = rows["unit"].where(rows["unit"] != "record", "")
    return rows.assign(attack=rows["attack"] + units.map(lambda unit: f" ({unit}s)" if unit else ""))


def _attack(name: str, row: "pd.Series[float]", has_claims: bool) -> list[Cell]:
    area = f"{row['auroc']:.3f} ({row['auroc_low']:.3f} to {row['auroc_high']:.3f})"
    cells: list[Cell] = [name, str(row["attack"]), f"{row['n_in']:,}", f"{row['n_out']:,}", area]
    cells += [number(row[column("tpr", level)], "{:.1%}") for level in LEVELS]
    cells += [number(row[column("allowed", level)], "{:.1%}") for level in LEVELS if has_claims]
    blind = number(row["control_auroc"], "{:.3f}") + (", confounded" if row["is_confounded"] else "")
    return [*cells, number(row["untrained_auroc"], "{:.3f}"), blind]


def _attack_curves(rows: pd.DataFrame, styles: Mapping[str, int], index: int) -> Markup:
    """Return a panel with a curve for each attack that has a style, of one run; the best attack has an interval."""
    low = min(1 / float(rows["n_out"].max()), 0.1)
    attacks = rows[rows["attack"].isin(styles)].sort_values("auroc", ascending=False).to_dict("records")
    lines = [(styles[row["attack"]], *_floats(row, "fpr", "tpr")) for row in attacks]
    best = attacks[0]
    band = _floats(best, "fpr", "low", "high")
    fpr, most = _floats(best, "fpr", "allowed")
    has_claim = bool(np.isfinite(most).any())
    description = " ".join(f"{row['attack']}: area {row['auroc']:.3f}." for row in attacks)
    title = "True-positive rate by false-positive rate"
    allowed = (lambda rates: np.interp(rates, fpr, most)) if has_claim else None
    return roc_panel(title, f"membership-{index}", lines, (low, low), description, band, allowed)


def _floats(row: Mapping[Any, Any], *names: str) -> tuple[Any, ...]:
    return tuple(np.array(list(row[f"curve_{name}"]), dtype="float64") for name in names)


def privacy(gathered: Gathered) -> list[Block]:
    """Return the section on the mechanism of each setting, and on each epsilon with its convention."""
    conventions = {convention.name: convention for convention in CONVENTIONS}
    rows = list[list[Cell]]()
    without = list[str]()
    for setting in gathered.settings:
        before = len(rows)
        for run, round_ in setting.shown_runs[:1]:
            noise = run.config.privacy.noise_multiplier if run.config else None
            measured = run.results.rows
            at = measured[(measured["round"] == round_) & (measured["canary"] == "")]
            spent = at[at["metric"].str.contains("epsilon ")]
            for metric, epsilon in zip(spent["metric"], spent["value"], strict=True):
                record = "record " * metric.startswith("record ")
                name = metric.removeprefix(record).removeprefix("epsilon ")
                how = conventions.get(name)
                parts = how and (how.sampler, how.relation, how.sensitivity, how.accountant, how.conversion or "–")
                delta = run.results.of_model(f"{record}delta", round_)
                cells = [
                    setting.label,
                    name,
                    number(epsilon, "{:.4g}"),
                    number(delta, "{:.3g}"),
                    record.strip() or "user",
                ]
                rows.append([*cells, *(parts or ["–"] * 5), number(noise, "{:g}"), f"{round_:,}"])
        without += [] if len(rows) > before else [setting.label]
    if not rows:
        return [Note("No run added noise, so no ε is finite: none of these runs is differentially private.")]
    headings = ["Setting", "Convention", "ε", "δ", "Of one", "Sampler", "Relation", "Sensitivity", "Accountant"]
    headings += ["Conversion", "Noise z", "Rounds"]
    note = (
        "An ε has no meaning without its convention. “paper” is the paper’s: it takes S as the sensitivity to "
        "replacing a user, which can be 2S; the other convention is correct. No convention accounts for choosing "
        "settings on the same data, and the noise of a simulation is a function of its seed."
    )
    configs = [run.config for setting in gathered.settings for run, _ in setting.shown_runs if run.config]
    notes = sorted({config.canaries.about_injections or "" for config in configs if config.privacy.mechanism == "dp"})
    notes += [f"Without noise, ε is infinite for: {'; '.join(without)}."] if without else []
    table = Table("ε at the last evaluation, by convention", headings, rows, note)
    return [table, *(Note(text) for text in notes if text)]


Points = list[tuple[float, float, float, float]]
OUT = len(show.LINES) - 1  # style of arm OUT
EXPOSURES = (
    "Exposure against the rounds since a sharer of a canary last took part. Shaded: 95% intervals over seeds, "
    "or over canaries for one seed. Arm OUT is the twin run that plants no canaries."
)
ADVANTAGE = (
    "Log-perplexity of canaries in arm OUT minus that in arm IN after the same round, which is the effect of "
    "training on them: mean over canaries, then over seeds, with the 95% interval over seeds."
)
TIMES = (
    "T: rounds since last use from which on the upper bound of the accuracy of telling the arms apart is at "
    "most {alpha:g}; > is censored. At best: the smallest accuracy that this number of canaries can show. "
    "Half by: evaluated rounds since the end of the window by which half of the canaries have had a rank that "
    "does not reveal them (p > 0.05). Remaining: share, at the end of training, of the nats by which training "
    "on canaries had lowered their log-perplexity when the window ended. Heuristic epsilon: ln(TPR / FPR) at "
    "a false-positive rate of 10% at the last k, which is no bound. Canaries are treated as independent. "
    "`flsim forgetting` has every k."
)


def forgetting(gathered: Gathered) -> list[Block]:
    """Return a table of forgetting times and a figure of exposure; empty if canaries have no windows."""
    windowed = [run for run in gathered.runs if {"first_round", "last_round"} & {*run.results.roster}]
    if not windowed:
        return []
    try:
        measured = measure_forgetting(*(run.path for run in windowed))
    except InputError as error:  # there is no arm IN yet, or the sampler is custom
        return [Note(f"Forgetting is not shown: {error}.")]
    return [times_table(measured), *forgetting_figures(measured), *(Note(text) for text in measured.notes)]


def times_table(measured: Forgetting) -> Table:
    """Return the table of forgetting times, a row for each group, with the attacks' precision at its last k."""
    last = measured.success.groupby("group").tail(1).set_index("group")  # `last` would skip missing values
    rows: list[list[Cell]] = []
    for row in measured.times.to_dict("records"):
        at_last = last.loc[row["group"]] if row["group"] in last.index else {}
        time = row["k_max"] if row["is_censored"] is True else row["time"]
        cells = [window_text(row), planted_text(row), f"{row['canaries'] - row['never_used']:,}"]
        cells += [
            number(row["k_max"], "{:,}"),
            time_text(time, row["is_censored"]),
            number(row["least_alpha"], "{:.2f}"),
        ]
        cells += [time_text(row["median_time"], row["median_is_censored"]), number(row["left"], "{:.0%}")]
        cells += [number(at_last.get("precision"), "{:.0%}"), number(at_last.get("heuristic_epsilon"), "{:.1f}")]
        rows.append([str(row["setting"]), *cells])
    headings = ["Setting", "Rounds", "Planted", "Canaries", "Last k", "T", "At best", "Half by", "Remaining"]
    headings += ["Precision", "Heuristic epsilon"]
    alpha = float(measured.times["alpha"].iloc[0])
    return Table("Forgetting of canaries after their last use", headings, rows, TIMES.format(alpha=alpha))


def forgetting_figures(measured: Forgetting) -> list[Figure]:
    """Return exposure by rounds since last use, and the effect of training by round, which needs arm OUT."""
    if measured.success["bits_in"].isna().all():
        return []
    names = list(dict.fromkeys(map(name_text, measured.times.to_dict("records"))))[:OUT]

    def by_style(table: pd.DataFrame, points: Callable[[pd.DataFrame], Points]) -> dict[int, Points]:
        groups = [(name_text(group.iloc[0].to_dict()), group) for _, group in table.groupby("group", sort=False)]
        return {names.index(name): points(group) for name, group in groups if name in names}

    windows = list(measured.windows())
    lines = [{OUT: curve(table, "out")} | by_style(table, lambda group: curve(group, "in")) for table in windows]
    top = 1.1 * float(measured.success["bits_in"].max())
    images = _windows(windows, lines, "rounds since last use", top, "bits")
    figures = [Figure(EXPOSURES, images, [*enumerate(names), (OUT, "arm OUT")])]
    lines = [by_style(table, advantage.curve) for table in windows]
    means = [mean for of_window in lines for points in of_window.values() for _, mean, *_ in points]
    if means and max(means) > 0:
        figures.append(
            Figure(ADVANTAGE, _windows(windows, lines, "rounds", 1.1 * max(means), "nats"), [*enumerate(names)])
        )
    return figures


def _windows(
    windows: Sequence[pd.DataFrame], lines: Sequence[Mapping[int, Points]], label: str, top: float, unit: str
) -> list[tuple[Cell, Markup]]:
    """Return a panel for each window of rounds in which canaries are planted."""
    images: list[tuple[Cell, Markup]] = []
    for index, (table, of_window) in enumerate(zip(windows, lines, strict=True)):
        figure, (axes,) = show.panels()
        last = max((at for points in of_window.values() for at, *_ in points), default=1.0)
        show.scale(axes.xaxis, 0, last or 1.0, label, is_whole=True)
        show.scale(axes.yaxis, 0, top, unit)
        description = []
        for style, points in of_window.items():
            if points:
                at, mean, low, high = np.array(points, dtype="float64").T
                known = np.isfinite(low)
                show.draw_band(axes, at[known], low[known], high[known], style)
                show.draw_line(axes, at, mean.clip(0, top), style)
                description.append(
                    f"From {mean[0]:.1f} {unit} at {at[0]:,.0f} to {mean[-1]:.1f} at {at[-1]:,.0f} {label}."
                )
        row = table.iloc[0].to_dict()
        title = f"{row['setting']}: planted in {rounds_text(row)}"
        images.append(
            (title, show.inline(figure, f"forgetting-{unit}-{index}", title, " ".join(description) or "No points."))
        )
    return images
