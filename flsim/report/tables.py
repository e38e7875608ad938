"""What was memorized, as tables: the frames of flsim.results, column by column, published values beside ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import flags
from flsim.report.blocks import Block, Cell, Fold, Heading, Prose, Table, left, plural
from flsim.report.cells import Cells
from flsim.report.gather import Gathered
from flsim.results.against_published import against, agreements
from flsim.results.columns import described, quantities_in
from flsim.results.published import PREFIX
from flsim.results.seeds_table import seeds_table
from flsim.results.store import RunResults
from flsim.results.tables import memorization_table

Published = dict[RunResults, Mapping[str, Any]]
STANDARD = [flag for flag in flags(QUANTITIES.values()) if flag.is_standard]
# Columns that are a sentence of the note where all rows have the same.
SAME = {
    "canaries": "{:,} canaries are planted",
    "references": "|R| = {:,}",
    "sound_convention": "ε, sound: by the convention {}",
    "delta": "δ = {:.3g}",
    "record_convention": "ε, record’s: of one record, by the convention {}",
    "record_delta": "δ of one record = {:.3g}",
}
LOWEST = "Lowest: the (p_u, p_e) of the fewest expected insertions with a memorized canary."
SIZE = (
    " Beside a published share: whether ours is the same, which is that it lies in our exact 95% interval over all "
    "canaries, taken as independent, or else lower or higher."
)


def memorization(of: Gathered) -> list[Block]:
    """A row for each setting over its seeds, beside the published one, and one for each run.

    The runs alone where none has a second seed, nor a published row, which would leave paper too narrow for both.
    """
    published = _published(of)
    has_seeds = bool(published) or any(len(setting.runs) > 1 for setting in of.settings)
    table, found = _settings(of, published) if has_seeds else _runs(of, published)
    blocks: list[Block] = [table]
    if "published_table" in found:
        said = [str(each).replace("IID less Non-IID", "IID less non-IID") for each in agreements(found)]
        blocks += [Prose(f"Against the paper: {' '.join(said)}", is_note=True)] if said else []
        blocks.append(Fold("Which published row each setting stands for", [_stand_for(table, found)]))
    if has_seeds:
        blocks.append(Fold(f"Run by run: {plural(len(of.runs), 'run')}", [_runs(of, {})[0]]))
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
    headings = [
        left(text) for text in ("Here", "Published", "Its row", *(f"{flag.heading} lowest" for flag in STANDARD))
    ]
    return Table("Published rows, as their table has them", headings, rows)


def _settings(of: Gathered, published: Published) -> tuple[Table, pd.DataFrame]:
    frames = []
    for setting in of.settings:
        taken = [run.results for run, _ in setting.shown] or [run.results for run in setting.runs]
        try:
            point = setting.shown[0][1] if setting.is_unfinished else None
            frames.append(seeds_table(taken, round=point, published=published))
        except InputError:  # of unequal training, or of one seed twice: there is no mean
            frames.append(seeds_table(taken[:1], published=published))
    own = {quantity.name: quantity for each in frames for quantity in quantities_in(each)}
    frame = _against(described(pd.concat(frames, ignore_index=True), own.values()))
    names: list[list[Cell]] = [[setting.label, f"{len(setting.shown)}/{len(setting.runs)}"] for setting in of.settings]
    is_mean = any(len(setting.shown) > 1 for setting in of.settings)
    exposure = "seeds and canaries, with its 95% interval over seeds (Student’s t)" if is_mean else "canaries"
    note = (
        f"{_flags()} {PRIMARY.title}: mean over {exposure}. Seeds: those that are averaged, of all; "
        "diverged runs are left out, and unfinished ones where another is completed."
    )
    headings = [left("Setting"), Heading("Seeds")]
    caption = "What was memorized, by setting" + ": means over seeds, ± their standard deviation" * is_mean
    return _framed(frame, headings, names, caption, note), frame


def _flags() -> str:
    """A sentence that says what the standard flags are."""
    first, *others = STANDARD
    rest = "".join(f"; {flag.heading}: those that {flag.title} {flag.finds}" for flag in others)
    return f"{first.heading}: canaries {first.outcome} by {first.title}{rest}."


def _runs(of: Gathered, published: Published) -> tuple[Table, pd.DataFrame]:
    pairs = [(setting, run) for setting in of.settings for run in setting.runs]
    frame = _against(memorization_table([run.results for _, run in pairs], published=published))
    names: list[list[Cell]] = [[run.results.name, setting.label] for setting, run in pairs]
    headings = [left("Run"), left("Setting")]
    note = (
        f"{LOWEST} {PRIMARY.title}: mean over canaries, with its 95% interval over them (Student’s t), which says "
        "nothing of other seeds. A run that diverged has no numbers."
    )
    caption = "What was memorized, run by run, at each run’s last evaluation"
    return _framed(frame, headings, names, caption, note), frame


def _published(of: Gathered) -> Published:
    planned = [(run.results, run.planned.published) for run in of.runs if run.planned]
    return {results: row for results, row in planned if row}


def _against(frame: pd.DataFrame) -> pd.DataFrame:
    return against(frame) if "published_table" in frame else frame


def _framed(
    frame: pd.DataFrame, headings: list[Heading], names: Sequence[list[Cell]], caption: str, note: str
) -> Table:
    """All columns of a frame that say anything, behind the rows' names; what is the same in all rows is in the note."""
    rows = [list(each) for each in names]
    records, cells = frame.to_dict("records"), Cells(frame)
    for name in cells.names:
        if name in SAME and frame[name].nunique() == 1:
            note += f" {SAME[name].format(frame[name].dropna().iloc[0])}."
            continue
        is_number = bool(pd.api.types.is_numeric_dtype(frame[name]))
        headings = [*headings, Heading(cells.heading(name), is_number)]
        for row, values in zip(rows, records, strict=True):
            row.append(cells.cell(name, values, is_number))
    if any(name.endswith("_size") for name in map(str, frame.columns)):
        note += SIZE
    own = [quantity for quantity in cells.quantities if not quantity.is_standard and not quantity.beside]
    return Table(caption, headings, rows, note + "".join(f" {each.title}: {each.sentence}" for each in own))
