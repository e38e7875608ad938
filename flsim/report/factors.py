"""Factors of a report's settings, and the pairs of settings that differ in one factor alone.

A factor is a setting that differs between runs, or several that change only together, such as layers and units of
equally large networks. Learning rates belong to what they change with, unless some settings differ in a rate alone. Two
settings differ in a factor alone if no other pair of settings differs in a part of it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from flsim.base.mappings import flat
from flsim.report.blocks import listed
from flsim.report.gather import Gathered, Setting
from flsim.results.run_file import WORLDS
from flsim.results.sweeps import Sweep
from flsim.runs.config import Config
from flsim.runs.config.own_code import without_folders

WORLD, TECHNIQUE, OPTIMIZER, CLIP, NOISE, RATE = (
    *("World", "Technique", "Optimizer", "Clip", "Noise multiplier", "Learning rate"),
)
CORPUS = "data.corpus"
# The names of factors that are of several keys, or whose key does not speak for itself; others have their key's name.
FACTORS = {
    WORLD: ("data.world",),
    TECHNIQUE: ("training.kind", "training.algorithm"),
    OPTIMIZER: ("training.optimizer", "training.server_optimizer", "local.optimizer"),
    CLIP: ("privacy.clip", "privacy.target_quantile"),
    NOISE: ("privacy.noise_multiplier",),
    "Batch size": ("training.batch_size",),
    "Cohort": ("training.cohort",),
    "Length of training": ("training.rounds", "training.steps", "training.epochs", "training.words"),
}
OWNERS = {key: factor for factor, keys in FACTORS.items() for key in keys}
LENGTHS = FACTORS["Length of training"]
RATES = re.compile(r"(training|local)\.(.*(learning_rate|schedule|momentum|tau|beta2)|tuned_at|warmup)")
# What follows from other settings, and what changes no result.
FOLLOWING = re.compile(
    r"privacy\.(mechanism|delta|count_noise|clip_learning_rate)|system\..*|evaluation\.(every.*|also|beam_width|decide|samples|nodes)"
)
LIKE_LENGTH = 0.05  # relative difference of lengths of training that count as equal: the paper's 7,840 and 8,000 rounds
PLAIN_NAME = re.compile(r"^DP-|\+.*$")

Level = tuple[Any, ...]


@dataclass(frozen=True)
class Contrast:
    """Pairs of settings that differ in one factor alone, at two of its values.

    Attributes:
        factor: name of the factor, such as "World".
        within: name of what all these settings share, such as "FedAvg"; empty if there is nothing else.
        a, b: names of the two values.
        pairs: settings with value a, each with one of value b.
        between: number of values between a and b, where these are the largest and the smallest number.
    """

    factor: str
    within: str
    a: str
    b: str
    pairs: Sequence[tuple[Setting, Setting]]
    between: int = 0


@dataclass(frozen=True, eq=False)
class _Profile:
    """A setting with the values of its configuration by key, and the sweep that it belongs to."""

    setting: Setting
    config: Config
    values: Mapping[str, Any]
    sweep: Path | None

    @property
    def technique(self) -> tuple[Any, Any]:
        return self.values["training.kind"], self.values.get("training.algorithm")


def name_of(setting: Setting) -> str:
    """Return the algorithm of a setting as its row in a table begins, without the world, such as ``"DP-FedAvg"``."""
    return setting.runs[0].results.label.partition(", ")[0]


def techniques(gathered: Gathered) -> dict[Setting, str]:
    """Return the technique of each setting: central training, or a federated algorithm, whatever its optimizer.

    Settings whose configuration is not known are left out.
    """
    return _techniques(_profiles(gathered))


def contrasts(gathered: Gathered) -> list[Contrast]:
    """Return each factor's contrasts: world first, within each technique, and techniques within each world."""
    profiles = _profiles(gathered)
    names = _techniques(profiles)
    pairs = [(a, b, owners) for a, b in combinations(profiles, 2) if a.sweep == b.sweep and (owners := _owners(a, b))]
    if frozenset({RATE}) not in {owners for _, _, owners in pairs}:  # rates only follow: an optimizer has its own
        pairs = [(a, b, owners - {RATE}) for a, b, owners in pairs]
    every = {owners for _, _, owners in pairs}
    smallest = [owners for owners in every if not any(other < owners for other in every)]
    order = [*FACTORS, RATE]
    smallest.sort(key=lambda owners: (min(map(_place(order), owners)), len(owners), sorted(owners)))
    every_contrast: list[Contrast] = []
    for owners in smallest:
        strata: dict[str, list[tuple[_Profile, _Profile]]] = {}
        for a, b, others in pairs:
            if others == owners:
                strata.setdefault(_within(a, owners, names), []).append((a, b))
        for within, of_stratum in strata.items():
            every_contrast += _contrasts(owners, order, within, of_stratum, names)
    return every_contrast


def _place(order: Sequence[str]) -> Any:
    return lambda owner: order.index(owner) if owner in order else len(order)


def _profiles(gathered: Gathered) -> list[_Profile]:
    searched = {sweep.path: sweep for sweep in gathered.sweeps if sweep.tuned}
    profiles, lengths = list[_Profile](), list[float]()
    for setting in gathered.settings:
        run = setting.runs[0]
        if run.config is None:
            continue
        sweep = run.path.parent.parent if run.planned else None
        values: dict[str, Any] = {}
        for key, value in flat(without_folders(run.config)):
            if not (
                FOLLOWING.fullmatch(key) or key == "seed" or _is_chosen(key, searched.get(sweep) if sweep else None)
            ):
                values[key] = tuple(value) if isinstance(value, list) else value
        for key in {*LENGTHS} & {*values}:
            like = [length for length in lengths if math.isclose(length, values[key], rel_tol=LIKE_LENGTH)]
            lengths += [] if like else [values[key]]
            values[key] = like[0] if like else values[key]
        values["data.world"] = run.config.world or "iid"  # otherwise records are drawn at random, as in world "iid"
        profiles.append(_Profile(setting, run.config, values, sweep))
    return profiles


def _is_chosen(key: str, sweep: Sweep | None) -> bool:
    """Return whether a search chose a setting; an older sweep does not say which, and they were learning rates."""
    return sweep is not None and (key in sweep.chosen or (not sweep.chosen and bool(RATES.fullmatch(key))))


def _techniques(profiles: Sequence[_Profile]) -> dict[Setting, str]:
    names: dict[tuple[Any, Any], list[str]] = {}
    for profile in profiles:
        names.setdefault(profile.technique, []).append(PLAIN_NAME.sub("", name_of(profile.setting)))
    return {
        profile.setting: own[0] if len(own := sorted({*names[profile.technique]})) == 1 else "central training"
        for profile in profiles
    }


def _owners(a: _Profile, b: _Profile) -> frozenset[str]:
    """Return the factors in which two settings differ.

    Techniques are averaged over settings that only one of them has, such as the users in a round.
    """
    is_of_one_kind = a.values["training.kind"] == b.values["training.kind"]
    owners = set()
    for key in {*a.values, *b.values}:
        ours, theirs = a.values.get(key), b.values.get(key)
        if ours == theirs:
            continue
        is_own = not is_of_one_kind and key.startswith(("training.", "local.", "audit."))
        if is_own and key != "training.kind" and (None in (ours, theirs) or RATES.fullmatch(key)):
            continue
        owners.add(OWNERS.get(key) or (RATE if RATES.fullmatch(key) else key))
    if not is_of_one_kind and _optimizer(a) != _optimizer(b):
        owners.add(OPTIMIZER)
    return frozenset(owners)


def _optimizer(profile: _Profile) -> Any:
    """Return the name of the optimizer that techniques have in common: SGD over records is like plain averaging."""
    values = profile.values
    server, local = values.get("training.server_optimizer"), values.get("local.optimizer")
    if server is None:
        return values.get("training.optimizer")
    return server if local == "sgd" else (server, local)


def _within(profile: _Profile, owners: frozenset[str], names: Mapping[Setting, str]) -> str:
    if TECHNIQUE in owners:
        worlds = {other.world for other in names} - {None}
        world = profile.setting.world
        return "" if WORLD in owners or len(worlds) < 2 or world is None else f"{_world(world)} data"
    return names[profile.setting] if len({*names.values()}) > 1 else ""


def _contrasts(
    owners: frozenset[str],
    order: Sequence[str],
    within: str,
    pairs: Sequence[tuple[_Profile, _Profile]],
    names: Mapping[Setting, str],
) -> Iterator[Contrast]:
    """Yield each value against the first one; of numbers, only the largest against the smallest.

    Where factors change only together, the values are those of the first one.
    """
    first_owner, *following = sorted(owners, key=lambda owner: (_place(order)(owner), owner))
    levels: dict[Level, str] = {}
    for profile in sorted((profile for pair in pairs for profile in pair), key=lambda own: _rank(first_owner, own)):
        name = names[profile.setting] if first_owner == TECHNIQUE else _word(first_owner, profile)
        levels.setdefault(_level(first_owner, profile), name)
    first, *others = levels
    between, changing = 0, [values for values in zip(*levels, strict=True) if len({*values}) > 1]
    if len(others) > 1 and all(isinstance(value, int | float) for values in changing for value in values):
        others, between = others[-1:], len(others) - 1
    both_ways = [*pairs, *((b, a) for a, b in pairs)]
    for level in others:
        compared = [(a, b) for a, b in both_ways if (_level(first_owner, a), _level(first_owner, b)) == (level, first)]
        if not compared:
            continue
        has_rates = RATE not in owners and any(RATE in _owners(a, b) for a, b in compared)
        own = [owner[0].lower() + owner[1:] for owner in [*following, *[RATE] * has_rates]]
        title = first_owner + (f" (each with its {listed(own)})" if own else "")
        settings = [(a.setting, b.setting) for a, b in compared]
        yield Contrast(title, within, levels[level], levels[first], settings, between)


def _keys(owner: str, values: Mapping[str, Any]) -> list[str]:
    if owner == RATE:
        return sorted(key for key in values if RATES.fullmatch(key))
    return list(FACTORS.get(owner, (owner,)))


def _level(owner: str, profile: _Profile) -> Level:
    values = profile.values
    return tuple(_single(values.get(key)) for key in _keys(owner, values))


def _single(value: Any) -> Any:
    """Return the value of a list of one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _rank(owner: str, profile: _Profile) -> tuple[Any, ...]:
    """Return the place of a setting's value: users' own data, plain training, unset and small values come first."""
    if owner == WORLD:
        return (profile.values["data.world"] == "iid",)
    if owner == TECHNIQUE:
        return (profile.values["training.kind"] != "central",)
    if owner == OPTIMIZER:
        return ()
    return tuple(
        (value is not None, value if isinstance(value, int | float) else 0.0) for value in _level(owner, profile)
    )


def _word(owner: str, profile: _Profile) -> str:
    values = profile.values
    if owner == WORLD:
        return _world(values["data.world"])
    if owner == OPTIMIZER:
        local = values.get("local.optimizer", "sgd")
        return name_of(profile.setting) if local == "sgd" else f"{name_of(profile.setting)} with local {local}"
    if owner == CLIP:
        clip, quantile = (values.get(key) for key in FACTORS[CLIP])
        return f"clip at quantile {quantile:g}" if quantile else "no clip" if clip is None else f"clip {clip:g}"
    if owner == NOISE:
        noise = values.get("privacy.noise_multiplier")
        return f"z={noise:g}" if noise else "no noise"
    if owner in {"Batch size", "Cohort"}:
        return f"{'b_r' if owner == 'Batch size' else 'b_u'}={values[FACTORS[owner][0]]}"
    if owner == CORPUS:
        return "/".join(Path(str(values[owner]).partition("?")[0]).parts[-2:])
    keys = [key for key in _keys(owner, values) if key in values]
    if owner == "Length of training":
        return ", ".join(f"{_text(values[key])} {key.rpartition('.')[2]}" for key in keys)
    keys = [key for key in keys if key.endswith("learning_rate")] or keys if owner == RATE else keys
    return ", ".join(f"{key} {_text(values[key])}" for key in keys)


def _world(world: str) -> str:
    """Return the name of a world within a sentence."""
    return WORLDS[world].replace("N", "n")


def _text(value: Any) -> str:
    value = _single(value)
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
