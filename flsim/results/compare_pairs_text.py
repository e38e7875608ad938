"""A comparison of pairs (`flsim.results.compare_pairs`) as people read it."""

import pandas as pd

from flsim.results import formats
from flsim.results.compare_text import counts_text, difference_text, p_text
from flsim.results.formats import Column, formatted, text_of

WORLDS = ("IID, ", "Non-IID, ")
LEGEND = """n: seeds with both. Bits, a-b: mean exposure in a less that in b, paired canary
by canary, ± half its 95% interval (t). RS, BS: memorized canaries{}, a/b.
p: corrected for the number of rows (Holm), each column by itself.
"""
SEEDS_LEGEND = """Of several seeds: counts are means over them. p is Student's t test over seeds for
Bits; for RS and BS Fisher's exact test, which exchanges a and b within seeds and
is at least 2/2^n: below 0.05 only from 6 seeds on.
"""
CANARIES_LEGEND = """Of one seed: p is of the t test over canaries and of McNemar's exact test. Both
are about these models, not other seeds, and take canaries as independent.
"""
EPOCHS_LEGEND = "All after {} epochs: each reads as many records as there are.\n"
BESIDE_LEGEND = "Perp., Acc.: perplexity and Recall@1 on test text, a/b.\n"
PUBLISHED_LEGEND = "RS, BS, %: a less b, percent of all canaries; pub.: as published.\n"


def to_markdown(table: pd.DataFrame, width: int = 80) -> str:
    """At most `width` columns: where settings would take more, they are numbered, and listed below."""
    text = formats.markdown(_compared(table, _labels(table)), width)
    is_numbered = max(map(len, text.splitlines())) > width
    labels = [str(number + 1) for number in range(len(table))] if is_numbered else _labels(table)
    text = formats.markdown(_compared(table, labels), width)
    if is_numbered:
        text += "\n" + "".join(formats.note(f"{n}: {label}", width) for n, label in enumerate(_labels(table), 1))
    text += "\n" + _legend(table)
    beside = _beside(table, labels)
    if len(beside) > 1:
        text += "\n" + formats.markdown(beside, width) + "\n" + BESIDE_LEGEND
        text += PUBLISHED_LEGEND if len(beside) > 3 else ""
    return text + _notes(table, width)


def to_latex(table: pd.DataFrame) -> str:
    """The first table of `to_markdown` as a tabular; it needs the package booktabs."""
    return formats.latex(_compared(table, _labels(table)))


def _labels(table: pd.DataFrame) -> list[str]:
    """What the settings of a row have in common; where that does not tell rows apart, their axes."""
    settings = []
    for a, b in zip(table["setting_a"], table["setting_b"], strict=True):
        common = {"" if pd.isna(setting) else str(setting) for setting in (a, b)} - {""}
        if len(common) > 1:
            common = {setting.removeprefix(WORLDS[0]).removeprefix(WORLDS[1]) for setting in common}
        settings.append(common.pop() if len(common) == 1 else "")
    if all(settings) and len(set(settings)) == len(settings):
        return settings
    return text_of(table["row"])


def _compared(table: pd.DataFrame, labels: list[str]) -> list[Column]:
    template = "{:.1f}" if (table["seeds"] > 1).any() else "{:.0f}"
    return [
        Column("Setting", labels, is_number=False),
        Column("n", text_of(table["seeds"])),
        Column("Bits, a-b", difference_text(table)),
        Column("p", [p_text(p) for p in table["p_holm"]]),
        Column("RS", counts_text(table, "rs", template)),
        Column("p", [p_text(p) for p in table["rs_p_holm"]]),
        Column("BS", counts_text(table, "bs", template)),
        Column("p", [p_text(p) for p in table["bs_p_holm"]]),
    ]


def _beside(table: pd.DataFrame, labels: list[str]) -> list[Column]:
    """Utility, and the difference in counts beside the published one, where there are any."""
    percent = table[["accuracy_a", "accuracy_b"]] * 100
    columns = [
        Column("Perp.", counts_text(table, "perplexity", "{:.1f}")),
        Column("Acc. %", counts_text(percent, "accuracy", "{:.1f}")),
    ]
    for metric in ("rs", "bs"):
        ours = (table[f"{metric}_a"] - table[f"{metric}_b"]) / table["canaries"]
        theirs = [
            table[f"published_{metric}_{run}"].astype("Float64") / table[f"published_canaries_{run}"] for run in "ab"
        ]
        if (theirs[0] - theirs[1]).notna().any():
            columns.append(Column(f"{metric.upper()}, %", formatted(ours, "{:+.0f}", 100)))
            columns.append(Column("pub.", formatted(theirs[0] - theirs[1], "{:+.0f}", 100)))
    return [Column("Setting", labels, is_number=False), *(column for column in columns if any(column.cells))]


def _legend(table: pd.DataFrame) -> str:
    counts = table["canaries"].dropna().unique()
    text = LEGEND.format(f" of {counts[0]}" if len(counts) == 1 else "")
    text += SEEDS_LEGEND if (table["unit"] == "seeds").any() else ""
    text += CANARIES_LEGEND if (table["unit"] == "canaries").any() else ""
    epochs = {*formatted(table["epochs_a"], "{:.3g}"), *formatted(table["epochs_b"], "{:.3g}")} - {""}
    return text + (EPOCHS_LEGEND.format(*epochs) if len(epochs) == 1 else "")


def _notes(table: pd.DataFrame, width: int) -> str:
    """What keeps a row from being what it seems: other lengths of training, and runs that are left out."""
    text = ""
    for label, a, b in zip(_labels(table), table["epochs_a"], table["epochs_b"], strict=True):
        if not (pd.isna(a) or pd.isna(b)) and min(a, b) < 0.99 * max(a, b):
            text += formats.note(f"{label}: a is after {a:.3g} epochs, b after {b:.3g}; name an --epoch.", width)
    for label, why in zip(_labels(table), table["left_out"], strict=True):
        if not pd.isna(why):
            text += formats.note(f"Left out of {label}: {why}", width)
    return text
