"""Contrasts: the effect of one factor on the numbers of a report, with all other settings equal, as one long frame.

A factor is a setting that differs between runs, or several that change only together, such as layers and units of
equally large networks. A learning rate belongs to the factor that it changes with, unless some settings differ only in
a learning rate. Two settings differ in one factor if no other pair of settings differs in a part of it.

The frame of `contrasts` has a row for each contrast and quantity:

    factor, setting      the factor, and what the compared settings share
    a, b                 the two values of the factor
    quantity, at         name of the quantity, at the "end" of training, or "equal perplexity"
    value_a, value_b     means over seeds and pairs of settings; flags as percentages of the planted canaries
    difference           mean of a - b
    low, high, p         95% interval and p from Student's t over `unit`; p of a flag of one pair of settings is exact
    p_holm               p corrected by Holm for the number of rows with a test of the same quantity and scope
    n, unit              number of seeds, and the independent unit: "seeds", or "canaries" of one pair of models
    scope                "factor": a mean over all pairs of settings; "pair": the IID and the non-IID run of one setting
    is_main              whether the row is of a factor, or of the only pair of settings that a factor has
    pairs, of_pairs      number of compared pairs of settings, of all
    left_out             excluded seeds or runs, with the reasons; empty without any
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.mappings import flat
from flsim.base.statistics import holm
from flsim.measures.built_in import PERPLEXITY, PRIMARY
from flsim.measures.quantity import Quantity, flags, numbers
from flsim.report.gather import Gathered, RunView, Setting
from flsim.results.differences import LIKE, Pair, differences, planned, to_wide
from flsim.results.pairs import MANY, left_out_text, of_mean, pair_at_like_utility, share_at_ceiling
from flsim.results.run_file import PARTITIONS
from flsim.runs.config.custom_code import without_folders
from flsim.show.differences import quantities_in_pairs

PARTITION, TECHNIQUE, OPTIMIZER, CLIP, NOISE, RATE = (
    *("Partition", "Technique", "Optimizer", "Clip", "Noise multiplier", "Learning rate"),
)
CORPUS = "data.corpus"
# Names of factors with several keys, or with another name than their key.
FACTORS = {
    PARTITION: ("data.partition",),
    TECHNIQUE: ("training.kind", "training.algorithm"),
    OPTIMIZER: ("training.optimizer", "training.server_optimizer", "local.optimizer"),
    CLIP: ("privacy.clip", "privacy.target_quantile"),
    NOISE: ("privacy.noise_multiplier",),
    "Batch size": ("training.batch_size",),
    "Cohort size": ("training.cohort",),
    "Length of training": ("training.rounds", "training.steps", "training.epochs", "training.words"),
}
FACTOR_OF = {key: factor for factor, keys in FACTORS.items() for key in keys}
ORDER = {factor: place for place, factor in enumerate([*FACTORS, RATE])}
LENGTHS = FACTORS["Length of training"]
RATES = re.compile(r"(training|local)\.(.*(learning_rate|schedule|momentum|tau|beta2)|tuned_at|warmup)")
# Settings that follow from other settings, or that do not change results.
FOLLOWING = re.compile(
    r"privacy\.(mechanism|delta|count_noise|clip_learning_rate)|system\..*|evaluation\.(every.*|also|beam_width|decide|samples|nodes)"
)
LIKE_LENGTH = 0.05  # relative difference of lengths of training that count as equal: the paper's 7,840 and 8,000 rounds
PLAIN_NAME = re.compile(r"^DP-|\+.*$")
END, EQUAL = "end", "equal perplexity"
AT_CEILING = "at_ceiling"
TESTS = {None, "t", "exchange", "McNemar"}  # columns of a row of differences, one row for each quantity
SCALED = ("value_a", "value_b", "difference", "low", "high", "p")

Pairs = Sequence[tuple[dict[int, RunView], dict[int, RunView]]]  # by seed, the completed runs of two settings


Contrast = tuple[dict[str, Any], list[tuple[Setting, Setting]]]  # cells of its rows; pairs that differ in its factor


@dataclass(frozen=True, eq=False)
class _Profile:
    """A setting with the values of its configuration by key, and its sweep."""

    setting: Setting
    values: Mapping[str, Any]
    sweep: Path | None


def contrasts(gathered: Gathered) -> pd.DataFrame:
    """Return the frame of this module's docstring; a single pair of partitions has its row, not that of a factor."""
    single, rows = list[tuple[Setting, Setting]](), list[dict[str, Any]]()
    for common, pairs in factor_contrasts(gathered):
        if common["factor"].startswith(PARTITION) and len(pairs) == 1:
            single += pairs
        else:
            rows += measured(common, pairs, gathered.quantities)
    main = single if single or any(row["factor"].startswith(PARTITION) for row in rows) else None
    frame = pd.DataFrame([*rows, *_of_pairs(gathered, main)], columns=COLUMNS)
    families = frame.groupby(["scope", "quantity", "at"], sort=False).indices.values()
    for places in families:
        frame.loc[places, "p_holm"] = holm(frame.loc[places, "p"].astype("float64").tolist())
    return frame


COLUMNS = (
    *("factor", "setting", "a", "b", "quantity", "at", "value_a", "value_b", "difference", "low", "high", "p"),
    *("p_holm", "n", "unit", "scope", "is_main", "pairs", "of_pairs", "left_out"),
)


def measured(
    common: dict[str, Any], settings: Sequence[tuple[Setting, Setting]], quantities: Sequence[Quantity]
) -> list[dict[str, Any]]:
    """Return the rows of one factor's contrast, a row for each quantity that its runs measured.

    Only completed runs are compared. A seed without a completed run on one side of a pair is excluded from all pairs,
    so that the mean of each seed is over the same settings. If no seed remains, the pairs with the fewest common seeds
    are excluded. Exposures among different numbers of references are not comparable.
    """
    by_seed = [(_completed(a), _completed(b)) for a, b in settings]
    alike = [pair for pair in by_seed if len({frozenset(run.references for run in of.values()) for of in pair}) == 1]
    pairs, seeds = _with_common_seeds([(a, b) for a, b in alike if {*a} & {*b}])
    compared = [both for both, pair in zip(settings, by_seed, strict=True) if pair in pairs] or settings
    runs = [run.results for both in compared for setting in both for run in setting.runs]
    diverged = sorted({run.seed for run in runs if run.status == "diverged" and run.seed is not None} - {*seeds})
    common = common | {"scope": "factor", "is_main": True, "unit": "seeds"}
    common |= {"pairs": len(pairs), "of_pairs": len(settings)}
    lost = f"seeds {', '.join(map(str, diverged))}: a run diverged" if diverged else ""
    if not seeds:
        nothing = {"quantity": PRIMARY.name, "at": END, "n": 0}
        return [common | nothing | {"left_out": lost or "no seed is completed on both sides"}]
    rows = [common | _at_end(pairs, seeds, PRIMARY) | {"left_out": lost}, common | _at_equal_perplexity(pairs, seeds)]
    others = [quantity for quantity in quantities if quantity.of_canaries and not quantity.is_primary]
    rows += [common | _at_end(pairs, seeds, quantity) for quantity in [*others, PERPLEXITY]]
    shares = [
        share_at_ceiling((run.results, run.results.evaluated[-1]) for by in side for run in map(by.get, seeds) if run)
        for side in zip(*pairs, strict=True)
    ]
    if max(shares) >= MANY:
        values = {"value_a": 100 * shares[0], "value_b": 100 * shares[1], "difference": 100 * (shares[0] - shares[1])}
        rows.append(common | {"quantity": AT_CEILING, "at": END, "n": len(seeds)} | values)
    return [row for row in rows if row["n"]]


def _at_end(pairs: Pairs, seeds: Sequence[int], quantity: Quantity) -> dict[str, Any]:
    """Return the difference of a quantity at each run's last evaluation; without seeds if it was not measured."""

    def value(run: RunView) -> float:
        return run.value(quantity) * (100 / (len(run.results.planted) or 1) if quantity.is_flag else 1)

    a, b = (
        np.array([np.mean([value(side[seed]) for side in of_side]) for seed in seeds], dtype="float64")
        for of_side in zip(*pairs, strict=True)
    )
    means = {"value_a": a.mean(), "value_b": b.mean()}
    return {"quantity": quantity.name, "at": END} | means | of_mean(a - b if np.isfinite(a - b).all() else a[:0])


def _at_equal_perplexity(pairs: Pairs, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the difference of exposure at the first equal perplexity, over the seeds whose pairs all have it."""
    means, reasons = list[float](), dict[int, str]()
    for seed in seeds:
        try:
            of_pairs = [pair_at_like_utility(a[seed].results, b[seed].results) for a, b in pairs]
            means.append(float(np.mean([pair.differences.mean() for pair in of_pairs])))
        except InputError as error:
            reasons[seed] = str(error)
    lost = {"left_out": left_out_text(reasons)} if reasons else {}
    return {"quantity": PRIMARY.name, "at": EQUAL} | of_mean(means) | lost


def _completed(setting: Setting) -> dict[int, RunView]:
    """Return the completed runs of a setting whose exposure was measured at the end, by seed."""
    return {
        run.results.seed: run
        for run in setting.runs
        if run.results.status == "completed" and run.results.seed is not None
        if not math.isnan(run.value(PRIMARY))
    }


def _with_common_seeds(pairs: Pairs) -> tuple[Pairs, list[int]]:
    """Return the pairs to compare, and the seeds that are completed on both sides of each pair."""
    for fewest in range(1, max((len({*a} & {*b}) for a, b in pairs), default=0) + 1):
        compared = [(a, b) for a, b in pairs if len({*a} & {*b}) >= fewest]
        if seeds := set.intersection(*({*a} & {*b} for a, b in compared)):
            return compared, sorted(seeds)
    return [], []


def _of_pairs(gathered: Gathered, main: Sequence[tuple[Setting, Setting]] | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of each setting with runs of both partitions, from the frame of `flsim.results.differences`."""
    for line in gathered.lines:
        if both := line.both_partitions:
            sides = [[run.planned or planned([run.results])[0] for run in setting.runs] for setting in both]
            pair = Pair(line.label, *sides)
            common: dict[str, Any] = {
                "factor": PARTITION,
                "setting": line.label,
                "a": "IID",
                "b": "non-IID",
                "scope": "pair",
            }
            common |= {"is_main": main is None or both in main, "pairs": 1, "of_pairs": 1}
            for row in _of_pair(differences([pair])):
                yield common | row


def _of_pair(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield exposure at the end and at equal perplexity, then flags, other numbers, perplexity and the ceiling."""
    rows = [row for row in frame.replace({pd.NA: None}).to_dict("records") if row["test"] in TESTS]
    at_end = {row["quantity"]: row for row in rows if row["at"] == END}
    why = at_end.get("left out", {}).get("left_out") or ""
    if "canaries" not in at_end:
        yield {"quantity": PRIMARY.name, "at": END, "n": 0, "left_out": why}
        return
    canaries, ceiling = at_end["canaries"]["value_a"], at_end[AT_CEILING]
    unit = {"n": at_end["canaries"]["n"], "unit": at_end["canaries"]["over"], "at": END}

    def cells(row: Mapping[Any, Any], factor: float = 1.0) -> dict[str, Any]:
        known = {value: row[value] * (1 if value == "p" else factor) for value in SCALED if row[value] is not None}
        return unit | {"quantity": row["quantity"]} | known

    if PRIMARY.name in at_end:
        yield cells(at_end[PRIMARY.name]) | {"left_out": why}
    for like in rows:
        if (like["at"], like["quantity"]) == (LIKE, PRIMARY.name) and (
            like["difference"] is not None or like["left_out"]
        ):
            of_seeds = {"at": EQUAL, "n": like["n"] or 0, "unit": "seeds", "left_out": like["left_out"] or ""}
            yield cells(like) | of_seeds
    compared = [quantity for quantity in quantities_in_pairs(to_wide(frame)) if quantity.of_canaries]
    for quantity in [*flags(compared), *numbers(compared)]:
        if quantity.name in at_end and not quantity.is_primary:
            yield cells(at_end[quantity.name], 100 / canaries if quantity.is_flag else 1.0)
    if at_end.get(PERPLEXITY.name, {}).get("difference") is not None:
        yield cells(at_end[PERPLEXITY.name])
    if max(ceiling["value_a"], ceiling["value_b"]) >= MANY * canaries:
        yield cells(ceiling, 100 / canaries)


def factor_contrasts(gathered: Gathered) -> list[Contrast]:
    """Return the contrasts of each factor: partitions within techniques, then techniques within partitions."""
    profiles = _profiles(gathered)
    names = _techniques(profiles)
    pairs = [
        (a, b, factors) for a, b in combinations(profiles, 2) if a.sweep == b.sweep and (factors := _differing(a, b))
    ]
    # learning rates follow from other factors, such as the optimizer
    if frozenset({RATE}) not in {factors for _, _, factors in pairs}:
        pairs = [(a, b, factors - {RATE}) for a, b, factors in pairs]
    every = {factors for _, _, factors in pairs}
    smallest = [factors for factors in every if not any(other < factors for other in every)]
    smallest.sort(
        key=lambda factors: (min(ORDER.get(one, len(ORDER)) for one in factors), len(factors), sorted(factors))
    )
    strata: dict[tuple[frozenset[str], str], list[tuple[_Profile, _Profile]]] = {}
    for factors in smallest:
        for a, b, others in pairs:
            if others == factors:
                strata.setdefault((factors, _within(a, factors, names)), []).append((a, b))
    return [one for (factors, within), both in strata.items() for one in _contrasts(factors, within, both, names)]


def _profiles(gathered: Gathered) -> list[_Profile]:
    searched = {sweep.path: sweep for sweep in gathered.sweeps if sweep.tuned}
    profiles, lengths = list[_Profile](), list[float]()
    for setting in gathered.settings:
        run = setting.runs[0]
        if run.config is None:
            continue
        sweep = run.path.parent.parent if run.planned else None
        search = searched.get(sweep) if sweep else None
        values: dict[str, Any] = {}
        for key, value in flat(without_folders(run.config)):
            # older sweeps do not store the names of chosen settings, which were learning rates
            is_chosen = search and (key in search.chosen or (not search.chosen and RATES.fullmatch(key)))
            if not (FOLLOWING.fullmatch(key) or key == "seed" or is_chosen):
                values[key] = tuple(value) if isinstance(value, list) else value
        for key in {*LENGTHS} & {*values}:
            like = [length for length in lengths if math.isclose(length, values[key], rel_tol=LIKE_LENGTH)]
            lengths += [] if like else [values[key]]
            values[key] = like[0] if like else values[key]
        values["data.partition"] = run.config.partition or "iid"  # otherwise records are drawn at random, as in "iid"
        profiles.append(_Profile(setting, values, sweep))
    return profiles


def _techniques(profiles: Sequence[_Profile]) -> dict[Setting, str]:
    """Return the name of each setting's technique; one technique with several names is central training."""
    names: dict[tuple[Any, Any], dict[Setting, str]] = {}
    for profile in profiles:
        key = profile.values["training.kind"], profile.values.get("training.algorithm")
        names.setdefault(key, {})[profile.setting] = PLAIN_NAME.sub("", profile.setting.technique)
    return {
        setting: name if len({*of_technique.values()}) == 1 else "central training"
        for of_technique in names.values()
        for setting, name in of_technique.items()
    }


def _differing(a: _Profile, b: _Profile) -> frozenset[str]:
    """Return the factors in which settings differ, without settings that only one technique has."""
    is_of_one_kind = a.values["training.kind"] == b.values["training.kind"]
    factors = set()
    for key in {*a.values, *b.values}:
        value_a, value_b = a.values.get(key), b.values.get(key)
        if value_a == value_b:
            continue
        is_of_kind = not is_of_one_kind and key.startswith(("training.", "local.", "audit."))
        if is_of_kind and key != "training.kind" and (None in (value_a, value_b) or RATES.fullmatch(key)):
            continue
        factors.add(FACTOR_OF.get(key) or (RATE if RATES.fullmatch(key) else key))
    if not is_of_one_kind and _optimizer(a) != _optimizer(b):
        factors.add(OPTIMIZER)
    return frozenset(factors)


def _optimizer(profile: _Profile) -> Any:
    """Return the name of the optimizer that techniques have in common: SGD over records is like plain averaging."""
    values = profile.values
    server, local = values.get("training.server_optimizer"), values.get("local.optimizer")
    if server is None:
        return values.get("training.optimizer")
    return server if local == "sgd" else (server, local)


def _within(profile: _Profile, factors: frozenset[str], names: Mapping[Setting, str]) -> str:
    if TECHNIQUE in factors:
        partitions = {other.partition for other in names} - {None}
        partition = profile.setting.partition
        return (
            "" if PARTITION in factors or len(partitions) < 2 or partition is None else f"{_partition(partition)} data"
        )
    return names[profile.setting] if len({*names.values()}) > 1 else ""


def _contrasts(
    factors: frozenset[str],
    within: str,
    pairs: Sequence[tuple[_Profile, _Profile]],
    names: Mapping[Setting, str],
) -> Iterator[Contrast]:
    """Yield each value of the first factor with its first value; for numbers, only the largest with the smallest."""
    first_factor, *following = sorted(factors, key=lambda factor: (ORDER.get(factor, len(ORDER)), factor))
    levels: dict[tuple[Any, ...], str] = {}
    for profile in sorted(
        (profile for pair in pairs for profile in pair), key=lambda one_profile: _rank(first_factor, one_profile)
    ):
        name = names[profile.setting] if first_factor == TECHNIQUE else _word(first_factor, profile)
        levels.setdefault(_level(first_factor, profile), name)
    first, *others = levels
    between, changing = 0, [values for values in zip(*levels, strict=True) if len({*values}) > 1]
    if len(others) > 1 and all(isinstance(value, int | float) for values in changing for value in values):
        others, between = others[-1:], len(others) - 1
    both_ways = [*pairs, *((b, a) for a, b in pairs)]
    for level in others:
        compared = [
            (a, b) for a, b in both_ways if (_level(first_factor, a), _level(first_factor, b)) == (level, first)
        ]
        if not compared:
            continue
        has_rates = RATE not in factors and any(RATE in _differing(a, b) for a, b in compared)
        with_it = [factor[0].lower() + factor[1:] for factor in [*following, *[RATE] * has_rates]]
        title = first_factor + (f" (each with its {', '.join(with_it)})" if with_it else "")
        settings = [(a.setting, b.setting) for a, b in compared]
        title += f", {between} more between" if between else ""
        yield {"factor": title, "setting": within, "a": levels[level], "b": levels[first]}, settings


def _keys(factor: str, values: Mapping[str, Any]) -> list[str]:
    if factor == RATE:
        return sorted(key for key in values if RATES.fullmatch(key))
    return list(FACTORS.get(factor, (factor,)))


def _level(factor: str, profile: _Profile) -> tuple[Any, ...]:
    values = profile.values
    return tuple(_single(values.get(key)) for key in _keys(factor, values))


def _single(value: Any) -> Any:
    """Return the only value of a list."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _rank(factor: str, profile: _Profile) -> tuple[Any, ...]:
    """Return the position of a setting's value: non-IID data, central training, unset and small values are first."""
    if factor == PARTITION:
        return (profile.values["data.partition"] == "iid",)
    if factor == TECHNIQUE:
        return (profile.values["training.kind"] != "central",)
    if factor == OPTIMIZER:
        return ()
    return tuple(
        (value is not None, value if isinstance(value, int | float) else 0.0) for value in _level(factor, profile)
    )


def _word(factor: str, profile: _Profile) -> str:
    values = profile.values
    if factor == PARTITION:
        return _partition(values["data.partition"])
    if factor == OPTIMIZER:
        local = values.get("local.optimizer", "sgd")
        return profile.setting.technique if local == "sgd" else f"{profile.setting.technique} with local {local}"
    if factor == CLIP:
        clip, quantile = (values.get(key) for key in FACTORS[CLIP])
        return f"clip at quantile {quantile:g}" if quantile else "no clip" if clip is None else f"clip {clip:g}"
    if factor == NOISE:
        noise = values.get("privacy.noise_multiplier")
        return f"z={noise:g}" if noise else "no noise"
    if factor in {"Batch size", "Cohort size"}:
        return f"{'b_r' if factor == 'Batch size' else 'b_u'}={values[FACTORS[factor][0]]}"
    if factor == CORPUS:
        return "/".join(Path(str(values[factor]).partition("?")[0]).parts[-2:])
    keys = [key for key in _keys(factor, values) if key in values]
    if factor == "Length of training":
        return ", ".join(f"{_text(values[key])} {key.rpartition('.')[2]}" for key in keys)
    keys = [key for key in keys if key.endswith("learning_rate")] or keys if factor == RATE else keys
    return _text(values[keys[0]]) if len(keys) == 1 else ", ".join(f"{key} {_text(values[key])}" for key in keys)


def _partition(partition: str) -> str:
    """Return the name of a partition within a sentence."""
    return PARTITIONS[partition].replace("N", "n")


def _text(value: Any) -> str:
    value = _single(value)
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
