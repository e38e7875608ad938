"""Sections of a report: memorization with published values, contrasts, extracted phrases, and evidence of attacks."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.attacks.audit.audit import Subject, audit_subject, pooled, subject_of, tables
from flsim.attacks.forgetting import tables as forgotten
from flsim.attacks.forgetting.measure import Forgetting, measure_forgetting
from flsim.attacks.forgetting.tables import success_table, summary_of, times_table
from flsim.attacks.membership import tables as attacks
from flsim.attacks.membership.inference import newest_rows
from flsim.attacks.membership.tables import draw_attacks, names_of
from flsim.base.errors import InputError
from flsim.measures.built_in import PERPLEXITY, PRIMARY
from flsim.measures.quantity import flags
from flsim.privacy.conventions import CONVENTIONS
from flsim.report.figures import ALL_CONTRASTS, Block, Figure, Fold, Note, folded, listed, number, plural, shown
from flsim.report.gather import COUNTS, Gathered, RunView, Setting
from flsim.results.differences import END, MANY, TESTS, VALUES, WHAT_TO_DO
from flsim.results.published import against
from flsim.results.rows import RunResults
from flsim.results.tables import canary_table, described, epsilons_of, memorization_table, quantities_in
from flsim.show import figure as show
from flsim.show.differences import signed
from flsim.show.memorization import table_of_runs
from flsim.show.table import Column, Field

Published = dict[RunResults, Mapping[str, Any]]


def memorization(gathered: Gathered) -> list[Block]:
    """Return a table by setting over its seeds, if any has two or a published row, and a table of all runs."""
    published: Published = {run.results: row for run in gathered.runs if run.planned and (row := run.planned.published)}
    runs = _runs(gathered, published)
    if not published and all(len(setting.runs) == 1 for setting in gathered.settings):
        return runs
    table = table_of_runs(_compared(_over_seeds(gathered, published)))
    return [
        *shown(table, "What was memorized, by setting, over its seeds", most=40),
        Fold(f"Run by run: {plural(len(gathered.runs), 'run')}", runs),
    ]


def answer(gathered: Gathered, rows: int) -> list[Block]:
    """Return a table of the memorization of the first settings; a note before the first evaluation."""
    frame = _over_seeds(gathered, {})
    evaluated = frame[[bool(setting.shown_runs) for setting in gathered.settings]].head(rows)
    if evaluated.empty:
        return [Note("No run has been evaluated yet.")]
    return shown(table_of_runs(evaluated), "Means at the last evaluation")


def _over_seeds(gathered: Gathered, published: Published) -> pd.DataFrame:
    """Return the frame of all settings, each over the runs that its means are over."""
    frames = []
    for setting in gathered.settings:
        runs = [run.results for run in setting.runs]
        point = setting.shown_runs[0][1] if setting.is_unfinished else None
        try:
            frame = memorization_table(runs, round=point, published=published, by="series")
        except InputError:  # there is no mean, because training is unequal or a seed occurs twice
            frame = memorization_table(runs[:1], published=published, by="series")
        frames.append(frame.head(1).assign(setting=setting.label))
    quantities = {quantity.name: quantity for frame in frames for quantity in quantities_in(frame)}
    return described(pd.concat(frames, ignore_index=True), quantities.values())


def _runs(gathered: Gathered, published: Published) -> list[Block]:
    pairs = [(setting.label, run.results) for setting in gathered.settings for run in setting.runs]
    frame = memorization_table([run for _, run in pairs], published=published)
    table = table_of_runs(_compared(frame.assign(setting=[label for label, _ in pairs])))
    if "Run" not in {label.heading for label in table.labels}:
        names = Column("Run", [run.name for _, run in pairs], is_number=False)
        table = replace(table, labels=[names, *table.labels])
    return shown(table, "What was memorized, run by run, at each run’s last evaluation", most=len(pairs))


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    return against(frame) if "published_table" in frame else frame


CONTRASTS = (
    "Each row is a mean of a − b over the pairs of settings that differ in this factor only, and in settings that "
    "always change with it, paired by seed. Both runs of a seed have the same canaries. With several seeds, "
    "intervals and p are Student’s t over n seeds; p of the flags of a single pair of partitions is exact, by "
    "exchanging runs within seeds (Fisher). With one seed, they are Student’s t and McNemar’s exact test over its "
    "canaries, valid for these two models, not for other seeds. Holm: p corrected for the number of rows of the "
    "quantity. Equal perplexity: the lowest perplexity that both runs of a seed reached, with "
    "interpolation between evaluations. At the ceiling: canaries whose exposure is the largest that |R| references "
    f"can show. If there are many, a difference near zero does not show that both are alike; {WHAT_TO_DO}"
)
CONTRAST = (
    *(Field("Contrast, a − b", "row"), Field("Quantity", "name"), Field("a", "value_a", "{}")),
    *(Field("b", "value_b", "{}"), Field("Difference", "difference", "{}"), Field("95%", "interval", "{}")),
    *(Field("p", "p", "{:.2g}"), Field("Holm", "p_holm", "{:.2g}"), Field("n", "over", "{}")),
)
AT_CEILING = "at_ceiling"


def contrast_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of the frame of `flsim.report.gather` with their numbers as text, exposure first."""
    quantities = {quantity.name: quantity for quantity in quantities_in(frame)}
    order = [PRIMARY.name, *(one.name for one in flags(quantities.values())), *quantities, AT_CEILING]
    counts = frame[frame["quantity"] == "canaries"].set_index("row")["value_a"]
    frame = frame.astype(dict.fromkeys(VALUES, "float64"))
    frame = frame.assign(canaries=frame["row"].map(counts).astype("float64"))
    has_many = frame[["value_a", "value_b"]].max(axis=1) >= MANY * frame["canaries"]
    is_shown = frame["test"].isin(TESTS) | (frame["quantity"] == PERPLEXITY.name)
    frame = frame[(is_shown | ((frame["quantity"] == AT_CEILING) & has_many)) & frame["difference"].notna()]
    places = [(order.index(name), at != END) for name, at in zip(frame["quantity"], frame["at"], strict=True)]
    rows = []
    for _, row in sorted(zip(places, frame.to_dict("records"), strict=True), key=lambda pair: pair[0]):
        quantity = quantities.get(row["quantity"])
        if quantity is None or quantity.is_flag:
            name, scale = f"{quantity.heading if quantity else 'At the ceiling'}, %", 100 / row["canaries"]
            value, sign = "{:.0f}", "{:+.0f}"
        else:
            name, scale, value = (
                quantity.phrase + ", equal perplexity" * (row["at"] != END),
                quantity.scale,
                quantity.format,
            )
            sign = f"{{:{signed(quantity)}}}" if quantity.of_canaries else "{:+.3g}"
        texts: dict[str, str | None] = {side: number(row[side] * scale, value) for side in ("value_a", "value_b")}
        low, high, change = (number(row[end] * scale, sign) for end in ("low", "high", "difference"))
        texts |= {"difference": change, "interval": None if low == "–" else f"{low} to {high}"}
        over = None if pd.isna(row["test"]) else f"{row['n']} {row['over'] if row['n'] != 1 else row['over'][:-1]}"
        rows.append({str(key): cell for key, cell in row.items()} | texts | {"name": name, "over": over})
    return rows


def contrast_blocks(frame: pd.DataFrame) -> list[Block]:
    """Return all rows of the frame of contrasts, and the excluded runs."""
    if frame.empty:
        return [Note("No two settings differ in only one factor, so there is no comparison.")]
    blocks, notes = list[Block](), [CONTRASTS]
    compared = [one for one in quantities_in(frame) if one.name in {*frame["quantity"]}]
    custom = [one for one in compared if not one.is_standard and not one.beside]
    notes += [f"{one.title}: {one.sentence}" for one in custom]
    for caption, is_main in ALL_CONTRASTS.items():
        rows = contrast_rows(frame[frame["is_main"] == is_main])
        blocks += listed(caption, rows, CONTRAST, *notes, most=40 if is_main else 8)
        notes = [] if rows else notes
    lost = frame.dropna(subset="left_out")
    at = ["" if at == END else f", {at}" for at in lost["at"]]
    whys = [f"{row}{at}: {why}" for row, at, why in zip(lost["row"], at, lost["left_out"], strict=True)]
    return [*blocks, *([Note(f"Excluded. {'. '.join(dict.fromkeys(whys))}.")] if whys else [])]


CONFIGURATION = (
    "A configuration is p_u, the probability that a user shares a canary, and p_e, the probability that a record of a "
    "sharer is replaced by it; or a number of copies. Canaries, sharers and copies are those of all runs; counts are "
    "means. There are fewer actual copies if coins leave canaries out (canaries.coins), or if two canaries claim one "
    "record."
)


def configurations(gathered: Gathered) -> list[Block]:
    """Return how often canaries occur, by configuration, over all seeds."""
    rows = [
        {"label": f"{setting.label} ({setting.seeds})"} | {str(name): cell for name, cell in row.items()}
        for setting in gathered.settings
        for row in setting.outcomes([]).to_dict("records")
    ]
    fields = [Field("Setting", "label"), Field("Configuration", "planted")]
    fields += [Field("Canaries", "canaries", "{:,}"), *(Field(of, name, "{:,.1f}") for name, of in COUNTS.items())]
    return listed("Canaries that were planted", rows, fields, CONFIGURATION, most=16)


MOST = 20  # largest number of phrases of a run
PHRASES = (
    Field("Run", "run"),
    Field("Setting", "setting"),
    Field("Canaries", "count", "{:,}"),
    Field("Phrases", "words"),
)


def extracted(gathered: Gathered) -> list[Block]:
    """Return a table of the phrases that were extracted from each run's last evaluated model; none without any."""
    blocks: list[Block] = []
    for flag in [flag for flag in flags(gathered.quantities) if flag.outcome == "extracted"]:
        rows = list[dict[str, Any]]()
        for setting in gathered.settings:
            for run, round_ in setting.shown_runs:
                table = canary_table(run.results, round_)
                found = table.get(flag.name, pd.Series(False, table.index)).fillna(False).astype(bool)
                if phrases := table.loc[found, "phrase"].dropna().tolist():
                    more = [f"and {len(phrases) - MOST} more"] * (len(phrases) > MOST)
                    words = "; ".join([*(f"“{phrase}”" for phrase in phrases[:MOST]), *more])
                    cells = {"run": run.results.name, "setting": setting.label, "count": len(phrases)}
                    rows.append(cells | {"words": words})
        note = "Complete phrases, in the order of canary ids; `flsim canaries RUN` lists all canaries of a run."
        blocks += listed(f"Canaries {flag.outcome} by {flag.title}, in words", rows, PHRASES, note)
    return blocks


# Sections of a report on evidence: results of attacks, claims of the ledger, and forgetting of canaries.

LABEL = Field("Setting", "label")
SIDES = (Field("In", "n_in", "{:,}"), Field("Out", "n_out", "{:,}"))
PROVEN = (
    "In and Out: canaries or canary users that were in training and that were not, or references of ranks. All figures "
    "are for one user, or one record. A canary of g users bounds the epsilon of one user by a g-th of the "
    "bound, so canaries of IID data, which many users share, prove little. A bound of 0 does not show privacy. All "
    "seeds: the ranks of the canaries of all seeds together. `flsim audit` has more."
)
MEMBERS = (
    "Members are records of training users that took part; non-members are records of authors who are held out, of "
    "equal lengths. For a model trained elsewhere, members and non-members are canaries, or records of files. Blind: "
    "AUROC of an attack that reads no model; yes: it is above 0.55 and above chance, so the comparison is confounded. "
    "`flsim membership` has more."
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
    """Return the tables of `flsim audit`, with the canaries of all seeds of a setting together."""
    audited = list[pd.DataFrame]()
    for setting in gathered.settings:
        subjects = list[tuple[str, Subject]]()
        for run, round_ in setting.shown_runs:
            with suppress(InputError):  # an older run has no row
                subjects.append((_label(setting, run), subject_of(run.path, round_)))
        ranked = [subject for _, subject in subjects if len(subject.ranks)]
        if len(ranked) > 1:
            subjects = [(name, replace(subject, ranks=subject.ranks[:0])) for name, subject in subjects]
            subjects.insert(0, (f"{setting.label}, all seeds", pooled(ranked)))
        audited += [audit_subject(subject).frame.assign(label=name) for name, subject in subjects]
    rows = pd.concat(audited, ignore_index=True) if audited else pd.DataFrame()
    if rows.empty:
        return []
    blocks = [block for title, table in tables(rows, [LABEL, *SIDES]).items() for block in shown(table, title, most=12)]
    return [*blocks, Note(PROVEN)]


def _label(setting: Setting, run: RunView) -> str:
    return setting.label + (f", seed {run.results.seed}" if len(setting.shown_runs) > 1 else "")


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
    every["confounded"] = every["is_confounded"].map({True: "yes", False: "no"}).fillna("undecided")
    names, images = list(dict.fromkeys(names_of(every))), list[tuple[str, Markup]]()
    for index, (label, rows) in enumerate(attacked):
        figure, (axes,) = show.panels()
        draw_attacks(axes, rows=rows, names=names)
        axes.set_xlabel("FPR", loc="right", labelpad=2)
        show.label_above(axes, "TPR")
        areas = zip(names_of(rows), rows["auroc"], strict=True)
        description = " ".join(f"{name}: area {area:.3f}." for name, area in areas)
        title = "True-positive rate by false-positive rate"
        images.append((label, show.inline(figure, f"membership-{index}", title, description)))
    table = attacks.table(every, [LABEL], (*attacks.CONTROLS, *BLIND))
    shadows = [Note(attacks.SHADOWS)] if every["attack"].isin(["lira", "rmia"]).any() else []
    title = "How well attacks distinguish training records from other records"
    curves = folded(Figure(NAMED, images, list(enumerate(names))), "ROC curves of attacks", most=4)
    return [*shown(table, title, most=16), Note(MEMBERS), *shadows, *curves]


def _epsilons(run: RunView, round_: int) -> pd.DataFrame:
    noise = math.nan if run.config is None else run.config.privacy.noise_multiplier
    return epsilons_of(run.results, round_).drop(columns="run").reset_index(drop=True).assign(noise=noise)


def privacy(gathered: Gathered) -> list[Block]:
    """Return the section on privacy: noise and epsilons of each setting, or of each seed if its seeds differ."""
    spent, without = list[pd.DataFrame](), list[str]()
    unknown = [setting.label for setting in gathered.settings if not any(run.config for run in setting.runs)]
    for setting in gathered.settings:
        of_runs = [(_label(setting, run), _epsilons(run, round_)) for run, round_ in setting.shown_runs]
        if all(rows.equals(of_runs[0][1]) for _, rows in of_runs):
            of_runs = [(setting.label, rows) for _, rows in of_runs[:1]]
        spent += [rows.assign(label=label) for label, rows in of_runs if len(rows)]
        without += [label for label, rows in of_runs if not len(rows) and setting.label not in unknown]
    about = [Note(f"The privacy of training is not known for: {'; '.join(unknown)}.")] if unknown else []
    if len(unknown) == len(gathered.settings):
        return [*about]
    if not spent:
        return [Note("No run added noise, so no ε is finite: none of these runs is differentially private."), *about]
    table = pd.concat(spent, ignore_index=True)
    known = pd.DataFrame([asdict(convention) | {"convention": convention.name} for convention in CONVENTIONS])
    configs = [run.config for setting in gathered.settings for run, _ in setting.shown_runs if run.config]
    notes = sorted({config.canaries.about_injections or "" for config in configs if config.privacy.mechanism == "dp"})
    notes += [f"Without noise, ε is infinite for: {'; '.join(without)}."] if without else []
    records = table.merge(known, "left", "convention").to_dict("records")
    caption = "ε at the last evaluation, by convention"
    return [*listed(caption, records, EPSILONS, CONVENTION), *(Note(text) for text in notes if text), *about]


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
