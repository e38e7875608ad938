"""Contrasts: the effect of one factor on the numbers of a report, with all other settings equal.

A factor is a setting that differs between runs, or several that change only together, such as layers and units of
equally large networks. A learning rate belongs to the factor that it changes with, unless some settings differ only in
a learning rate. Two settings differ in one factor if no other pair of settings differs in a part of it.

`contrasts` returns the frame of `flsim.results.differences` with a row for each contrast and quantity, and the columns

    factor, setting      the factor, and what the compared settings share
    scope                "factor": a mean over all pairs of settings; "pair": the IID and the non-IID run of one setting
    is_main              whether the row is of a factor, or of the only pair of settings that a factor has
    pairs, of_pairs      number of compared pairs of settings, of all

Rows of a factor are means over pairs and seeds, with Student's t over seeds. Their flags are shares of the planted
canaries, times the number in the row "canaries".
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.base.settings import flat
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, panels_first
from flsim.report.gather import Gathered, RunView, Setting, text_of_setting
from flsim.results.columns import described
from flsim.results.differences import (
    COLUMNS,
    END,
    Pair,
    Row,
    at_equal_perplexity,
    compared_in,
    differences,
    frame_of,
    of_mean,
    planned,
    share_at_ceiling,
    two_means,
)
from flsim.results.store import PARTITIONS
from flsim.runs.config.custom_code import without_folders

PARTITION, TECHNIQUE, OPTIMIZER, CLIP, NOISE, RATE = (
    *("Partition", "Technique", "Optimizer", "Clip", "Noise multiplier", "Learning rate"),
)
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
OF_CONTRASTS = dict.fromkeys(("factor", "setting", "scope"), "string") | {"is_main": "boolean"}
OF_CONTRASTS |= dict.fromkeys(("pairs", "of_pairs"), "Int64")
Pairs = Sequence[tuple[dict[int, RunView], dict[int, RunView]]]  # by seed, the completed runs of two settings
Contrast = tuple[Row, list[tuple[Setting, Setting]]]  # cells of its rows; pairs that differ in its factor


@dataclass(frozen=True, eq=False)
class _Profile:
    """A setting with the values of its configuration by key, and its sweep."""

    setting: Setting
    values: Mapping[str, Any]
    sweep: Path | None


def contrasts(gathered: Gathered) -> pd.DataFrame:
    """Return the frame of this module's docstring; a single pair of partitions has its row, not that of a factor."""
    quantities = panels_first(compared_in([run.results for run in gathered.runs]))
    single, rows = list[tuple[Setting, Setting]](), list[Row]()
    for common, pairs in factor_contrasts(gathered):
        if common["factor"].startswith(PARTITION) and len(pairs) == 1:
            single += pairs
        else:
            rows += _measured(common, pairs, quantities)
    of_factors = frame_of(rows, COLUMNS | OF_CONTRASTS, quantities)
    has_main = bool(single) or any(row["factor"].startswith(PARTITION) for row in rows)
    both = {line.label: pair for line in gathered.lines if (pair := line.both_partitions)}
    main = {label: not has_main or pair in single for label, pair in both.items()}
    of_pairs = differences(
        [
            Pair(label, *([run.planned or planned([run.results])[0] for run in side.runs] for side in pair))
            for label, pair in both.items()
        ]
    )
    of_pairs = of_pairs.assign(a="IID", b="non-IID", factor=PARTITION, setting=of_pairs["row"], scope="pair")
    of_pairs = of_pairs.assign(is_main=of_pairs["row"].map(main), pairs=1, of_pairs=1)
    of_pairs["row"] = "IID − non-IID: " + of_pairs["row"]
    frame = pd.concat([of_factors, of_pairs.astype(COLUMNS | OF_CONTRASTS)], ignore_index=True)
    return described(frame, quantities)


def _measured(
    common: Row, settings: Sequence[tuple[Setting, Setting]], quantities: Sequence[Quantity]
) -> Iterator[Row]:
    """Yield the rows of one factor's contrast, one for each quantity that its runs measured.

    Only completed runs are compared. A seed without a completed run on one side of a pair is excluded from all pairs,
    so that the mean of each seed is over the same settings. If no seed remains, the pairs with the fewest common seeds
    are excluded. Exposures among different numbers of references are not comparable.
    """
    by_seed = [(_completed(a), _completed(b)) for a, b in settings]
    alike = [pair for pair in by_seed if len({frozenset(map(_references, of.values())) for of in pair}) == 1]
    pairs, seeds = _with_common_seeds([(a, b) for a, b in alike if {*a} & {*b}])
    compared = [both for both, pair in zip(settings, by_seed, strict=True) if pair in pairs] or settings
    diverged = [
        {run.results.seed for setting in side for run in setting.runs if run.results.status == "diverged"} - {*seeds}
        for side in zip(*compared, strict=True)
    ]
    lost = ", ".join(map(str, sorted(seed for seed in set.union(*diverged) if seed is not None)))
    of_pairs = f"{len(settings)} pair{'s' * (len(settings) != 1)}"
    of_pairs = of_pairs if len(pairs) in (0, len(settings)) else f"{len(pairs)} of {of_pairs}"
    words = ", ".join(filter(None, (common["factor"], common["setting"], of_pairs)))
    common = common | {"row": f"{common['a']} − {common['b']}: {words}", "at": END, "scope": "factor", "is_main": True}
    common |= {"pairs": len(pairs), "of_pairs": len(settings), "over": "seeds", "n": len(seeds)}
    yield common | two_means("diverged", *map(len, diverged))
    if lost or not seeds:
        why = f"seeds {lost}: a run diverged" if lost else "no seed is completed on both sides"
        yield common | {"quantity": "left out", "left_out": why}
    if not seeds:
        return
    sides = [[[of[seed] for of in side] for seed in seeds] for side in zip(*pairs, strict=True)]
    flattened = [[run for of_seed in side for run in of_seed] for side in sides]
    canaries = float(np.mean([len(run.results.planted) for side in flattened for run in side]))
    at_last = [[(run.results, run.results.evaluated[-1]) for run in side] for side in flattened]
    yield common | two_means("canaries", canaries, canaries)
    yield common | two_means("at_ceiling", *(canaries * share_at_ceiling(side) for side in at_last))
    for quantity in quantities:
        a, b = (_means(side, quantity) * (canaries if quantity.is_flag else 1 / quantity.scale) for side in sides)
        if np.isfinite(a - b).all():
            tested = of_mean(a - b) | {"test": "t"} if quantity.of_canaries else {}
            yield common | two_means(quantity.name, float(a.mean()), float(b.mean())) | tested
    of_seeds = {seed: [(a[seed].results, b[seed].results) for a, b in pairs] for seed in seeds}
    yield common | at_equal_perplexity(of_seeds)


def _references(run: RunView) -> float | None:
    return run.results.references(run.results.evaluated[-1])


def _means(side: Sequence[Sequence[RunView]], quantity: Quantity) -> NDArray[np.float64]:
    """Return the mean of each seed over its runs [seeds] at their last evaluations; flags as shares of canaries."""
    planted = [[len(run.results.planted) or 1 if quantity.is_flag else 1 for run in runs] for runs in side]
    values = [[run.value(quantity) for run in runs] for runs in side]
    means: NDArray[np.float64] = (np.array(values, dtype="float64") / planted).mean(axis=1)
    return means


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


def factor_contrasts(gathered: Gathered) -> list[Contrast]:
    """Return the contrasts of each factor: partitions within techniques, then techniques within partitions."""
    profiles = _profiles(gathered)
    names = _techniques(profiles)
    both = [(a, b) for a, b in combinations(profiles, 2) if a.sweep == b.sweep]
    pairs = [(a, b, factors) for a, b in both if (factors := _differing(a, b))]
    # learning rates follow from other factors, such as the optimizer
    if frozenset({RATE}) not in {factors for _, _, factors in pairs}:
        pairs = [(a, b, factors - {RATE}) for a, b, factors in pairs]
    every = {factors for _, _, factors in pairs}
    smallest = [factors for factors in every if not any(other < factors for other in every)]
    places = {factors: min(ORDER.get(one, len(ORDER)) for one in factors) for factors in smallest}
    smallest.sort(key=lambda factors: (places[factors], len(factors), sorted(factors)))
    strata: dict[tuple[frozenset[str], str], list[tuple[_Profile, _Profile]]] = {}
    for factors in smallest:
        for a, b, others in pairs:
            if others == factors:
                strata.setdefault((factors, _within(a, factors, names)), []).append((a, b))
    return [one for (factors, within), of in strata.items() for one in _contrasts(factors, within, of, names)]


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
        is_one = PARTITION in factors or len(partitions) < 2
        return "" if is_one or partition is None else f"{_partition(partition)} data"
    return names[profile.setting] if len({*names.values()}) > 1 else ""


def _contrasts(
    factors: frozenset[str], within: str, pairs: Sequence[tuple[_Profile, _Profile]], names: Mapping[Setting, str]
) -> Iterator[Contrast]:
    """Yield each value of the first factor with its first value; for numbers, only the largest with the smallest."""
    first_factor, *following = sorted(factors, key=lambda factor: (ORDER.get(factor, len(ORDER)), factor))
    levels: dict[tuple[Any, ...], str] = {}
    for profile in sorted((one for pair in pairs for one in pair), key=lambda one: _rank(first_factor, one)):
        name = names[profile.setting] if first_factor == TECHNIQUE else _word(first_factor, profile)
        levels.setdefault(_level(first_factor, profile), name)
    first, *others = levels
    between, changing = 0, [values for values in zip(*levels, strict=True) if len({*values}) > 1]
    if len(others) > 1 and all(isinstance(value, int | float) for values in changing for value in values):
        others, between = others[-1:], len(others) - 1
    both_ways = [*pairs, *((b, a) for a, b in pairs)]
    for level in others:
        wanted = level, first
        compared = [both for both in both_ways if tuple(_level(first_factor, one) for one in both) == wanted]
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
    """Return the values of a factor's settings; of a list of one value, this value."""
    values = [profile.values.get(key) for key in _keys(factor, profile.values)]
    return tuple(value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in values)


def _rank(factor: str, profile: _Profile) -> tuple[Any, ...]:
    """Return the position of a setting's value: non-IID data, central training, unset and small values are first."""
    if factor == PARTITION:
        return (profile.values["data.partition"] == "iid",)
    if factor == TECHNIQUE:
        return (profile.values["training.kind"] != "central",)
    if factor == OPTIMIZER:
        return ()
    level = _level(factor, profile)
    return tuple((value is not None, value if isinstance(value, int | float) else 0.0) for value in level)


def _partition(partition: str) -> str:
    """Return the name of a partition within a sentence."""
    return PARTITIONS[partition].replace("N", "n")


def _clip(clip: float | None, quantile: float | None) -> str:
    return f"clip at quantile {quantile:g}" if quantile else "no clip" if clip is None else f"clip {clip:g}"


# The text of a factor's values, for factors whose text is not only the values of its settings.
WORDS: Mapping[str, Callable[..., str]] = {
    PARTITION: _partition,
    CLIP: _clip,
    NOISE: lambda noise: f"z={noise:g}" if noise else "no noise",
    "Batch size": "b_r={}".format,
    "Cohort size": "b_u={}".format,
    "data.corpus": lambda corpus: "/".join(Path(str(corpus).partition("?")[0]).parts[-2:]),
}


def _word(factor: str, profile: _Profile) -> str:
    values = dict(zip(_keys(factor, profile.values), _level(factor, profile), strict=True))
    if factor in WORDS:
        return WORDS[factor](*values.values())
    if factor == OPTIMIZER:
        local = profile.values.get("local.optimizer", "sgd")
        return profile.setting.technique + (f" with local {local}" if local != "sgd" else "")
    texts = {key: text_of_setting(value) for key, value in values.items() if value is not None}
    if factor == "Length of training":
        return ", ".join(f"{text} {key.rpartition('.')[2]}" for key, text in texts.items())
    if factor == RATE:
        texts = {key: text for key, text in texts.items() if key.endswith("learning_rate")} or texts
    return "".join(texts.values()) if len(texts) == 1 else ", ".join(f"{key} {text}" for key, text in texts.items())
