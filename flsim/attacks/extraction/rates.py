"""Rates of extraction, those of controls, and their differences."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from flsim.attacks.extraction.strings import probability_within
from flsim.base.arrays import Flags
from flsim.base.statistics import difference_interval, share_interval

TRIES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
P = (0.1, 0.5, 0.9)
USERS = (1.0, 2.0, 5.0, 10.0, np.inf)
GREEDY, SAMPLING, ONE_WORD, NEAR = "greedy", "sampling", "one-word prompt", "near-verbatim"
BLEU = 0.75  # Ippolito et al., "Preventing Verbatim Memorization Gives a False Sense of Privacy" (2022), section 4
KEY = ("kind", "prefix", "attack", "n", "p")


def rates_of(strings: pd.DataFrame, edits: int | None = None) -> pd.DataFrame:
    """Return the rate of each attack among trained strings and among controls, and the excess.

    There is a row per kind, prefix, attack and, of sampling, n and p; with `edits`, also of similar suffixes. Columns
    of controls begin with ``control_`` (intervals: Clopper and Pearson, 1934). ``excess`` is the difference, with the
    interval of Newcombe (1998). A rate among no strings is NaN.
    """
    rows = []
    for (kind, prefix), group in strings.groupby(["kind", "prefix"], sort=False):
        is_trained = group["is_trained"].to_numpy(bool)
        for attack, n, p, is_extracted in _attacks(group, edits):
            columns = dict(zip(KEY, (kind, prefix, attack, n, p), strict=True))
            rows.append(columns | against_controls(is_extracted[is_trained], is_extracted[~is_trained]))
    return pd.DataFrame(rows)


def eidetic_of(strings: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of extracted strings that at most k users hold, with controls, in columns as of `rates_of`.

    A control has no owner, so at most k - 1 users hold it. Rows are for greedy decoding, and sampling at p = 0.5.
    """
    rows = []
    for (kind, prefix), group in strings.groupby(["kind", "prefix"], sort=False):
        is_trained, users = group["is_trained"].to_numpy(bool), group["k_users"].to_numpy()
        for attack, n, p, is_extracted in _attacks(group):
            if attack != GREEDY and (n, p) != (TRIES[-1], P[1]):
                continue
            for most in USERS:
                trained, controls = is_trained & (users <= most), ~is_trained & (users <= most - 1)
                columns = dict(zip(KEY, (kind, prefix, attack, n, p), strict=True)) | {"k_users": most}
                rows.append(columns | against_controls(is_extracted[trained], is_extracted[controls]))
    return pd.DataFrame(rows)


def _attacks(strings: pd.DataFrame, edits: int | None = None) -> Iterator[tuple[str, float, float, Flags]]:
    """Yield each attack, with n and p of sampling, and the strings it extracts; with `edits`, similar suffixes too."""
    yield GREEDY, np.nan, np.nan, strings["is_greedy"].to_numpy(bool)
    for tries in TRIES:
        within = probability_within(tries, strings["log_probability"].to_numpy("float64"))
        for p in P:
            yield SAMPLING, tries, p, within >= p
    yield ONE_WORD, np.nan, np.nan, strings["is_elicited"].to_numpy(bool)
    yield NEAR, np.nan, np.nan, strings["is_near"].to_numpy(bool)
    if edits is not None:
        most = (strings["words"] - strings["prefix"] - 1).clip(upper=min(edits, 2**31))
        yield f"edit distance {edits}", np.nan, np.nan, (strings["edit_distance"] <= most).to_numpy(bool)
        yield f"BLEU {BLEU}", np.nan, np.nan, (strings["bleu"] > BLEU).to_numpy(bool)


def against_controls(trained: Flags, controls: Flags) -> dict[str, float]:
    """Return the rates of two sides and their difference, as columns of `rates_of`."""
    row: dict[str, float] = {}
    for name, is_extracted in (("", trained), ("control_", controls)):
        hits, strings = int(is_extracted.sum()), len(is_extracted)
        row |= {f"{name}strings": strings, f"{name}extracted": hits}
        values = (hits / strings, *share_interval(hits, strings)) if strings else [np.nan] * 3
        row |= dict(zip((f"{name}rate", f"{name}low", f"{name}high"), values, strict=True))
    low, high = np.nan, np.nan
    if len(trained) and len(controls):
        low, high = difference_interval(int(trained.sum()), len(trained), int(controls.sum()), len(controls))
    return row | {"excess": row["rate"] - row["control_rate"], "excess_low": low, "excess_high": high}
