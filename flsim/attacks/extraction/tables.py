"""Extraction as tables and a figure: rates by kind of string, strings by their users, and means over seeds."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsim.attacks.extraction.extract import CANARY, GREEDY, NEAR, ONE_WORD, RECORD, SAMPLING, USERS, Extraction
from flsim.attacks.result import text_of
from flsim.show.figure import legend_below, line_style, plain, subplots
from flsim.show.table import Field, Table, table_of

PRINTED_TRIES = (1_000, 1_000_000)
KINDS = {CANARY: "Canaries", RECORD: "Training records"}
TRAINED = (
    "Trained: % of planted canaries, or of training records, whose suffix is extracted from their prefix. "
    "Control: the same percentage for canaries without a copy, or for held-out records of equal length. "
    "Excess: trained minus control; only the excess shows memorization. 95%: exact interval of a rate, "
    "Newcombe's of the excess."
)
MEANS = (
    "Trained, control and excess: % of strings, means over seeds, with the 95% interval of the excess by "
    "Student's t over seeds. All seeds share the corpus, so the interval does not cover other corpora."
)
ATTACKS = {  # by the beginning of their names
    GREEDY: "Greedy: always the most likely token.",
    SAMPLING: "n, p: with probability p or more, one of n samples is the suffix.",
    ONE_WORD: "One-word prompt: greedy decoding after any single word of the vocabulary, in place of the prefix, "
    "generates the suffix. It seldom generates suffixes of longer prefixes.",
    NEAR: "Near-verbatim: a greedy or beam search continuation differs in at most one word.",
    "edit": "Edit distance k: at most k words of such a continuation are inserted, deleted or replaced.",
    "BLEU": "BLEU: the BLEU score of such a continuation is above 0.75.",
}
HELD = (
    "k users: number of extracted strings in the text of at most k training users. In brackets: percentage of controls "
    "that are extracted, for controls in the text of at most k - 1 training users, because their author is none."
)
EXCESS = Field("Excess", "excess", "{:+.1f}", 100, ends=("excess_low", "excess_high"))
CONTROL = Field("Control", "control_rate", "{:.1f}", 100)
LABELS = (Field("Prefix", "prefix", "{}"), Field("Attack", "attack"))
RATES = ([Field("Trained", "rate", "{:.1f}", 100, ends=("low", "high"))], [CONTROL], [EXCESS])
OVER_SEEDS = ([Field("Trained", "rate", "{:.1f}", 100), CONTROL], [EXCESS])


def to_text(measured: Extraction) -> str:
    """Return tables of each run: attacks by kind and prefix, and extracted strings by the number of their users."""
    texts, eidetic = [], _named(measured.eidetic)
    for (run, kind), rates in _named(measured.rates).groupby(["run", "kind"], sort=False):
        first, sizes = rates.iloc[0], rates.drop_duplicates("prefix").to_dict("records")
        name = f"{first['setting']} ({Path(str(run)).resolve().name}), after round {first['round']:,}"
        counts = ", ".join(
            f"{row['strings']:,} and {row['control_strings']:,} (prefix {row['prefix']})" for row in sizes
        )
        title = f"{name}, extraction by {_scheme(measured)}. {KINDS[str(kind)]}, with controls: {counts}"
        held = eidetic[(eidetic["run"] == run) & (eidetic["kind"] == kind)]
        texts.append(text_of(title, [table_of(rates, LABELS, RATES), _by_users(held)]))
    return "\n".join([*texts, text_of(TRAINED, [], [_explained(measured), HELD])])


def over_seeds_to_text(measured: Extraction) -> str:
    """Return a table for each kind and prefix, with rows for each attack and setting, as means over seeds."""
    means = _named(measured.over_seeds)
    numbers = {series: number for number, series in enumerate(dict.fromkeys(means["series"]), 1)}
    settings = means.drop_duplicates("series")["setting"]
    numbered = [f"{number}. {setting}" for number, setting in enumerate(settings, 1)]
    texts = [text_of(f"Extraction by {_scheme(measured)}: means over seeds, by setting", [], numbered)]
    means = means.assign(number=means["series"].map(numbers))
    labels = (Field("Attack", "attack"), Field("Setting", "number", "{}"), Field("Seeds", "seeds", "{}"))
    for (kind, prefix), group in means.groupby(["kind", "prefix"], sort=False):
        by_attack = [part for _, part in group.groupby("attack", sort=False)]
        table = table_of(pd.concat(by_attack), labels, OVER_SEEDS)
        texts.append(text_of(f"{KINDS[str(kind)]}, prefix of {prefix} word{'s' * (prefix != 1)}", [table]))
    return "\n".join([*texts, text_of(MEANS, [], [_explained(measured)])])


def _explained(measured: Extraction) -> str:
    names = set(measured.rates["attack"])
    return " ".join(text for name, text in ATTACKS.items() if any(one.startswith(name) for one in names))


def _named(rates: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are printed, with n and p in the names of attacks, such as ``n 1e3, p 0.5``."""
    rows = rates[(rates["attack"] != SAMPLING) | rates["n"].isin(PRINTED_TRIES)]
    names = [
        f"n 1e{np.log10(row['n']):.0f}, p {row['p']:g}" if row["attack"] == SAMPLING else row["attack"]
        for row in rows.to_dict("records")
    ]
    return rows.assign(attack=names)


def _by_users(eidetic: pd.DataFrame) -> Table:
    """Return a table with a column for each number of users of a string."""
    control = (100 * eidetic["control_rate"]).map("{:.1f}".format).where(eidetic["control_rate"].notna(), "-")
    cells = eidetic["extracted"].map("{:,}".format) + " (" + control + ")"
    wide = eidetic.assign(cell=cells).pivot_table("cell", ["prefix", "attack"], "k_users", "first", sort=False)
    units = [[Field(f"{most:g} user{'s' * (most > 1)}" if np.isfinite(most) else "any", str(most))] for most in USERS]
    return table_of(wide.rename(columns=str).reset_index(), LABELS, units)


def _scheme(measured: Extraction) -> str:
    scheme = measured.scheme
    parts = [f"temperature {scheme.temperature:g}", f"top_k {scheme.top_k}" if scheme.top_k else "all tokens"]
    return f"samples at {', '.join(parts)}{f', top_p {scheme.top_p:g}' * (scheme.top_p < 1)}"


# Figure of the share of strings that sampling extracts against the number of samples.

SHOWN_P = 0.5
SIDES = {"": ("trained", "-"), "control_": ("control", ":")}
LINE = "One of n samples is the suffix with probability {:g}\nBand: 95% interval over {}"


def draw(measured: Extraction, over_seeds: bool) -> Figure:
    """Return a figure with a column for each run, or setting, and a row for each kind of strings.

    Dotted lines are controls. With `over_seeds`, lines are means over the seeds of a setting, with Student's t
    intervals.
    """
    rates, key = (measured.over_seeds, "series") if over_seeds else (measured.rates, "run")
    rates = rates[(rates["attack"] == SAMPLING) & (rates["p"] == SHOWN_P)]
    kinds, panels = list(dict.fromkeys(rates["kind"])), list(dict.fromkeys(rates[key]))
    width, height, rows, columns = max(5.0, 3.4 * len(panels)), 2.6 * len(kinds) + 1.2, len(kinds), len(panels)
    figure, all_axes = subplots(width, height, rows, columns, sharex=True, sharey="row")
    prefixes = sorted(set(rates["prefix"]))
    for (row, column), axes in np.ndenumerate(all_axes):
        group = rates[(rates["kind"] == kinds[row]) & (rates[key] == panels[column])]
        for prefix, of_prefix in group.groupby("prefix"):
            _draw(axes, of_prefix, prefixes.index(prefix), f"prefix {prefix}")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if row == 0:
            first = rates[rates[key] == panels[column]].iloc[0]
            name = "" if over_seeds else f"\n{Path(str(first['run'])).resolve().name}"
            axes.set_title(plain(f"{first['setting']}{name}"), fontsize=10)
        if row == len(kinds) - 1:
            axes.set_xlabel("n samples")
        if column == 0:
            axes.set_ylabel(f"{KINDS[kinds[row]]}:\n% extracted")
    legend_below(figure, all_axes.flat, 2, LINE.format(SHOWN_P, "seeds (t)" if over_seeds else "strings"))
    return figure


def _draw(axes: Axes, rates: pd.DataFrame, index: int, label: str) -> None:
    for side, (name, dashes) in SIDES.items():
        values = 100 * rates[f"{side}rate"].to_numpy("float64")
        if np.isnan(values).all():
            continue  # canaries without controls
        style: dict[str, Any] = line_style(index) | {"linestyle": dashes, "markersize": 3, "label": f"{label}, {name}"}
        (line,) = axes.plot(rates["n"], values, **style)
        low, high = (100 * rates[f"{side}{end}"].to_numpy("float64") for end in ("low", "high"))
        axes.fill_between(rates["n"], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
