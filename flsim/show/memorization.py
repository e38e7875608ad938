"""Memorization as text: tables by run and by series, with published values, and the canaries of a run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, flags, numbers, of_model, select_for
from flsim.results import published
from flsim.results.published import CLEARLY
from flsim.results.tables import FALSE_POSITIVE as FALSE_POSITIVE_RATE
from flsim.results.tables import (
    STANDARD,
    WINDOW,
    WRITTEN,
    is_in,
    mean_of,
    prefix_of,
    quantities_in,
    rounds_text,
    user_share,
)
from flsim.show.table import Column, Field, Table, columns_of, formatted, note, text_of

TUNED = "tuned"  # attribute of a table: sentences on the searches that chose settings
BATCHES = {"b_u": "users a round", "b_r": "records a step"}
LOWEST = "Lowest: of the configurations with a memorized canary, the one with the fewest copies."
CONTROLS = "Controls: canaries that were never planted; number of them that {} marks as memorized."
FALSE_POSITIVE = " {} marks each with a probability of 1 / (|R| + 1), here {}."
SHARE = "{}: shares of {} planted canaries."
SHARE_INTERVAL = "CI %: exact 95% interval of a share of canaries, treated as independent."
PAPER = "Paper: the published value of the column to its left."
MARKS = {"same": "=", "lower": "<", "higher": ">"}
VS = "vs: = the published share is in the 95% interval of flsim; <: flsim's share is lower; >: higher."
PAIRS = "Pairs: share of pairs of this row and another row that differ in the published direction."
TWIN = f"Twin: whether IID minus Non-IID has the published sign, for settings {CLEARLY}; a tie has no sign."
EPSILON = "Eps.: epsilon by the paper's convention / by a sound convention ({}), delta {}."
RECORD_EPSILON = "Rec. eps.: epsilon of one record, not of a user, by {}, delta {}."
WHOLE = "Test text: of {} complete test authors."
MIXED = (
    "Test text: of complete test authors in some rows, and of balanced users in other rows. These rows are not "
    "comparable."
)
ROUND = "Round: completed rounds; for central training (b_r), steps.\n"
EPOCH = "Epochs: number of records read in training, divided by the number of records.\n"
ALL_EPOCHS = "All after {} epochs; in an epoch, training reads as many records as the corpus has.\n"
ONE_SEED = "One seed a row: means and intervals are over the canaries of this seed and do not cover other seeds."
INTERVAL = "CI: half the 95% interval of {}, Student's t over canaries."
MEANS = "n: seeds{}. {}: means over seeds; SD: standard deviation over seeds."
DIVERGED = (
    "Div.: runs that diverged, an outcome. Means are over the other seeds, so rows with different seeds are "
    "not comparable. Paired means, such as IID minus Non-IID, exclude both runs of a diverged seed."
)
OVER_SEEDS = "CI_s: half the 95% interval of {}, Student's t over seeds: valid for other seeds."
OVER_CANARIES = "CI_c: the same over the canaries of all seeds, treated as independent: valid for these models only."


def table_of_runs(table: pd.DataFrame) -> Table:
    """Return a table by run or by series as text: the columns of the paper and related columns, with a legend.

    Run, round and status appear only if they matter: for equal settings, different rounds, or unfinished runs. Epochs
    replace different rounds if they are known for all runs.
    """
    labels, units = _columns(table)
    remarks = population(table) + progress(table, _is_unfinished(table))[1] + _remarks(table)
    remarks += agreement(table) + tuned(table)
    return Table(table, labels, units, legend(table) + remarks, remarks)


def _is_unfinished(table: pd.DataFrame) -> bool:
    return "status" in table and bool((table["status"] != "completed").any())


def _remarks(table: pd.DataFrame) -> str:
    if "seeds" in table:
        text, names, whys = "", "Excluded from " + table["setting"], table.get("left_out")
    else:
        text = note(ONE_SEED) if table["round"].notna().any() else ""
        names, whys = table["run"] + " " + table["status"], table.get("reason")
    known = pd.DataFrame({"name": names, "why": whys}).dropna()
    return text + "".join(note(f"{name}: {why}") for name, why in known.itertuples(index=False))


def _columns(table: pd.DataFrame) -> tuple[list[Column], list[list[Column]]]:
    """Return the columns that label a row, and units that stay together, in the order of the paper."""
    over_seeds, unfinished = "seeds" in table, _is_unfinished(table)
    labels = [Column("Setting", text_of(table["setting"]), is_number=False)]
    if table["setting"].duplicated().any():
        runs = table["runs"].str.split(", ").str[0] if over_seeds else table["run"]
        labels.append(Column("First run" if over_seeds else "Run", text_of(runs), is_number=False))
    labels += _seeds(table) if over_seeds else []
    quantities = [quantity for quantity in select_for(quantities_in(table), "table") if is_in(table, quantity)]
    units = [
        progress(table, unfinished)[0],
        [Column("Status", text_of(table["status"]), is_number=False, is_late=True)] if unfinished else [],
        *(unit for flag in flags(quantities) for unit in memorized(table, flag, "{:.1f}" if over_seeds else "{}")),
        *controls(table),
        *(means(table, number, quantities) for number in numbers(quantities) if not number.beside),
        *(utility(table, quantity) for quantity in of_model(quantities)),
        *epsilons(table),
    ]
    return labels, [unit for unit in units if unit]


def _seeds(table: pd.DataFrame) -> list[Column]:
    is_partial = "left_out" in table
    given = [f"/{given}" if is_partial else "" for given in table["given"]]
    cells = [f"{seeds}{rest}" for seeds, rest in zip(table["seeds"], given, strict=True)]
    columns = [Column("n", cells, note=MEANS.format("/given" if is_partial else "", ", ".join(map(_name, STANDARD))))]
    return columns + [Column("Div.", text_of(table["diverged"]), note=DIVERGED)] * bool((table["diverged"] > 0).any())


def _name(quantity: Quantity) -> str:
    """Return a quantity's heading, and for a mean also its title."""
    is_mean = quantity.of_canaries and not quantity.is_flag
    return f"{quantity.heading} ({quantity.title.lower()})" if is_mean else quantity.heading


def legend(table: pd.DataFrame) -> str:
    """Return a sentence that explains the standard columns and the batch sizes in the settings."""
    parts = [f"{flag.heading}: canaries {flag.outcome} by {flag.title}" for flag in flags(STANDARD)]
    parts += [f"{one.heading}: {one.caption.lower()}" for one in of_model(STANDARD) if table[one.name].notna().any()]
    settings = " ".join(table["setting"].dropna())
    parts += [f"{size}: {words}" for size, words in BATCHES.items() if size in settings]
    return note(f"{'; '.join(parts)}.")


def population(table: pd.DataFrame) -> str:
    """Return a sentence on the test text if the test users are complete authors."""
    if "whole_test_users" not in table:
        return ""
    evaluated = table[[quantity.name for quantity in of_model(STANDARD)]].notna().any(axis=1)
    if table.loc[evaluated, "whole_test_users"].isna().any():
        return note(MIXED)
    return note(WHOLE.format(_listed(table["whole_test_users"], "{:,}")))


def memorized(table: pd.DataFrame, flag: Quantity, template: str) -> list[list[Column]]:
    """Return the units of a flag: its count, or its share next to published ones, its interval and lowest setting."""
    name = flag.heading
    bounds = [
        "" if pd.isna(low) else f"{100 * low:.0f}-{100 * high:.0f}"
        for low, high in zip(table[f"{flag.name}_share_low"], table[f"{flag.name}_share_high"], strict=True)
    ]
    interval = Column("CI %", bounds, is_extra=True, note=SHARE_INTERVAL)
    counts = [text_of_count(count) for count in sorted(set(table["canaries"]))]
    note = "" if flag.is_standard else f"{name}: {flag.description}"
    if not published.has_shares(table):
        out_of = [f"/{text_of_count(count)}" if len(counts) > 1 else "" for count in table["canaries"]]
        cells = [cell and cell + rest for cell, rest in zip(formatted(table[flag.name], template), out_of, strict=True)]
        heading = f"{name} /{counts[0]}" if len(counts) == 1 else name
        return [[Column(heading, cells, note=note), interval, *_lowest(table, flag, "Lowest")]]
    source = published.source_of(table, flag.name)
    share, of_paper = published.measured(table, flag.name)[0], published.measured(table, source)[1]
    standard = ", ".join(f"{quantity.heading} %" for quantity in flags(QUANTITIES.values()) if quantity.is_standard)
    note = note or SHARE.format(standard, " to ".join(dict.fromkeys((counts[0], counts[-1]))))
    unit = [
        Column(f"{name} %", formatted(share, "{:.1f}", 100), note=note),
        interval,
        *columns_of(of_paper.to_frame("published_share"), [_paper("share", "{:.1f}", 100)]),
        *marks(table, source),
    ]
    lowest = _lowest(table, flag, f"{name} lowest")
    return [unit, lowest] if lowest else [unit]


def text_of_count(count: float) -> str:
    """Return a number of canaries, or a mean of such numbers over seeds, as text."""
    return f"{count:,.1f}".removesuffix(".0")


def controls(table: pd.DataFrame) -> list[list[Column]]:
    """Return the unit of canaries that were never planted, such as ``"1/0 of 12"``; empty if there are none."""
    if "controls" not in table:
        return []
    standard = [quantity for quantity in flags(QUANTITIES.values()) if quantity.is_standard]
    counts = [text_of(table[f"{flag.name}_controls"]) for flag in standard]
    cells = [
        f"{'/'.join(row)} of {number}" if number else ""
        for number, *row in zip(text_of(table["controls"]), *counts, strict=True)
    ]
    note = CONTROLS.format(" / ".join(flag.heading for flag in standard))
    ranked = " and ".join(flag.heading for flag in standard if flag.is_ranked)
    rates = _listed(table[FALSE_POSITIVE_RATE], "{:.2g}")
    return [[Column("Controls", cells, note=note + (FALSE_POSITIVE.format(ranked, rates) if rates else ""))]]


def _lowest(table: pd.DataFrame, flag: Quantity, heading: str) -> list[Column]:
    metric = flag.name
    if f"{metric}_lowest" not in table:
        return []
    return [
        Column(heading, text_of(table[f"{metric}_lowest"]), is_number=False, is_late=True, note=LOWEST),
        *columns_of(table, [_paper(f"{metric}_lowest")]),
    ]


def marks(table: pd.DataFrame, metric: str) -> list[Column]:
    """Return columns that mark agreement with published rows, if `flsim.results.published` compared them."""
    columns = []
    if f"{metric}_size" in table:
        cells = [MARKS.get(cell, "") for cell in text_of(table[f"{metric}_size"])]
        columns.append(Column("vs", cells, is_number=False, note=VS))
    pairs, twin = (
        Field("Pairs", f"{metric}_pairs", "{:.0f}%", 100, note=PAIRS),
        Field("Twin", f"{metric}_twin", note=TWIN),
    )
    # for counts, the marks of size and twins are enough
    return columns + columns_of(table, [twin] if metric in published.COUNTED else [pairs, twin])


def agreement(table: pd.DataFrame) -> str:
    """Return a sentence about each metric over all rows, if `flsim.results.published` compared them."""
    if not table.attrs.get(published.COMPARED):
        return ""
    judged = published.agreements(table)
    sentences = [published.sizes(table), *map(str, judged), *published.chance(judged)]
    return "\n" + "".join(note(sentence) for sentence in sentences if sentence)


def tuned(table: pd.DataFrame) -> str:
    """Return the sentences on the searches that chose settings of the runs, if there were any."""
    return "".join(f"\n{note(text)}" for text in table.attrs.get(TUNED, ()))


def means(table: pd.DataFrame, number: Quantity, quantities: Sequence[Quantity]) -> list[Column]:
    """Return the unit of a number: its mean over canaries, half its intervals, related means, and published values.

    Intervals are over the canaries of a run, or over seeds and over all canaries.
    """
    name, of_all = number.heading, prefix_of(number)
    intervals = [("CI", number.column, INTERVAL.format(name))]
    if over_seeds := "seeds" in table:
        intervals = [("CI_s", f"{of_all}seeds", OVER_SEEDS.format(name)), ("CI_c", f"{of_all}canaries", OVER_CANARIES)]
    halves = {f"{end}_half": (table[f"{end}_high"] - table[f"{end}_low"]) / 2 for _, end, _ in intervals}
    look: dict[str, Any] = {"template": number.format, "is_extra": not over_seeds}
    fields = [
        _mean(number, has_note=not (over_seeds and number.is_standard)),
        *(Field(heading, f"{end}_half", note=note, **look) for heading, end, note in intervals),
        *(replace(_mean(other), is_extra=True) for other in quantities if other.beside == number.name),
        _paper(number.name, number.format),
    ]
    return columns_of(table.assign(**halves), fields) + marks(table, number.name)


def _mean(number: Quantity, has_note: bool = True) -> Field:
    """Return the field of a number's mean over canaries."""
    note = f"{number.heading}: {number.note or f'mean over canaries, {number.sentence}'}"
    return Field(number.heading, mean_of(number), number.format, note=note if has_note else "")


def utility(table: pd.DataFrame, quantity: Quantity) -> list[Column]:
    """Return the unit of a number of the model, with its standard deviation over seeds."""
    name, look = quantity.name, (quantity.format, quantity.scale)
    note = "" if quantity.is_standard else f"{quantity.heading}: {quantity.sentence}"
    measured = Field(quantity.column_heading, name, *look, note=note)
    return columns_of(table, [measured, Field("SD", f"{name}_sd", *look), _paper(name, *look)])


def epsilons(table: pd.DataFrame) -> list[list[Column]]:
    """Return the units of a user's epsilon, such as ``"5.62/28.5"``, a dash for no convention, and of a record's."""
    units = []
    if "epsilon_sound" in table:
        pairs = zip(table["epsilon_paper"], table["epsilon_sound"], strict=True)
        cells = [
            "" if pd.isna(sound) else f"{'-' if pd.isna(paper) else _epsilon(paper)}/{_epsilon(sound)}"
            for paper, sound in pairs
        ]
        note = EPSILON.format(_listed(table["sound_convention"]), _listed(table["delta"], "{:.3g}"))
        further = [_paper("epsilon", "{:.3g}"), Field("Convention", "sound_convention", is_extra=True)]
        units.append([Column("Eps.", cells, note=note), *columns_of(table, further)])
    if "record_epsilon" in table:
        note = RECORD_EPSILON.format(_listed(table["record_convention"]), _listed(table["record_delta"], "{:.3g}"))
        epsilon = Field("Rec. eps.", "record_epsilon", "{:.3g}", note=note)
        convention = Field("Convention", "record_convention", is_extra=True)
        units.append(columns_of(table, [epsilon, _paper("record_epsilon", "{:.3g}"), convention]))
    return units


def _epsilon(value: float) -> str:
    """Return an epsilon with three digits; large values as integers."""
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def progress(table: pd.DataFrame, is_unfinished: bool = False) -> tuple[list[Column], str]:
    """Return columns and legend with the length of training of each row; no column if all are equal."""
    trained = table[table["round"].notna() | table["epochs"].notna()]
    # Rows over seeds without a common round still have a number of epochs.
    differ = trained["round"].nunique(dropna=False) > 1 or (len(trained) and trained["round"].isna().all())
    if differ and trained["epochs"].notna().all():
        cells = formatted(table["epochs"], "{:.3g}")
        texts = {cell for cell in cells if cell}
        if len(texts) == 1 and not is_unfinished:
            return [], ALL_EPOCHS.format(*texts)
        return [Column("Epochs", cells, is_late=True)], EPOCH
    if differ or is_unfinished:
        return [Column("Round", text_of(table["round"]), is_late=True)], ROUND
    return [], ""


def _paper(name: str, template: str = "", scale: float = 1) -> Field:
    return Field("Paper", f"published_{name}", template, scale, note=PAPER)


def _listed(values: "pd.Series[Any]", template: str = "{}") -> str:
    return ", ".join(dict.fromkeys(template.format(value) for value in values.dropna()))


P_U = Field(
    *("p_u", "shares", "{}"),
    note="p_u: probability that a user has the canary; p_e: probability that the canary replaces a record of such "
    "a user.",
)
P_E = Field("p_e", "p_e", "{:.6g}%", 100)
PLANNED = Field("Planned", "planned_insertions", "{:,}", note="Planned: records that were drawn for the canary.")
COUNTS = (
    Field(
        "Users", "sharers", "{:,}", note="Users: users that have the canary, with IID data before records are shuffled."
    ),
    Field("Copies", "insertions", "{:,}", note="Copies: records that are the canary."),
)
PLANTED = Field("Planted", "window", note="Planted: the rounds in which the copies exist.")
WROTE = "Beam search wrote: the known words, then the most likely continuation that it finds."


def table_of_canaries(table: pd.DataFrame) -> Table:
    """Return the table of `flsim.results.tables` as text."""
    displayed = table.assign(shares=["" if pd.isna(value) else user_share(float(value)) for value in table["p_u"]])
    if WINDOW[0] in table:
        displayed["window"] = [rounds_text(*bounds) for bounds in zip(*(table[name] for name in WINDOW), strict=True)]
    planted = [PLANNED] if table["p_u"].isna().all() else [P_U, P_E]
    fields = [[Field("Phrase", "phrase")], planted, COUNTS, [PLANTED]] if len(table) else []
    units = [columns_of(displayed, unit) for unit in fields]
    quantities = [quantity for quantity in quantities_in(table) if quantity.name in table and quantity.of_canaries]
    listed = [quantity for quantity in quantities if quantity.is_listed]
    units += [[_column(table, quantity)] for quantity in sorted(listed, key=lambda quantity: quantity.is_flag)]
    if WRITTEN in table:
        units.append([Column("Beam search wrote", text_of(table[WRITTEN]), is_number=False, is_late=True, note=WROTE)])
    return Table(table, columns_of(displayed, [Field("Canary", "canary")]), [unit for unit in units if unit])


def _column(table: pd.DataFrame, quantity: Quantity) -> Column:
    values = table[quantity.name]
    heading, text = quantity.heading, f"{quantity.description[:1].lower()}{quantity.description[1:]}"
    if not quantity.is_standard:
        heading, text = quantity.short, quantity.about or quantity.sentence
    note = f"{heading}: {text}"
    if quantity.is_flag:
        cells = ["unknown" if pd.isna(value) else "yes" if value else "no" for value in values]
    else:
        cells = formatted(values, quantity.format, quantity.scale)
    is_extra = quantity.is_standard and not quantity.is_ranked and not quantity.is_flag
    return Column(heading, cells, is_number=not quantity.is_flag, is_extra=is_extra, note=note)
