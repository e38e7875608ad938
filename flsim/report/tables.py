"""Tables of memorization: the frames of flsim.results, column by column, with published values beside ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import flags
from flsim.report.blocks import Block, Cell, Fold, Heading, Prose, Table, left, plural
from flsim.report.cells import Cells
from flsim.report.gather import Gathered
from flsim.results.against_published import against, agreements, chance, sizes
from flsim.results.columns import described, quantities_in
from flsim.results.published import PREFIX
from flsim.results.store import RunResults
from flsim.results.tables import memorization_table

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
        blocks += [Prose(f"Against the paper: {' '.join(sentences)}", is_note=True)] if sentences else []
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
    headings = [
        left(text) for text in ("Here", "Published", "Its row", *(f"{flag.heading} lowest" for flag in STANDARD))
    ]
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
    own = {quantity.name: quantity for setting_frame in frames for quantity in quantities_in(setting_frame)}
    frame = _against(described(pd.concat(frames, ignore_index=True), own.values()))
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
    headings = [left("Setting"), Heading("Seeds"), *[Heading("Diverged")] * has_diverged]
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
    headings = [left("Run"), left("Setting")]
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
    frame: pd.DataFrame, headings: list[Heading], names: Sequence[list[Cell]], caption: str, note: str
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
        headings = [*headings, Heading(cells.heading(name), is_number)]
        for row, values in zip(rows, records, strict=True):
            row.append(cells.cell(name, values, is_number))
    if any(name.endswith("_size") for name in map(str, frame.columns)):
        note += SIZE
    own = [quantity for quantity in cells.quantities if not quantity.is_standard and not quantity.beside]
    return Table(caption, headings, rows, note + "".join(f" {quantity.title}: {quantity.sentence}" for quantity in own))
