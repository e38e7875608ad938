"""Extraction as text for people, and as an object for JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsim.attacks.extraction.discoverable import Scheme
from flsim.attacks.extraction.extract import Extraction
from flsim.attacks.extraction.rates import SAMPLING, USERS
from flsim.attacks.extraction.strings import CANARY, RECORD
from flsim.show.table import Column, Columns, formatted, markdown, note

PRINTED_TRIES = (1_000, 1_000_000)
KINDS = {CANARY: "Canaries", RECORD: "Training records"}
TRAINED = (
    "Trained: % of planted canaries, or of training records, whose suffix is extracted from their prefix. Control: the "
    "same of canaries without a copy, or of held-out records of equal length. Excess: trained less control; this alone "
    "is memory. 95%: exact interval of a rate, Newcombe's of the excess."
)
MEANS = (
    "Trained, control and excess: % of strings, means over seeds, with the 95% interval of the excess by Student's t "
    "over seeds. Seeds share the corpus, so it says nothing of other corpora."
)
ATTACKS = (
    "Greedy: always the likeliest token. n, p: with probability p or more, one of n samples is the suffix. One-word "
    "prompt: greedy decoding after some word of the vocabulary writes the suffix. Near-verbatim: a greedy or beam "
    "search continuation has at most one other word."
)
HELD = (
    "Users: number of extracted strings that at most so many training users hold; in brackets % extracted of controls "
    "that at most one training user fewer holds."
)


def attack_text(row: Mapping[Any, Any]) -> str:
    """Return an attack's name in a table, e.g. ``"greedy"`` or ``"n 1e3, p 0.5"``."""
    return f"n 1e{np.log10(row['n']):.0f}, p {row['p']:g}" if row["attack"] == SAMPLING else str(row["attack"])


def to_text(measured: Extraction) -> str:
    """Return tables of each run: attacks by kind and prefix, and extracted strings by the number of their users."""
    parts = []
    for run, rates in measured.rates.groupby("run", sort=False):
        first = rates.iloc[0]
        name = f"{first['setting']} ({Path(str(run)).resolve().name}), after round {first['round']:,}"
        parts.append(note(f"{name}: extraction by {_scheme_text(measured.scheme)}"))
        eidetic = measured.eidetic[measured.eidetic["run"] == run]
        for kind, of_kind in _by_kind(_printed(rates)):
            held = eidetic[eidetic["kind"] == of_kind["kind"].iloc[0]]
            parts += [note(f"{kind}, with controls: {_sizes(of_kind)}"), _rates_table(of_kind), _eidetic_table(held)]
    return "\n".join([*parts, *map(note, (TRAINED, ATTACKS, HELD))])


def over_seeds_to_text(measured: Extraction) -> str:
    """Return a table for each kind and prefix, with rows for each attack and setting, as means over seeds."""
    rows = _printed(measured.over_seeds)
    numbers = {series: str(number) for number, series in enumerate(dict.fromkeys(rows["series"]), 1)}
    names = dict(zip(rows["series"], rows["setting"], strict=True))
    settings = "".join(note(f"{number}. {names[series]}") for series, number in numbers.items())
    parts = [f"Extraction by {_scheme_text(measured.scheme)}: means over seeds, by setting\n", settings]
    for kind, of_kind in _by_kind(rows):
        for prefix, group in of_kind.groupby("prefix", sort=False):
            by_attack = [part for _, part in group.groupby(["attack", "n", "p"], sort=False, dropna=False)]
            table = _means_table(pd.concat(by_attack), numbers)
            parts += [f"{kind}, prefix of {prefix} word{'s' * (prefix != 1)}\n", table]
    return "\n".join([*parts, *map(note, (MEANS, ATTACKS))])


def to_object(measured: Extraction) -> dict[str, Any]:
    """Return all tables as an object for JSON; unknown values, and numbers without bound, are None."""
    tables = {name: getattr(measured, name) for name in ("rates", "eidetic", "strings", "over_seeds")}
    return {"scheme": asdict(measured.scheme)} | {
        name: json.loads(table.to_json(orient="records", double_precision=15)) for name, table in tables.items()
    }


def _printed(rates: pd.DataFrame) -> pd.DataFrame:
    return rates[(rates["attack"] != SAMPLING) | rates["n"].isin(PRINTED_TRIES)]


def _by_kind(rates: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for kind, group in rates.groupby("kind", sort=False):
        yield KINDS[str(kind)], group


def _sizes(rates: pd.DataFrame) -> str:
    rows = rates.drop_duplicates("prefix").to_dict("records")
    return ", ".join(f"{row['strings']:,} and {row['control_strings']:,} (prefix {row['prefix']})" for row in rows)


def _rates_table(rates: pd.DataFrame) -> str:
    units = [
        [Column("Trained", _shares(rates["rate"])), Column("95%", _intervals(rates, "", "{:.1f}"))],
        [Column("Control", _shares(rates["control_rate"]))],
        [Column("Excess", _signed(rates["excess"])), Column("95%", _intervals(rates, "excess_", "{:+.1f}"))],
    ]
    return _table(_labels(rates), units)


def _means_table(rates: pd.DataFrame, numbers: Mapping[str, str]) -> str:
    labels = [
        Column("Attack", [attack_text(row) for row in rates.to_dict("records")], is_number=False),
        Column("Setting", [numbers[series] for series in rates["series"]]),
        Column("Seeds", [str(count) for count in rates["seeds"]]),
    ]
    sides = [Column("Trained", _shares(rates["rate"])), Column("Control", _shares(rates["control_rate"]))]
    excess = [Column("Excess", _signed(rates["excess"])), Column("95%", _intervals(rates, "excess_", "{:+.1f}"))]
    return _table(labels, [sides, excess])


def _eidetic_table(eidetic: pd.DataFrame) -> str:
    by_users = [eidetic[eidetic["k_users"] == most] for most in USERS]
    units = []
    for most, rows in zip(USERS, by_users, strict=True):
        heading = f"{most:g} user{'s' * (most > 1)}" if np.isfinite(most) else "any"
        units.append([Column(heading, [_held(row) for row in rows.to_dict("records")])])
    return _table(_labels(by_users[0]), units)


def _table(labels: Columns, units: Sequence[Columns]) -> str:
    return markdown(labels, units).rstrip() + "\n"  # its columns have no notes


def _held(row: Mapping[Any, Any]) -> str:
    control = "-" if np.isnan(row["control_rate"]) else f"{100 * row['control_rate']:.1f}"
    return f"{row['extracted']:,} ({control})"


def _labels(rates: pd.DataFrame) -> list[Column]:
    attacks = [attack_text(row) for row in rates.to_dict("records")]
    return [Column("Prefix", [str(prefix) for prefix in rates["prefix"]]), Column("Attack", attacks, is_number=False)]


def _shares(values: "pd.Series[Any]") -> list[str]:
    return formatted(values, "{:.1f}", 100)


def _signed(values: "pd.Series[Any]") -> list[str]:
    return formatted(values, "{:+.1f}", 100)


def _intervals(rates: pd.DataFrame, name: str, template: str) -> list[str]:
    ends = (formatted(rates[f"{name}{end}"], template, 100) for end in ("low", "high"))
    return [f"{low} to {high}" if low else "" for low, high in zip(*ends, strict=True)]


def _scheme_text(scheme: Scheme) -> str:
    parts = [f"temperature {scheme.temperature:g}", f"top_k {scheme.top_k}" if scheme.top_k else "all tokens"]
    return f"samples at {', '.join(parts)}{f', top_p {scheme.top_p:g}' * (scheme.top_p < 1)}"
