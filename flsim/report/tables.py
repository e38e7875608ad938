"""Tables of a report: memorization with published values, contrasts, and extracted phrases."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.measures.built_in import PERPLEXITY
from flsim.measures.quantity import Quantity, flags
from flsim.report.blocks import Block, Cell, Fold, Note, Table, folded, number, plural
from flsim.report.contrasts import AT_CEILING, END
from flsim.report.gather import Gathered
from flsim.results.against_published import against
from flsim.results.columns import described, quantities_in
from flsim.results.pairs import WHAT_TO_DO
from flsim.results.store import RunResults
from flsim.results.tables import memorization_table
from flsim.show.differences import signed
from flsim.show.memorization import table_of_runs
from flsim.show.table import Table as ShownTable

Published = dict[RunResults, Mapping[str, Any]]


def blocks_of(table: ShownTable, caption: str, runs: Sequence[str] = ()) -> list[Block]:
    """Return a table of the command line as blocks of a page: all columns side by side, and all notes below."""
    columns = [*table.labels, *(column for unit in table.units for column in unit)]
    rows = [list(row) for row in zip(*([cell or "–" for cell in column.cells] for column in columns), strict=True)]
    headings = [column.heading for column in columns]
    if runs and "Run" not in headings:
        headings, rows = ["Run", *headings], [[name, *row] for name, row in zip(runs, rows, strict=True)]
    below, *others = (" ".join(part.split()) for part in table.below.split("\n\n"))
    notes = dict.fromkeys([*(column.note for column in columns if column.note), below])
    return [Table(caption, headings, rows, " ".join(notes)), *map(Note, others)]


def memorization(gathered: Gathered) -> list[Block]:
    """Return a table by setting over its seeds, if any has two or a published row, and a table of all runs."""
    published: Published = {run.results: row for run in gathered.runs if run.planned and (row := run.planned.published)}
    runs = _runs(gathered, published)
    if not published and all(len(setting.runs) == 1 for setting in gathered.settings):
        return runs
    table = table_of_runs(_compared(_over_seeds(gathered, published)))
    return [
        *blocks_of(table, "What was memorized, by setting, over its seeds"),
        Fold(f"Run by run: {plural(len(gathered.runs), 'run')}", runs),
    ]


def answer(gathered: Gathered, rows: int) -> list[Block]:
    """Return a table of the memorization of the first settings; a note before the first evaluation."""
    begun = [setting for setting in gathered.settings if setting.shown_runs]
    if not begun:
        return [Note("No run has been evaluated yet.")]
    frame = _over_seeds(gathered, {})
    evaluated = frame[[bool(setting.shown_runs) for setting in gathered.settings]]
    return blocks_of(table_of_runs(evaluated.head(rows)), "Means at the last evaluation")


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
    caption = "What was memorized, run by run, at each run’s last evaluation"
    return blocks_of(table, caption, [run.name for _, run in pairs])


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    return against(frame) if "published_table" in frame else frame


DAGGER = "†"
CONTRASTS = (
    "Each row is a mean of a − b over the pairs of settings that differ in this factor only, and in settings "
    "that always change with it, paired by seed. Both runs of a seed have the same canaries. Intervals and p: "
    "Student’s t over n seeds; of the flags of IID and non-IID runs p is exact, by exchanging them within "
    f"seeds (Fisher). {DAGGER}: one seed; Student’s t and McNemar’s exact test over its canaries, valid for "
    "these two models, not for other seeds. In brackets: p corrected by Holm for the number of rows with a "
    "test of the quantity. Equal perplexity: the lowest perplexity that both runs of a seed reached, with "
    "interpolation between evaluations."
)
SHORT = (
    "a − b: mean over pairs of settings that differ in this factor only, with its 95% interval and p over n seeds; in "
    f"brackets, p corrected by Holm. {DAGGER}: one seed, over its canaries. Flags are percentages of the planted "
    "canaries."
)
CEILING = (
    " At the ceiling: canaries whose exposure is the largest that |R| references can show. If there are many, a "
    f"difference near zero does not show that both are alike; {WHAT_TO_DO}"
)


def contrast_table(frame: pd.DataFrame, quantities: Sequence[Quantity], caption: str, note: str = "") -> Table:
    """Return rows of the frame of `flsim.report.contrasts` as a table; a quantity of all rows is in the caption."""
    known = {quantity.name: quantity for quantity in (*quantities, PERPLEXITY)}
    names, rows = list[str](), list[list[Cell]]()
    for row in frame.to_dict("records"):
        name, value, signed_value = _forms(known.get(row["quantity"]), row["at"])
        names.append(name)
        a, b, difference, low, high = (
            number(row[cell], value if cell.startswith("value") else signed_value)
            for cell in ("value_a", "value_b", "difference", "low", "high")
        )
        interval = "" if low == "–" else f"{low} to {high}"
        p = [number(row[cell], "{:.2g}") for cell in ("p", "p_holm")]
        cells = [a, b, _with_small(difference, interval), _with_small(p[0], f"({p[1]})" * (p[0] != "–"))]
        n = f"{row['n']:.0f}{f' {DAGGER}' * (row['unit'] == 'canaries')}"
        rows.append([_with_small(*_names(row)), name, *cells, n])
    headings = ["Contrast, a − b", "Quantity", "a", "b", "Difference", "p (Holm)", "n"]
    if len({*names}) == 1:
        rows = [[first, *others] for first, _, *others in rows]
        headings.remove("Quantity")
        caption = f"{caption}: {names[0][0].lower()}{names[0][1:]}"
    return Table(caption, headings, rows, note)


def _with_small(text: str, small: str) -> Cell:
    return Markup("{} <small>{}</small>").format(text, small) if small else text


def _names(row: Mapping[Any, Any]) -> tuple[str, str]:
    """Return the name of a contrast, with its factor, the common settings, and their number."""
    if not row["is_main"]:
        return str(row["setting"]), ""
    pairs = plural(row["pairs"], "pair") + (f" of {row['of_pairs']}" if row["pairs"] < row["of_pairs"] else "")
    return f"{row['a']} − {row['b']}", ", ".join(filter(None, (row["factor"], row["setting"], pairs)))


def _forms(quantity: Quantity | None, at: str) -> tuple[str, str, str]:
    """Return the name of a quantity with its unit, and the formats of its values and of their differences."""
    if quantity is None or quantity.name == AT_CEILING:
        return "At the ceiling, %", "{:.0f}", "{:+.0f}"
    if quantity.is_flag:
        return f"{quantity.heading}, %", "{:.0f}", "{:+.0f}"
    difference = f"{{:{signed(quantity)}}}" if quantity.of_canaries else "{:+.3g}"
    return quantity.phrase + ("" if at == END else ", equal perplexity"), quantity.format, difference


def contrast_blocks(frame: pd.DataFrame, quantities: Sequence[Quantity]) -> list[Block]:
    """Return all rows of the frame of contrasts, and the excluded runs."""
    if frame.empty:
        return [Note("No two settings differ in only one factor, so there is no comparison.")]
    order = list(dict.fromkeys(zip(frame["quantity"], frame["at"], strict=True)))
    places = [order.index(key) for key in zip(frame["quantity"], frame["at"], strict=True)]
    frame = frame.assign(place=places).sort_values("place", kind="stable")
    has_ceiling = bool((frame["quantity"] == AT_CEILING).any())
    note = CONTRASTS + CEILING * has_ceiling
    custom = [quantity for quantity in quantities if not quantity.is_standard and not quantity.beside]
    note += "".join(f" {quantity.title}: {quantity.sentence}" for quantity in custom)
    blocks = list[Block]()
    for is_main, caption in {
        True: "Each factor, with all other settings equal",
        False: "IID − non-IID in each setting",
    }.items():
        of_kind = frame[frame["is_main"] == is_main]
        if len(of_kind):
            table = contrast_table(of_kind, quantities, caption, "" if blocks else note)
            blocks += folded(table, caption, most=40) if blocks else [table]
    lost = frame[frame["left_out"].fillna("") != ""].to_dict("records")
    reasons = [
        f"{', '.join(filter(None, _names(row)))}{'' if row['at'] == END else ', equal perplexity'}: {row['left_out']}"
        for row in lost
    ]
    return [*blocks, *([Note(f"Excluded. {'. '.join(dict.fromkeys(reasons))}.")] if reasons else [])]


MOST = 20  # largest number of phrases of a run


def extracted(gathered: Gathered) -> list[Block]:
    """Return a table of the phrases that were extracted from each run's last evaluated model; none without any."""
    blocks: list[Block] = []
    for flag in [flag for flag in flags(gathered.quantities) if flag.outcome == "extracted"]:
        rows: list[list[Cell]] = []
        for setting in gathered.settings:
            for run, round_ in setting.shown_runs:
                roster, values = run.results.roster, run.results.of_canaries(flag.name, round_)
                if values is None or "words" not in roster:
                    continue
                phrases = [" ".join(words) for words in roster.loc[(values == 1).to_numpy(), "words"]]
                more = f"; and {len(phrases) - MOST} more" if len(phrases) > MOST else ""
                named = "; ".join(f"“{phrase}”" for phrase in phrases[:MOST]) + more
                rows += [[run.results.name, setting.label, f"{len(phrases)}", named]] if phrases else []
        if rows:
            note = "Complete phrases, by the ids of their canaries; `flsim canaries RUN` lists all canaries of a run."
            caption = f"Canaries {flag.outcome} by {flag.title}, in words"
            table = Table(caption, ["Run", "Setting", "Canaries", "Phrases"], rows, note)
            blocks += folded(table, "Phrases by run")
    return blocks
