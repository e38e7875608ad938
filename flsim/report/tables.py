"""Tables of a report: memorization with published values, contrasts, and extracted phrases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.built_in import PERPLEXITY, PRIMARY
from flsim.measures.quantity import flags
from flsim.report.blocks import Block, Fold, Note, listed, number, plural, shown
from flsim.report.figures import ALL_CONTRASTS
from flsim.report.gather import COUNTS, Gathered
from flsim.results.against_published import against
from flsim.results.canary_table import canary_table
from flsim.results.columns import described, quantities_in
from flsim.results.differences import END, VALUES
from flsim.results.pairs import MANY, WHAT_TO_DO
from flsim.results.store import RunResults
from flsim.results.tables import memorization_table
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
    "canaries, valid for these two models, not for other seeds. Holm: p corrected for the number of rows with the "
    "same test of the quantity. Equal perplexity: the lowest perplexity that both runs of a seed reached, with "
    "interpolation between evaluations. At the ceiling: canaries whose exposure is the largest that |R| references "
    f"can show. If there are many, a difference near zero does not show that both are alike; {WHAT_TO_DO}"
)
CONTRAST = (
    *(Field("Contrast, a − b", "row"), Field("Quantity", "name"), Field("a", "value_a", "{}")),
    *(Field("b", "value_b", "{}"), Field("Difference", "difference", "{}"), Field("95%", "interval", "{}")),
    *(Field("p", "p", "{:.2g}"), Field("Holm", "p_holm", "{:.2g}"), Field("n", "over", "{}")),
)
TESTS = ("t", "exchange", "McNemar")
AT_CEILING = "at_ceiling"


def contrast_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of the frame of `flsim.report.contrasts` with their numbers as text, exposure first."""
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
    "means. There are fewer actual copies if two canaries claim one record."
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
        note = "Complete phrases, by the ids of their canaries; `flsim canaries RUN` lists all canaries of a run."
        blocks += listed(f"Canaries {flag.outcome} by {flag.title}, in words", rows, PHRASES, note)
    return blocks
