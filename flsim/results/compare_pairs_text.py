"""A comparison of pairs (`flsim.results.compare_pairs`) as people read it."""

from collections.abc import Sequence

import pandas as pd

from flsim.results import formats, layout
from flsim.results.compare_text import counts_text, difference_columns, p_texts
from flsim.results.formats import formatted, text_of
from flsim.results.layout import Column
from flsim.results.sweep_pairs import Pair

N = "n: seeds with both."
LEGEND = """Bits, a-b: mean exposure in a less that in b, paired canary by canary; CI: half
its 95% interval (t). RS, BS: memorized canaries{}, a/b.
p: corrected for the number of rows (Holm), each column by itself.
"""
SEEDS_LEGEND = """Of several seeds: counts are means over them. p is Student's t test over seeds
for Bits; for RS and BS Fisher's exact test, which exchanges a and b within
seeds and is at least 2/2^n: below 0.05 only from 6 seeds on.
"""
CANARIES_LEGEND = """Of one seed: p is of the t test over canaries and of McNemar's exact test. Both
are about these models, not other seeds, and take canaries as independent.
"""
UTILITY = "Perp., Acc.: perplexity and Recall@1 on test text, a/b."
PUBLISHED = "RS, BS, %: a less b, percent of all canaries; beside it as published."
EPOCHS_LEGEND = "All after {} epochs: each reads as many records as there are.\n"


def to_markdown(table: pd.DataFrame, pairs: Sequence[Pair], width: int = layout.TERMINAL) -> str:
    """Differences, utility, and published differences, in as many tables as `width` takes, and what they mean."""
    labels = _labels(pairs)
    return layout.markdown(*_shown(table, labels), _legend(table) + _notes(table, labels, width), width)


def to_latex(table: pd.DataFrame, pairs: Sequence[Pair]) -> str:
    """The columns of `to_markdown` as tabulars, ready to paste; they need the package booktabs."""
    return layout.latex(*_shown(table, _labels(pairs)))


def _labels(pairs: Sequence[Pair]) -> list[str]:
    """Return what the settings of each pair have in common; the pairs' axes where that does not tell them apart."""
    labels = [pair.label for pair in pairs]
    return labels if len(set(labels)) == len(labels) else [pair.row for pair in pairs]


def _shown(table: pd.DataFrame, names: list[str]) -> tuple[list[Column], list[list[Column]]]:
    """What a row is, and units of columns that stay together."""
    template = "{:.1f}" if (table["seeds"] > 1).any() else "{:.0f}"
    labels = [Column("Setting", names, is_number=False), Column("n", text_of(table["seeds"]), note=N)]
    units = [[*difference_columns(table), Column("p", p_texts(table["p_holm"]))]]
    for metric in ("rs", "bs"):
        counts = Column(metric.upper(), counts_text(table, metric, template))
        units.append([counts, Column("p", p_texts(table[f"{metric}_p_holm"]))])
    percent = table[["accuracy_a", "accuracy_b"]] * 100
    units.append(
        [
            Column("Perp.", counts_text(table, "perplexity", "{:.1f}"), note=UTILITY),
            Column("Acc. %", counts_text(percent, "accuracy", "{:.1f}")),
        ]
    )
    for metric in ("rs", "bs"):
        ours = (table[f"{metric}_a"] - table[f"{metric}_b"]) / table["canaries"]
        a, b = (table[f"published_{metric}_{run}"] / table[f"published_canaries_{run}"] for run in "ab")
        if (a - b).notna().any():
            cells, theirs = formatted(ours, "{:+.0f}", 100), formatted(a - b, "{:+.0f}", 100)
            units.append([Column(f"{metric.upper()}, %", cells, note=PUBLISHED), Column("Paper", theirs)])
    return labels, [unit for unit in units if any(cell for column in unit for cell in column.cells)]


def _legend(table: pd.DataFrame) -> str:
    counts = table["canaries"].dropna().unique()
    text = LEGEND.format(f" of {counts[0]}" if len(counts) == 1 else "")
    text += SEEDS_LEGEND if (table["unit"] == "seeds").any() else ""
    text += CANARIES_LEGEND if (table["unit"] == "canaries").any() else ""
    epochs = {*formatted(table["epochs_a"], "{:.3g}"), *formatted(table["epochs_b"], "{:.3g}")} - {""}
    return text + (EPOCHS_LEGEND.format(*epochs) if len(epochs) == 1 else "")


def _notes(table: pd.DataFrame, labels: list[str], width: int) -> str:
    """What keeps a row from being what it seems: other lengths of training, and runs that are left out."""
    text = ""
    for label, a, b in zip(labels, table["epochs_a"], table["epochs_b"], strict=True):
        if not (pd.isna(a) or pd.isna(b)) and min(a, b) < 0.99 * max(a, b):
            text += formats.note(f"{label}: a is after {a:.3g} epochs, b after {b:.3g}; name an --epoch.", width)
    for label, why in zip(labels, table["left_out"], strict=True):
        if not pd.isna(why):
            text += formats.note(f"Left out of {label}: {why}", width)
    return text
