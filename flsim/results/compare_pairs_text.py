"""Markdown and LaTeX of a comparison of pairs (`flsim.results.compare_pairs`)."""

from collections.abc import Sequence

import pandas as pd

from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, flags, of_model
from flsim.results import formats, layout
from flsim.results.ceiling import MANY, WHAT_TO_DO
from flsim.results.columns import AT_CEILING
from flsim.results.compare import signed
from flsim.results.compare_pairs import LIKE_UTILITY, LIKE_UTILITY_P, STANDARD, p_of, quantities_in_pairs
from flsim.results.compare_text import counts_text, difference_columns, p_texts
from flsim.results.display_columns import text_of_count
from flsim.results.formats import formatted, text_of
from flsim.results.layout import Column
from flsim.results.published import COUNTED_OF, PREFIX
from flsim.results.sweep_pairs import Pair

N = "n: seeds with both."
DIVERGED = (
    "Div.: runs that diverged, a/b: an outcome to compare. A seed that diverged on one side is dropped from both, and "
    "no other column has it."
)
LEGEND = """{}, a-b: mean {} in a minus that in b, paired canary by canary; CI: half
its 95% interval (t). {}: memorized canaries{}, a/b.
p: corrected for the number of rows with a test (Holm), each column by itself.
"""
SEEDS_LEGEND = """With several seeds: counts are means over them. p is Student's t test over seeds
for {}; for {} Fisher's exact test, which exchanges a and b within
seeds and is at least 2/2^n: below 0.05 only from 6 seeds on.
"""
CANARIES_LEGEND = """With one seed: p is of the t test over canaries and McNemar's exact test. Both
are about one pair of models and say nothing about other seeds. They treat
canaries as independent.
"""
CEILING = (
    "Ceil.: canaries at the ceiling of exposure, a/b. They are ranked before all references, so that differences "
    f"between them cannot show; {WHAT_TO_DO}"
)
UTILITY = "{}: {} on test text, a/b."
PUBLISHED = "{}, %: a minus b, percent of all canaries; Paper: as published."
LIKE = (
    f"Like perp.: mean {PRIMARY.title.lower()} in a minus that in b, each seed at the lowest perplexity that both its "
    "runs reached, from all their evaluations{}."
)
LIKE_TEST = "; CI: half its 95% interval over seeds (t); p: of the t test over seeds; one seed has neither"
EPOCHS_LEGEND = "All after {} epochs; an epoch reads as many records as there are.\n"


def to_markdown(table: pd.DataFrame, pairs: Sequence[Pair], width: int = layout.TERMINAL) -> str:
    """Return differences, utility, published differences and a legend, in as many tables as `width` takes."""
    labels = _labels(pairs)
    return layout.markdown(*_columns(table, labels), _legend(table) + _notes(table, labels, width), width)


def to_latex(table: pd.DataFrame, pairs: Sequence[Pair]) -> str:
    """Return the columns of `to_markdown` as tabulars, ready to paste; they need the package booktabs."""
    return layout.latex(*_columns(table, _labels(pairs)))


def _labels(pairs: Sequence[Pair]) -> list[str]:
    """Return the common part of each pair's settings.

    If these parts are not all different, return the axes of the pairs.
    """
    labels = [pair.label for pair in pairs]
    return labels if len(set(labels)) == len(labels) else [pair.row for pair in pairs]


def _columns(table: pd.DataFrame, names: list[str]) -> tuple[list[Column], list[list[Column]]]:
    """Return the columns that label a row, and units of columns that stay together."""
    template = "{:.1f}" if (table["seeds"] > 1).any() else "{:.0f}"
    labels = [Column("Setting", names, is_number=False), Column("n", text_of(table["seeds"]), note=N)]
    if (table[["diverged_a", "diverged_b"]] > 0).any(axis=None):
        labels.append(Column("Div.", counts_text(table, "diverged", "{}"), note=DIVERGED))
    quantities = quantities_in_pairs(table)
    units = []
    for quantity in quantities:
        p = Column("p", p_texts(table[f"{p_of(quantity)}_holm"])) if quantity.of_canaries else None
        if p and quantity.is_flag:
            units.append([Column(quantity.heading, counts_text(table, quantity.name, template)), p])
        elif p:
            units.append([*difference_columns(table, quantity), p, *_at_ceiling(table, quantity, template)])
    units.append([_utility(table, quantity) for quantity in of_model(quantities)])
    units += [_like_utility(table), _published(table, quantities)]
    return labels, [unit for unit in units if any(cell for column in unit for cell in column.cells)]


def _published(table: pd.DataFrame, quantities: Sequence[Quantity]) -> list[Column]:
    """Return columns of differences in percent, ours and published; empty if no row has a published one."""
    columns = []
    for flag in flags(quantities):
        if flag.name not in COUNTED_OF:
            continue
        ours = (table[f"{flag.name}_a"] - table[f"{flag.name}_b"]) / table["canaries"]
        a, b = (table[f"{PREFIX}{flag.name}_{run}"] / table[f"{PREFIX}canaries_{run}"] for run in "ab")
        if (a - b).notna().any():
            cells, theirs = formatted(ours, "{:+.0f}", 100), formatted(a - b, "{:+.0f}", 100)
            flag_names = ", ".join(quantity.heading for quantity in flags(STANDARD))
            columns += [Column(f"{flag.heading}, %", cells, note=PUBLISHED.format(flag_names)), Column("Paper", theirs)]
    return columns


def _at_ceiling(table: pd.DataFrame, quantity: Quantity, template: str) -> list[Column]:
    """Return the column of canaries at the ceiling of exposure; none where they are few in every row."""
    shares = table[list(AT_CEILING)].div(table["canaries"], axis=0)
    if not quantity.is_primary or not (shares >= MANY).any(axis=None):
        return []
    return [Column("Ceil.", counts_text(table, "at_ceiling", template), note=CEILING)]


def _like_utility(table: pd.DataFrame) -> list[Column]:
    """Return the columns of the difference at equal perplexity, half its interval and its p; empty if no row has it."""
    mean, low, high, _ = (table[name] for name in LIKE_UTILITY)
    if mean.isna().all():
        return []
    sign = signed(PRIMARY)
    cells = formatted((high - low) / 2, f"{{:{sign.removeprefix('+')}}}")
    test = [Column("CI", cells), Column("p", p_texts(table[f"{LIKE_UTILITY_P}_holm"]))] if any(cells) else []
    return [Column("Like perp.", formatted(mean, f"{{:{sign}}}"), note=LIKE.format(LIKE_TEST if test else "")), *test]


def _utility(table: pd.DataFrame, quantity: Quantity) -> Column:
    """Return the column of a number of the model in a and in b."""
    scaled = table[[f"{quantity.name}_{side}" for side in "ab"]] * quantity.scale
    note = _utility_note() if quantity.is_standard else ""
    return Column(quantity.column_heading, counts_text(scaled, quantity.name, quantity.format), note=note)


def _utility_note() -> str:
    standard = of_model(STANDARD)
    names = ", ".join(quantity.heading for quantity in standard)
    return UTILITY.format(names, " and ".join(quantity.axis for quantity in standard))


def _legend(table: pd.DataFrame) -> str:
    counts = table["canaries"].dropna().unique()
    primary, names = next(iter(STANDARD)), [flag.heading for flag in flags(STANDARD)]
    of_all = f" of {text_of_count(counts[0])} planted" if len(counts) == 1 else ""
    text = LEGEND.format(primary.heading, primary.title.lower(), ", ".join(names), of_all)
    text += SEEDS_LEGEND.format(primary.heading, " and ".join(names)) if (table["unit"] == "seeds").any() else ""
    text += CANARIES_LEGEND if (table["unit"] == "canaries").any() else ""
    own = [quantity for quantity in quantities_in_pairs(table) if not quantity.is_standard]
    text += "".join(formats.note(f"{quantity.heading}: {quantity.sentence}") for quantity in own)
    epochs = {*formatted(table["epochs_a"], "{:.3g}"), *formatted(table["epochs_b"], "{:.3g}")} - {""}
    return text + (EPOCHS_LEGEND.format(*epochs) if len(epochs) == 1 else "")


def _notes(table: pd.DataFrame, labels: list[str], width: int) -> str:
    """Return notes on rows that could mislead: other lengths of training, and runs that are left out."""
    text = ""
    for label, a, b in zip(labels, table["epochs_a"], table["epochs_b"], strict=True):
        if not (pd.isna(a) or pd.isna(b)) and min(a, b) < 0.99 * max(a, b):
            text += formats.note(f"{label}: a is after {a:.3g} epochs, b after {b:.3g}; name an --epoch.", width)
    for label, why in zip(labels, table["left_out"], strict=True):
        if not pd.isna(why):
            text += formats.note(f"Left out of {label}: {why}", width)
    unlike = []
    for label, why, mean in zip(labels, table["like_utility_left_out"], table[LIKE_UTILITY[0]], strict=True):
        if pd.isna(mean) and not pd.isna(why):
            unlike.append(f"{label}: {why}")
        elif not pd.isna(why):
            text += formats.note(f"At equal perplexity, {label}: {why}.", width)
    if unlike:
        text += formats.note(f"Not compared at equal perplexity: {'; '.join(unlike)}.", width)
    return text
