"""What was memorized, as tables: the frames of flsim.results, column by column, published values beside ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.report.blocks import Block, Cell, Fold, Heading, Prose, Table, left, number, plural
from flsim.report.gather import Gathered
from flsim.results.against_published import against, agreements
from flsim.results.seeds_table import seeds_table
from flsim.results.store import RunResults
from flsim.results.tables import memorization_table

# Heading, format and factor of the columns that are known, in their order; others follow under their own names. The
# format "count" is of canaries.
KNOWN: dict[str, tuple[str, str, float]] = {
    "round": ("Round", "{:,.0f}", 1),
    "epochs": ("Epochs", "{:.3g}", 1),
    "rs": ("RS", "count", 1),
    "rs_lowest": ("RS lowest", "{}", 1),
    "bs": ("BS", "count", 1),
    "bs_lowest": ("BS lowest", "{}", 1),
    "canaries": ("of", "{:.0f}", 1),
    "extracted": ("Extracted", "{:.3g}", 1),
    "mean_exposure": ("Exposure, bits", "{:.2f}", 1),
    "mean_space_exposure": ("whole space", "{:.2f}", 1),
    "exposure": ("Exposure, bits", "{:.1f}", 1),
    "accuracy": ("Accuracy, %", "{:.1f}", 100),
    "perplexity": ("Perplexity", "{:.1f}", 1),
    "test_loss": ("Test loss", "{:.3g}", 1),
    "epsilon_paper": ("ε, paper’s", "{:.3g}", 1),
    "epsilon_sound": ("ε, sound", "{:.4g}", 1),
    "sound_convention": ("convention", "{}", 1),
    "epsilon": ("ε", "{:.3g}", 1),
    "delta": ("δ", "{:.2g}", 1),
    "record_epsilon": ("ε, record’s", "{:.3g}", 1),
    "record_convention": ("convention", "{}", 1),
    "record_delta": ("δ, record’s", "{:.2g}", 1),
    "references": ("|R|", "{:,.0f}", 1),
    "status": ("Status", "{}", 1),
}
PUBLISHED = "published_"
Published = dict[RunResults, Mapping[str, Any]]
BESIDE = {"exposure": "mean_exposure", "extracted": "bs", "epsilon": "epsilon_paper"}  # published column -> ours
# Columns within another's cell, in the sentences below, or elsewhere in the report.
WITHIN = {
    *("setting", "series", "runs", "run", "seeds", "given", "left_out", "reason"),
    *(f"{name}_sd" for name in ("rs", "bs", "accuracy", "perplexity")),
    *(f"{name}_{end}" for name in ("exposure", "seeds", "canaries", "space") for end in ("low", "high")),
    *("rs_size", "bs_size"),
    *(f"{name}_share_{end}" for name in ("rs", "bs") for end in ("low", "high")),
    *(f"space_{name}_{end}" for name in ("seeds", "canaries") for end in ("low", "high")),
    *(f"{name}_{kind}" for name in ("rs", "bs", "extracted", "exposure") for kind in ("pairs", "twin")),
    *(f"{PUBLISHED}{name}" for name in ("table", "data", "setting", "canaries", "delta")),
}
INTERVALS = {"mean_exposure": ("seeds", "exposure"), "mean_space_exposure": ("space_seeds", "space")}
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
            found = [row.get(f"published_{metric}_lowest") for metric in ("rs", "bs")]
            lowest = ["–" if cell is None or pd.isna(cell) else str(cell) for cell in found]
            rows.append([name[0], f"Table {row['published_table']}", what, *lowest])
    headings = [left(text) for text in ("Here", "Published", "Its row", "RS lowest", "BS lowest")]
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
    frame = _against(pd.concat(frames, ignore_index=True))
    names: list[list[Cell]] = [[setting.label, f"{len(setting.shown)}/{len(setting.runs)}"] for setting in of.settings]
    is_mean = any(len(setting.shown) > 1 for setting in of.settings)
    exposure = "seeds and canaries, with its 95% interval over seeds (Student’s t)" if is_mean else "canaries"
    note = (
        "RS: canaries memorized by Random Sampling; BS: those that Beam Search extracts. Exposure: mean over "
        f"{exposure}. Seeds: those that are averaged, of all; diverged runs are left out, and unfinished ones where "
        "another is completed."
    )
    headings = [left("Setting"), Heading("Seeds")]
    caption = "What was memorized, by setting" + ": means over seeds, ± their standard deviation" * is_mean
    return _framed(frame, headings, names, caption, note), frame


def _runs(of: Gathered, published: Published) -> tuple[Table, pd.DataFrame]:
    pairs = [(setting, run) for setting in of.settings for run in setting.runs]
    frame = _against(memorization_table([run.results for _, run in pairs], published=published))
    names: list[list[Cell]] = [[run.results.name, setting.label] for setting, run in pairs]
    headings = [left("Run"), left("Setting")]
    note = (
        f"{LOWEST} Exposure: mean over canaries, with its 95% interval over them (Student’s t), which says nothing of "
        "other seeds. A run that diverged has no numbers."
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
    records = frame.to_dict("records")
    for name in _ordered(frame):
        if name in SAME and frame[name].nunique() == 1:
            note += f" {SAME[name].format(frame[name].dropna().iloc[0])}."
            continue
        is_number = bool(pd.api.types.is_numeric_dtype(frame[name]))
        headings = [*headings, Heading(_heading(name), is_number)]
        for row, values in zip(rows, records, strict=True):
            row.append(_cell(name, values, is_number))
    if any(name.endswith("_size") for name in map(str, frame.columns)):
        note += SIZE
    return Table(caption, headings, rows, note)


def _ordered(frame: pd.DataFrame) -> list[str]:
    """Known columns first, each followed by what was published for it."""
    order = {name: place for place, name in enumerate(KNOWN)}

    def place(name: str) -> tuple[int, bool]:
        plain = name.removeprefix(PUBLISHED)
        ours = BESIDE.get(plain, plain) if name != plain else plain
        return order.get(ours if ours in frame else plain, len(order)), name != plain

    hidden = WITHIN | ({"round"} if frame["epochs"].notna().any() else set())
    names = [str(name) for name in frame.columns if name not in hidden and frame[name].notna().any()]
    kept = [name for name in names if not name.endswith("_lowest") or name.removeprefix(PUBLISHED) in names]
    return sorted(kept, key=place)


def _heading(name: str) -> Cell:
    plain = name.removeprefix(PUBLISHED)
    text = KNOWN[plain][0] if plain in KNOWN else plain.replace("_", " ")
    return text if plain == name else Markup("{}, <em>published</em>").format(text)


def _cell(name: str, row: Mapping[Any, Any], is_number: bool) -> Cell:
    """A value, with the spread or the whole that the frame has of it."""
    value, plain = row[name], name.removeprefix(PUBLISHED)
    if pd.isna(value):
        return "–"
    _, template, scale = KNOWN.get(plain, ("", "{:.4g}", 1.0))
    if not is_number:
        return str(value)
    deviation = row.get(f"{name}_sd")
    spread = "" if deviation is None or pd.isna(deviation) else f" ± {_number(deviation * scale, template)}"
    if template == "count" and not pd.isna(row.get("published_rs", row.get("published_bs"))):
        canaries = row["published_canaries" if plain != name else "canaries"]
        share = number(value / canaries, "{:.0%}")
        size = row.get(f"{plain}_size") if plain != name else None
        judged = "" if size is None or pd.isna(size) else f"; {size}"
        return Markup("{} <small>{}{} of {}{}</small>").format(
            share, _number(value, template), spread, canaries, judged
        )
    text = _number(value * scale, template)
    for kind in INTERVALS.get(name, ()):
        low, high = row.get(f"{kind}_low"), row.get(f"{kind}_high")
        if low is not None and not pd.isna(low):
            return Markup("{} <small>{} to {}</small>").format(text, number(low), number(high))
    return Markup("{} <small>{}</small>").format(text, spread) if spread else text


def _number(value: Any, template: str) -> str:
    """A count may be a mean, and has a decimal then."""
    return number(value).removesuffix(".0") if template == "count" else number(value, template)
