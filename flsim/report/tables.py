"""Tables of a report: what was memorized, with published values beside it, contrasts, and extracted phrases."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.measures.built_in import PERPLEXITY, PRIMARY, QUANTITIES
from flsim.measures.quantity import Quantity, flags, numbers, of_model, select_for
from flsim.report.blocks import Block, Cell, Fold, Note, Table, folded, number, plural
from flsim.report.contrasts import AT_CEILING, END
from flsim.report.gather import Gathered
from flsim.results.against_published import AGAINST, against, agreements, chance, sizes
from flsim.results.ceiling import WHAT_TO_DO
from flsim.results.columns import (
    FALSE_POSITIVE,
    columns_of,
    columns_over_seeds,
    described,
    is_in,
    mean_of,
    prefix_of,
    quantities_in,
)
from flsim.results.published import ASKED, BESIDE, FORMS, PREFIX, ROW_OF_QUESTION, has_counts
from flsim.results.store import RunResults
from flsim.results.tables import memorization_table
from flsim.show.differences import signed
from flsim.show.memorization import text_of_count

Form = tuple[str, str, float]  # heading, format ("count" of memorized canaries, or "canaries") and factor
TRAINED: dict[str, Form] = {"round": ("Round", "{:,.0f}", 1), "epochs": ("Epochs", "{:.3g}", 1)}
PLANTED: dict[str, Form] = {"canaries": ("planted", "canaries", 1), "controls": ("never planted", "{:,.0f}", 1)}
PRIVACY: dict[str, Form] = {
    "epsilon_paper": ("ε, paper’s", "{:.3g}", 1),
    "epsilon_sound": ("ε, sound", "{:.4g}", 1),
    "sound_convention": ("convention", "{}", 1),
    "epsilon": ("ε", "{:.3g}", 1),
    "delta": ("δ", "{:.2g}", 1),
    "record_epsilon": ("ε, record’s", "{:.3g}", 1),
    "record_convention": ("convention", "{}", 1),
    "record_delta": ("δ, record’s", "{:.2g}", 1),
    "references": ("|R|", "{:,.0f}", 1),
    "whole_test_users": ("whole test authors", "{:,.0f}", 1),
    "status": ("Status", "{}", 1),
}
# Columns in the sentences around a table, or elsewhere in the report.
ELSEWHERE = {
    *("setting", "series", "runs", "run", "seeds", "given", "diverged", "left_out", "reason"),
    *(f"{PREFIX}{name}" for name in ("table", "data", "setting", "canaries", "delta", *ROW_OF_QUESTION)),
    *ASKED,
    *AGAINST,
}


class Cells:
    """The columns of one frame that a report shows, and their cells.

    Args:
        frame: a table of `flsim.results.tables`.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self.quantities = [quantity for quantity in select_for(quantities_in(frame), "table") if is_in(frame, quantity)]
        self._forms = self._known()
        self._numbers = {mean_of(quantity): quantity for quantity in numbers(self.quantities)}

    def _known(self) -> dict[str, Form]:
        """Return the forms of known columns, in their order; other columns follow under their own names."""
        forms = dict(TRAINED)
        for flag in flags(self.quantities):
            forms[flag.name] = (flag.heading, "count", 1)
            forms[f"{flag.name}_lowest"] = (f"{flag.heading} lowest", "{}", 1)
        forms |= PLANTED
        for flag in flags(self.quantities):
            forms[f"{flag.name}_controls"] = (f"{flag.heading} of these", "{:,.0f}", 1)
        forms[FALSE_POSITIVE] = ("by chance", "{:.2g}", 1)
        for quantity in numbers(self.quantities):
            heading = quantity.title if quantity.beside else quantity.phrase
            forms[mean_of(quantity)] = (heading, _finer(quantity.format), quantity.scale)
        for quantity in of_model(self.quantities):
            forms[quantity.name] = (quantity.phrase, quantity.format, quantity.scale)
        return forms | FORMS | PRIVACY

    @property
    def names(self) -> list[str]:
        """Columns with values: known ones first, each followed by its published values."""
        frame, order = self._frame, {name: place for place, name in enumerate(self._forms)}

        def place(name: str) -> tuple[int, bool]:
            plain = name.removeprefix(PREFIX)
            ours = BESIDE.get(plain, plain) if name != plain else plain
            return order.get(ours if ours in frame else plain, len(order)), name != plain

        hidden = ELSEWHERE | self._within | ({"round"} if frame["epochs"].notna().any() else set())
        names = [str(name) for name in frame.columns if name not in hidden and frame[name].notna().any()]
        kept = [name for name in names if not name.endswith("_lowest") or name.removeprefix(PREFIX) in names]
        return sorted(kept, key=place)

    @property
    def _within(self) -> set[str]:
        """Columns that appear in another column's cell: deviations, and the ends of intervals."""
        names = {
            name for quantity in self.quantities for name in (*columns_of(quantity), *columns_over_seeds(quantity))
        }
        return names - {*self._forms}

    def heading(self, name: str) -> Cell:
        """Return the heading of a column."""
        plain = name.removeprefix(PREFIX)
        text = self._forms[plain][0] if plain in self._forms else plain.replace("_", " ")
        return text if plain == name else Markup("{}, <em>published</em>").format(text)

    def cell(self, name: str, row: Mapping[Any, Any], is_number: bool) -> Cell:
        """Return a value as text, with its spread or its total if the frame has one."""
        value, plain = row[name], name.removeprefix(PREFIX)
        if pd.isna(value):
            return "–"
        _, template, scale = self._forms.get(plain, ("", "{:.4g}", 1.0))
        if not is_number:
            return str(value)
        deviation = row.get(f"{name}_sd")
        spread = "" if deviation is None or pd.isna(deviation) else f" ± {_number(deviation * scale, template)}"
        if template == "count" and has_counts(row):
            canaries = row[f"{PREFIX}canaries" if plain != name else "canaries"]
            share, canaries = number(value / canaries, "{:.0%}"), text_of_count(canaries)
            size = row.get(f"{plain}_size") if plain != name else None
            judged = "" if size is None or pd.isna(size) else f"; {size}"
            return Markup("{} <small>{}{} of {}{}</small>").format(
                share, _number(value, template), spread, canaries, judged
            )
        text = _number(value * scale, template)
        for low, high in self._intervals(name, row):
            return Markup("{} <small>{} to {}</small>").format(text, low, high)
        return Markup("{} <small>{}</small>").format(text, spread) if spread else text

    def _intervals(self, name: str, row: Mapping[Any, Any]) -> Iterator[list[str]]:
        """Yield the ends of intervals of a mean over canaries: over seeds first, then over canaries."""
        quantity = self._numbers.get(name)
        for kind in (f"{prefix_of(quantity)}seeds", quantity.column) if quantity else ():
            ends = [row.get(f"{kind}_{end}") for end in ("low", "high")]
            if quantity and ends[0] is not None and not pd.isna(ends[0]):
                yield [number(end, quantity.format) for end in ends]


def _finer(template: str) -> str:
    """Return the format of a mean, with one decimal more than the format of a value if decimals are fixed."""
    return re.sub(r"\.(\d)f", lambda match: f".{int(match[1]) + 1}f", template)


def _number(value: Any, template: str) -> str:
    """Return a number as text; a mean of counts has a decimal."""
    return number(value).removesuffix(".0") if template in {"count", "canaries"} else number(value, template)


Published = dict[RunResults, Mapping[str, Any]]
STANDARD = [flag for flag in flags(QUANTITIES.values()) if flag.is_standard]
# Columns that are a sentence of the note where all rows have the same.
SAME = {
    "canaries": "{:,.4g} canaries are planted, and counts and means are of them",
    "false_positive_rate": "A canary that was never planted comes first by chance with probability {:.2g}, 1/(|R| + 1)",
    "references": "|R| = {:,}",
    "whole_test_users": "Accuracy and perplexity are of {:,} whole test authors",
    "sound_convention": "ε, sound: by the convention {}",
    "delta": "δ = {:.3g}",
    "record_convention": "ε, record’s: of one record, by the convention {}",
    "record_delta": "δ of one record = {:.3g}",
}
LOWEST = "Lowest: the (p_u, p_e) with a memorized canary and the fewest expected insertions."
SIZE = (
    " Beside a published share: whether our share is the same, lower or higher. It is the same if the published share "
    "lies in our exact 95% interval over all canaries, treated as independent."
)


def memorization(gathered: Gathered) -> list[Block]:
    """Return a table with a row for each setting over its seeds, beside the published row, and a table of all runs.

    Only the runs are shown if no setting has a second seed or a published row.
    """
    published = _published(gathered)
    has_seeds = bool(published) or any(len(setting.runs) > 1 for setting in gathered.settings)
    table, frame = _settings(gathered, published) if has_seeds else _runs(gathered, published)
    blocks: list[Block] = [table]
    if "published_table" in frame:
        judged = agreements(frame)
        sentences = [str(agreement).replace("IID less Non-IID", "IID less non-IID") for agreement in judged]
        sentences = [sentence for sentence in [sizes(frame), *sentences, *chance(judged)] if sentence]
        blocks += [Note(f"Against the paper: {' '.join(sentences)}")] if sentences else []
        blocks.append(Fold("Which published row each setting stands for", [_stand_for(table, frame)]))
    if has_seeds:
        blocks.append(Fold(f"Run by run: {plural(len(gathered.runs), 'run')}", [_runs(gathered, {})[0]]))
    return blocks


def _stand_for(table: Table, frame: pd.DataFrame) -> Table:
    rows: list[list[Cell]] = []
    for name, row in zip(table.rows, frame.to_dict("records"), strict=True):
        if not pd.isna(row["published_table"]):
            words = [row.get(f"published_{part}") for part in ("data", "setting")]
            what = ", ".join(str(word) for word in words if word is not None and not pd.isna(word))
            published = [row.get(f"{PREFIX}{flag.name}_lowest") for flag in STANDARD]
            lowest = ["–" if cell is None or pd.isna(cell) else str(cell) for cell in published]
            rows.append([name[0], f"Table {row['published_table']}", what, *lowest])
    headings = ["Here", "Published", "Its row", *(f"{flag.heading} lowest" for flag in STANDARD)]
    return Table("Published rows, as their table has them", headings, rows)


def _settings(gathered: Gathered, published: Published) -> tuple[Table, pd.DataFrame]:
    frames = []
    for setting in gathered.settings:
        taken = [run.results for run, _ in setting.shown_runs] or [run.results for run in setting.runs]
        try:
            point = setting.shown_runs[0][1] if setting.is_unfinished else None
            frames.append(memorization_table(taken, round=point, published=published, by="series"))
        except InputError:  # of unequal training, or of one seed twice: there is no mean
            frames.append(memorization_table(taken[:1], published=published, by="series"))
    quantities = {quantity.name: quantity for of_setting in frames for quantity in quantities_in(of_setting)}
    frame = _against(described(pd.concat(frames, ignore_index=True), quantities.values()))
    has_diverged = any(setting.diverged for setting in gathered.settings)
    names: list[list[Cell]] = [
        [setting.label, f"{len(setting.shown_runs)}/{len(setting.runs)}", *[str(setting.diverged)] * has_diverged]
        for setting in gathered.settings
    ]
    is_mean = any(len(setting.shown_runs) > 1 for setting in gathered.settings)
    exposure = "seeds and canaries, with its 95% interval over seeds (Student’s t)" if is_mean else "canaries"
    note = (
        f"{_flags()} {PRIMARY.title}: mean over {exposure}. Seeds: those that are averaged, of all; "
        "diverged runs are counted apart, and unfinished ones left out if another is completed."
    )
    note += (
        " Where a seed diverged, means are over the other seeds: rows of different seeds do not compare, and the "
        "paired table drops both runs of such a seed."
        if has_diverged
        else ""
    )
    headings = ["Setting", "Seeds", *["Diverged"] * has_diverged]
    caption = "What was memorized, by setting" + ": means over seeds, ± their standard deviation" * is_mean
    return _framed(frame, headings, names, caption, note), frame


def _flags() -> str:
    """Return a sentence that defines the standard flags."""
    first, *others = STANDARD
    rest = "".join(f"; {flag.heading}: those that {flag.title} {flag.finds}" for flag in others)
    return f"{first.heading}: canaries {first.outcome} by {first.title}{rest}."


def _runs(gathered: Gathered, published: Published) -> tuple[Table, pd.DataFrame]:
    pairs = [(setting, run) for setting in gathered.settings for run in setting.runs]
    frame = _against(memorization_table([run.results for _, run in pairs], published=published))
    names: list[list[Cell]] = [[run.results.name, setting.label] for setting, run in pairs]
    headings = ["Run", "Setting"]
    note = (
        f"{LOWEST} {PRIMARY.title}: mean over canaries, with its 95% interval over them (Student’s t), which says "
        "nothing about other seeds. A run that diverged has no numbers."
    )
    caption = "What was memorized, run by run, at each run’s last evaluation"
    return _framed(frame, headings, names, caption, note), frame


def _published(gathered: Gathered) -> Published:
    planned = [(run.results, run.planned.published) for run in gathered.runs if run.planned]
    return {results: row for results, row in planned if row}


def _against(frame: pd.DataFrame) -> pd.DataFrame:
    return against(frame) if "published_table" in frame else frame


def _framed(
    frame: pd.DataFrame, headings: Sequence[Cell], names: Sequence[list[Cell]], caption: str, note: str
) -> Table:
    """Return all columns of a frame that have values, behind the names of the rows.

    A value that is the same in all rows goes into the note.
    """
    rows = [list(row_names) for row_names in names]
    records, cells = frame.to_dict("records"), Cells(frame)
    for name in cells.names:
        if name in SAME and frame[name].nunique() == 1:
            note += f" {SAME[name].format(frame[name].dropna().iloc[0])}."
            continue
        is_number = bool(pd.api.types.is_numeric_dtype(frame[name]))
        headings = [*headings, cells.heading(name)]
        for row, values in zip(rows, records, strict=True):
            row.append(cells.cell(name, values, is_number))
    if any(name.endswith("_size") for name in map(str, frame.columns)):
        note += SIZE
    return Table(caption, headings, rows, note + _explained(cells.quantities))


DAGGER = "†"
CONTRASTS = (
    "Each row is a mean of a − b over the pairs of settings that differ in this factor only, and in what always "
    "changes with it, seed by seed. Both runs of a seed have the same canaries. Intervals and p: Student’s t over n "
    "seeds; of the flags of IID and non-IID runs p is exact, by exchanging them within seeds (Fisher). "
    f"{DAGGER}: one seed; Student’s t and McNemar’s exact test over its canaries, about these two models and not about "
    "other seeds. In brackets: p corrected by Holm for the number of rows with a test of the quantity. Equal "
    "perplexity: the lowest that both runs of a seed reached, by interpolation between evaluations."
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
    """Return the name of a contrast, and in other words its factor, what its settings share, and their number."""
    if not row["is_main"]:
        return str(row["setting"]), ""
    pairs = plural(row["pairs"], "pair") + (f" of {row['of_pairs']}" if row["pairs"] < row["of_pairs"] else "")
    return f"{row['a']} − {row['b']}", ", ".join(filter(None, (row["factor"], row["setting"], pairs)))


def means_table(gathered: Gathered, rows: int) -> list[Block]:
    """Return the means at the last evaluation of the first settings; nothing before the first evaluation."""
    quantities = [
        quantity
        for quantity in gathered.quantities
        if any(s.mean(quantity.name) is not None for s in gathered.settings)
    ]
    cells: list[list[Cell]] = []
    for setting in [setting for setting in gathered.settings if setting.shown_runs][:rows]:
        cells.append([setting.label + ", unfinished" * setting.is_unfinished, f"{len(setting.shown_runs)}"])
        for quantity in quantities:
            mean, count = setting.mean(quantity.name), text_of_count(setting.canaries)
            template = "{:.1f}" if quantity.is_flag else quantity.format
            text = number(None if mean is None else mean * quantity.scale, template)
            share = setting.share(quantity.name) if quantity.is_flag else None
            of_all = Markup("{} <small>{} of {}</small>").format(
                number(share, "{:.0%}"), text.removesuffix(".0"), count
            )
            cells[-1].append(text if share is None else of_all)
    headings = [
        "Setting",
        "Seeds",
        *(quantity.heading if quantity.is_flag else quantity.phrase for quantity in quantities),
    ]
    caption = "Means at the last evaluation"
    return [Table(caption, headings, cells)] if cells else [Note("No run has been evaluated yet.")]


def _forms(quantity: Quantity | None, at: str) -> tuple[str, str, str]:
    """Return the name of a quantity with its unit, and the formats of its values and of their differences."""
    if quantity is None or quantity.name == AT_CEILING:
        return "At the ceiling, %", "{:.0f}", "{:+.0f}"
    if quantity.is_flag:
        return f"{quantity.heading}, %", "{:.0f}", "{:+.0f}"
    difference = f"{{:{signed(quantity)}}}" if quantity.of_canaries else "{:+.3g}"
    return quantity.phrase + ("" if at == END else ", equal perplexity"), quantity.format, difference


def contrast_blocks(frame: pd.DataFrame, quantities: Sequence[Quantity]) -> list[Block]:
    """Return all rows of the frame of contrasts, and what was left out of them."""
    if frame.empty:
        return [Note("No two settings differ in one factor only, so there is nothing to compare here.")]
    order = list(dict.fromkeys(zip(frame["quantity"], frame["at"], strict=True)))
    places = [order.index(key) for key in zip(frame["quantity"], frame["at"], strict=True)]
    frame = frame.assign(place=places).sort_values("place", kind="stable")
    has_ceiling = bool((frame["quantity"] == AT_CEILING).any())
    note = CONTRASTS + CEILING * has_ceiling + _explained(quantities)
    blocks = list[Block]()
    for is_main, caption in {True: "Each factor, all else equal", False: "IID − non-IID in each setting"}.items():
        of_kind = frame[frame["is_main"] == is_main]
        if len(of_kind):
            table = contrast_table(of_kind, quantities, caption, "" if blocks else note)
            blocks += folded(table, caption, most=40) if blocks else [table]
    lost = frame[frame["left_out"].fillna("") != ""].to_dict("records")
    reasons = [
        f"{', '.join(filter(None, _names(row)))}{'' if row['at'] == END else ', equal perplexity'}: {row['left_out']}"
        for row in lost
    ]
    return [*blocks, *([Note(f"Left out. {'. '.join(dict.fromkeys(reasons))}.")] if reasons else [])]


def _explained(quantities: Sequence[Quantity]) -> str:
    """Return sentences about the quantities of custom measures."""
    custom = [quantity for quantity in quantities if not quantity.is_standard and not quantity.beside]
    return "".join(f" {quantity.title}: {quantity.sentence}" for quantity in custom)


MOST = 20  # phrases of a run


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
