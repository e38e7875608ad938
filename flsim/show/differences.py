"""Differences as text: pairs of settings, the partitions in rows of a table, and two runs."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, flags, of_model, panels_first
from flsim.results.differences import (
    ALL,
    MANY,
    WHAT_TO_DO,
    Comparison,
    Pair,
    column,
    compared_in,
    differences,
    planned,
    to_wide,
)
from flsim.results.published import COUNTED_OF, PREFIX
from flsim.results.rows import PARTITIONS, RunResults
from flsim.results.sweeps import are_of_one_length, by_series, differing, words_of
from flsim.results.tables import quantities_in
from flsim.show.memorization import table_of_runs, text_of_count
from flsim.show.table import Column, Table, formatted, note, text_of

STANDARD = panels_first(compared_in([]))
N = "n: seeds with both."
DIVERGED = (
    "Div.: runs that diverged, a/b: an outcome to compare. If a seed diverged on one side, all other columns "
    "exclude it on both sides."
)
LEGEND = (
    "{}, a-b: mean {} in a minus that in b, paired canary by canary; CI: half its 95% interval (t). {}: "
    "memorized canaries{}, a/b. p: corrected for the number of rows with a test (Holm), separately for each "
    "column."
)
OVER_SEEDS = (
    "With several seeds: counts are means over them. p is Student's t test over seeds for {}; for {} Fisher's "
    "exact test, which exchanges a and b within seeds; it is at least 2/2^n, and below 0.05 only with 6 or "
    "more seeds."
)
OVER_CANARIES = (
    "With one seed: p is of the t test over canaries and McNemar's exact test. Both tests compare one pair of "
    "models and do not cover other seeds. They treat canaries as independent."
)
CEILING = (
    "Many canaries have the largest possible exposure: they are ranked before all references, so differences between "
    f"them are invisible; {WHAT_TO_DO}"
)
UTILITY = "{}: {} on test text, a/b."
PUBLISHED = "{}, %: a minus b, percent of all canaries; Paper: as published."
LIKE_PERPLEXITY = (
    f"Eq. perp.: mean {PRIMARY.title.lower()} in a minus that in b at equal perplexity, for each seed at the lowest "
    "perplexity that both runs reached in any evaluation. CI and p are over seeds (t), or with one seed over canaries."
)
EPOCHS = "All after {} epochs; in an epoch, training reads as many records as the corpus has."
NO_CANARIES = "Neither run has canaries, so only utility is compared.\n"
Groups = list[list[RunResults]]  # of runs that differ only in the seed


def p_text(p: Any) -> str:
    """Return a p-value in at most five characters, e.g. ``"0.054"`` or ``"2e-08"``; empty for a missing one."""
    if pd.isna(p):
        return ""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" if p > 0 else "0"


def signed(quantity: Quantity) -> str:
    """Return the format of a difference between two values: with its sign, and one more decimal than a value."""
    return "+.2f" if quantity.is_standard else f"+{quantity.format[2:-1].lstrip('+')}"


def _both(wide: pd.DataFrame, name: str, template: str, scale: float = 1) -> list[str]:
    """Return a number in a and in b for each row, e.g. ``"27/14"``."""
    pairs = zip(*(column(wide, f"{name}_value_{side}") for side in "ab"), strict=True)
    return ["" if pd.isna(a) or pd.isna(b) else "/".join(template.format(v * scale) for v in (a, b)) for a, b in pairs]


def _difference(wide: pd.DataFrame, name: str, heading: str, sign: str, note: str = "") -> list[Column]:
    """Return the mean difference of a number in each row, half its interval, and its p."""
    low, high = (column(wide, f"{name}_{end}").astype("Float64") for end in ("low", "high"))
    cells = formatted(column(wide, f"{name}_difference"), f"{{:{sign}}}")
    half = Column("CI", formatted((high - low) / 2, f"{{:{sign[1:]}}}"))
    return [Column(heading, cells, note=note), half, _p(wide, name)]


def _p(wide: pd.DataFrame, name: str) -> Column:
    """Return p corrected by Holm; the row of all canaries is a single test, and is not corrected."""
    corrected, uncorrected = (column(wide, f"{name}_{p}") for p in ("p_holm", "p"))
    return Column("p", [p_text(p) for p in corrected.where(wide["row"] != ALL, uncorrected)])


def quantities_in_pairs(wide: pd.DataFrame) -> list[Quantity]:
    """Return the quantities in a frame of `to_wide`, with custom quantities last."""
    custom = [
        quantity for quantity in quantities_in(wide) if f"{quantity.name}_value_a" in wide and quantity not in STANDARD
    ]
    return [*STANDARD, *panels_first(custom)]


# ----- pairs of settings


def table_of_pairs(frame: pd.DataFrame, pairs: Sequence[Pair]) -> Table:
    """Return differences, utility and published differences of pairs, with a legend."""
    wide, names = to_wide(frame), [pair.label for pair in pairs]
    names = names if len({*names} - {""}) == len(names) else [pair.row for pair in pairs]
    seeds = text_of(column(wide, "seeds").astype("Int64").fillna(0))
    labels = [Column("Setting", names, is_number=False), Column("n", seeds, note=N)]
    if any(cell != "0/0" for cell in _both(wide, "diverged", "{:.0f}")):
        labels.append(Column("Div.", _both(wide, "diverged", "{:.0f}"), note=DIVERGED))
    return Table(frame, labels, _units(wide), _legend(wide) + _notes(wide, names))


def _units(wide: pd.DataFrame) -> list[list[Column]]:
    template = "{:.1f}" if (column(wide, "seeds") > 1).any() else "{:.0f}"
    quantities, units = quantities_in_pairs(wide), list[list[Column]]()
    for quantity in quantities:
        if quantity.is_flag:
            units.append([Column(quantity.heading, _both(wide, quantity.name, template)), _p(wide, quantity.name)])
        elif quantity.of_canaries:
            note = CEILING if quantity.is_primary and _are_many_at_ceiling(wide) else ""
            units.append(_difference(wide, quantity.name, f"{quantity.heading}, a-b", signed(quantity), note))
    units.append([_utility(wide, quantity) for quantity in of_model(quantities)])
    like = _difference(wide, f"like_{PRIMARY.name}", "Eq. perp.", signed(PRIMARY), LIKE_PERPLEXITY)
    units += [[unit for unit in like if any(unit.cells)], _published(wide, quantities)]
    return [unit for unit in units if any(cell for of_unit in unit for cell in of_unit.cells)]


def _published(wide: pd.DataFrame, quantities: Sequence[Quantity]) -> list[Column]:
    """Return columns of differences in percent, ours and published; empty if no row has a published difference."""
    columns = []
    for flag in flags(quantities):
        if flag.name in COUNTED_OF:
            measured = column(wide, f"{flag.name}_difference") / column(wide, "canaries_value_a")
            a, b = (
                column(wide, f"{PREFIX}{flag.name}_value_{side}") / column(wide, f"{PREFIX}canaries_value_{side}")
                for side in "ab"
            )
            if (a - b).notna().any():
                note = PUBLISHED.format(", ".join(quantity.heading for quantity in flags(STANDARD)))
                columns.append(Column(f"{flag.heading}, %", formatted(measured, "{:+.0f}", 100), note=note))
                columns.append(Column("Paper", formatted(a - b, "{:+.0f}", 100)))
    return columns


def _are_many_at_ceiling(wide: pd.DataFrame) -> bool:
    shares = [column(wide, f"at_ceiling_value_{side}") / column(wide, "canaries_value_a") for side in "ab"]
    return any((share >= MANY).fillna(value=False).any() for share in shares)


def _utility(wide: pd.DataFrame, quantity: Quantity) -> Column:
    standard = of_model(STANDARD)
    names, axes = ", ".join(number.heading for number in standard), " and ".join(number.axis for number in standard)
    cells = _both(wide, quantity.name, quantity.format, quantity.scale)
    return Column(quantity.column_heading, cells, note=UTILITY.format(names, axes) if quantity.is_standard else "")


def _legend(wide: pd.DataFrame) -> str:
    counts = column(wide, "canaries_value_a").dropna().unique()
    names = [flag.heading for flag in flags(STANDARD)]
    of_all = f" of {text_of_count(counts[0])} planted" if len(counts) == 1 else ""
    text = note(LEGEND.format(PRIMARY.heading, PRIMARY.title.lower(), ", ".join(names), of_all))
    over = {*column(wide, "over").dropna()}
    text += note(OVER_SEEDS.format(PRIMARY.heading, " and ".join(names))) if "seeds" in over else ""
    text += note(OVER_CANARIES) if "canaries" in over else ""
    custom = [quantity for quantity in quantities_in_pairs(wide) if not quantity.is_standard]
    text += "".join(note(f"{quantity.heading}: {quantity.sentence}") for quantity in custom)
    epochs = {cell for side in "ab" for cell in formatted(column(wide, f"epochs_value_{side}"), "{:.3g}")} - {""}
    return text + (note(EPOCHS.format(*epochs)) if len(epochs) == 1 else "")


def _notes(wide: pd.DataFrame, labels: list[str]) -> str:
    """Return notes on different lengths of training, and on excluded runs."""
    lines = list[str]()
    for label, a, b in zip(labels, *(column(wide, f"epochs_value_{side}") for side in "ab"), strict=True):
        if not (pd.isna(a) or pd.isna(b)) and not are_of_one_length((a, b)):
            lines.append(f"{label}: a is after {a:.3g} epochs, b after {b:.3g}; name an --epoch.")
    lines += [f"Excluded from {label}: {why}" for label, why in _known(labels, column(wide, "left_out"))]
    whys = _known(labels, column(wide, "like_left_out"))
    lines += [f"At equal perplexity, {label}: {why}." for label, why in whys]
    return "".join(map(note, lines))


def _known(labels: Sequence[str], whys: "pd.Series[Any]") -> list[tuple[str, str]]:
    return [(label, why) for label, why in zip(labels, whys, strict=True) if not pd.isna(why)]


# ----- partitions of the rows of a table


def compare_partitions(runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None) -> str:
    """Return the differences of series whose settings differ only in the partition; empty if there are none."""
    pairs, several = partitions_of(runs)
    why = "several rows have this setting, so it is not compared; show fewer runs"
    text = "".join(note(f"{label}: {why}") for label in several)
    if pairs:
        frame = differences(pairs, round, epoch)
        text += note("IID (a) minus Non-IID (b), paired by seed:") + "\n"
        text += table_of_pairs(frame, pairs).markdown()
    return text


def partitions_of(runs: Sequence[RunResults]) -> tuple[list[Pair], list[str]]:
    """Return IID and non-IID series of equal settings and lengths, and the settings that several rows have.

    Pair IID and non-IID series that agree in every setting that varies. If a search chose different learning rates for
    the partitions, pair the rest by the settings whose values both partitions share.
    """
    named: dict[str, Groups] = {}
    groups = by_series(runs)
    lengths = Counter({(run.label, run.partition, run.rounds) for run, *_ in groups})
    of_partitions = Counter((label, partition) for label, partition, _ in lengths)
    for group in groups:
        first = group[0]
        has_lengths = max(of_partitions[first.label, partition] for partition in PARTITIONS) > 1
        named.setdefault(first.label + f", {first.rounds:,} rounds" * has_lengths, []).append(group)
    pairs, several = list[Pair](), list[str]()
    for label, alike in named.items():
        names = {name for side in _sides(alike) for name in differing([group[0].settings for group in side])}
        parts = {words: part for words, part in _parts(alike, names).items() if [*map(len, _sides(part))] == [1, 1]}
        rest = [group for group in alike if not any(group in part for part in parts.values())]
        if all(_sides(rest)):
            values = {
                name: [{repr(one.settings.get(name)) for one, *_ in side} for side in _sides(rest)] for name in names
            }
            parts |= _parts(rest, {name for name, (iid, other) in values.items() if iid == other})
        for words, part in parts.items():
            iid, other = _sides(part)
            if len(iid) == len(other) == 1:
                pairs.append(Pair(label + words, planned(iid[0]), planned(other[0])))
            elif iid and other:
                several.append(label + words)
    return pairs, several


def _sides(groups: Groups) -> list[Groups]:
    return [[group for group in groups if group[0].partition == partition] for partition in PARTITIONS]


def _parts(groups: Groups, names: Collection[str]) -> dict[str, Groups]:
    """Return groups by the text of their values of some settings."""
    parts: dict[str, Groups] = {}
    for group in groups:
        parts.setdefault(words_of(group[0], names), []).append(group)
    return parts


# ----- two runs


def runs_to_markdown(compared: Comparison) -> str:
    """Return the comparison of two runs as text: the table of both runs, and their differences."""
    models = compared.models.assign(setting=["a: ", "b: "] + compared.models["setting"])
    parts = [NO_CANARIES] if compared.table.empty else [table_of_two_runs(compared).markdown()]
    return "\n".join([table_of_runs(models).markdown(), *parts])


def table_of_two_runs(compared: Comparison) -> Table:
    """Return the differences of two runs over all canaries, and in each configuration; without canaries, both runs."""
    if compared.table.empty:
        return replace(table_of_runs(compared.models), frame=compared.table)
    wide = to_wide(compared.table)
    wide = wide.assign(canaries_value_a=wide["n"])
    heading = "p_u, p_e" if column(wide, "copies").isna().all() else "Canaries"
    labels = [Column(heading, text_of(wide["row"]), is_number=False), Column("n", text_of(wide["n"]))]
    below = _legend(wide) + _at_equal_perplexity(wide)
    if number := compared.excluded:
        which, is_ = ("1 canary was", "is") if number == 1 else (f"{number} canaries were", "are")
        below += note(f"{which} planted in one of the two runs or in neither, and {is_} excluded from all numbers.")
    return Table(compared.table, labels, _units(wide), below)


def _at_equal_perplexity(wide: pd.DataFrame) -> str:
    """Return a sentence on the common perplexity, or on why there is none."""
    first, why = wide.iloc[0], column(wide, "like_left_out").iloc[0]
    if not pd.isna(why):
        return note(f"Not compared at equal perplexity: {why}.")
    a, b = (f"{first[f'like_round_value_{side}']:,.4g}" for side in "ab")
    perplexity = f"{first['like_perplexity_value_a']:.4g}"
    return note(
        f"Equal perplexity: {perplexity}, the lowest perplexity that both reached (a at round {a}, b at round {b})."
    )
