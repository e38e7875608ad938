"""The data of a report: its runs, grouped like the rows of a table, groups of canaries, and contrasts of settings."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.settings import flat
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, panels_first, select_for
from flsim.results.differences import (
    COLUMNS,
    END,
    Pair,
    Row,
    at_equal_perplexity,
    compared_in,
    differences,
    frame_of,
    name_of_configuration,
    of_mean,
    planned,
    share_at_ceiling,
    two_means,
)
from flsim.results.rows import PARTITIONS, RunResults, read_evaluations, read_run
from flsim.results.sweeps import RUNS, Sweep, SweepRun, distinctions, is_sweep, read_sweep, without_copies
from flsim.results.tables import described, quantities_of, user_share
from flsim.runs import roundlog
from flsim.runs.config import Config, load
from flsim.runs.config.custom_code import without_folders
from flsim.show.plots import Curve, curve, exposure_by_utility, is_drawn, measured_values

COUNTS = {
    "planned_sharers": "Sharers, planned",
    "sharers": "actual",
    "planned_insertions": "Copies, planned",
    "insertions": "actual",
}


@dataclass(frozen=True, eq=False)
class RunView:
    """A run in a report."""

    path: Path
    results: RunResults
    config: Config | None
    planned: SweepRun | None = None

    def of_planted(self, metric: str) -> pd.DataFrame:
        """Return float64 [rounds, planted canaries] of the rounds in which the metric was measured for all of them."""
        rows, planted = self.results.rows, self.results.planted["canary"].tolist()
        rows = rows[(rows["metric"] == metric) & rows["canary"].isin(planted)]
        return rows.pivot(index="round", columns="canary", values="value").reindex(columns=planted).dropna()

    def value(self, quantity: Quantity, round_: int | None = None) -> float:
        """Return the count of a flag, the mean over planted canaries, or a number of the model, as displayed."""
        evaluated = self.results.evaluated
        at = evaluated[-1] if round_ is None and evaluated else round_
        values = None if at is None else measured_values(quantity, self.results, at)
        return math.nan if values is None else float(values.mean())

    @cached_property
    def ceiling(self) -> float | None:
        """Return log2(|R| + 1), the largest exposure in bits at the last evaluation; None if |R| is unknown."""
        evaluated = self.results.evaluated
        references = self.results.references(evaluated[-1]) if evaluated else None
        return math.log2(references + 1) if references else None

    @property
    def training_seconds(self) -> float | None:
        """Wall-clock time of all rounds; None if the folder does not store it."""
        times = [line.get("seconds") for line in roundlog.read(self.path)]
        seconds = [time for time in times if isinstance(time, int | float)]
        return sum(seconds) if seconds else None

    @property
    def evaluation_seconds(self) -> float | None:
        """Wall-clock time of all attempts to evaluate; None if there were none."""
        attempts = read_evaluations(self.path)
        return sum(attempt.seconds for attempt in attempts) if attempts else None


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ only in their seed."""

    label: str
    partition: str | None
    runs: list[RunView]

    @cached_property
    def shown_runs(self) -> list[tuple[RunView, int]]:
        """Return the completed runs with their last evaluation; without any, those alive at their last common one."""
        completed = [run for run in self.runs if run.results.status == "completed" and run.results.evaluated]
        if completed:
            return [(run, run.results.evaluated[-1]) for run in completed]
        alive = [run for run in self.runs if run.results.status != "diverged" and run.results.evaluated]
        common = set.intersection(*(set(run.results.evaluated) for run in alive)) if alive else set()
        if common:
            return [(run, max(common)) for run in alive]
        return [(run, run.results.evaluated[-1]) for run in alive[:1]]

    @property
    def is_unfinished(self) -> bool:
        """Return whether the shown runs are not completed."""
        return any(run.results.status != "completed" for run, _ in self.shown_runs)

    @property
    def seeds(self) -> str:
        return f"{len(self.shown_runs)} seed{'s' * (len(self.shown_runs) != 1)}"

    @property
    def technique(self) -> str:
        """Return the algorithm as at the beginning of a row, without the partition, such as ``"DP-FedAvg"``."""
        return self.runs[0].results.label.partition(", ")[0]

    @property
    def style(self) -> int:
        """Return the number of the line style of the setting's partition."""
        return {"iid": 0, "non-iid": 1}.get(self.partition or "", 2)

    def canaries(self, quantities: Sequence[Quantity]) -> pd.DataFrame:
        """Return the rosters of all runs, with the quantities of planted canaries at the last round that is shown."""
        rounds, parts = dict(self.shown_runs), list[pd.DataFrame]()
        for run in rounds or self.runs:
            roster, at = run.results.roster, rounds.get(run)
            is_planted = roster["canary"].isin(run.results.planted["canary"])
            for quantity in quantities:
                values = None if at is None else run.results.of_canaries(quantity.name, at, is_partial=True)
                known = values if values is not None and not values.hasnans else pd.Series(math.nan, roster.index)
                roster = roster.assign(**{quantity.name: np.where(is_planted, known.to_numpy(), math.nan)})
            parts.append(roster)
        return pd.concat(parts, ignore_index=True)

    def outcomes(self, quantities: Sequence[Quantity]) -> pd.DataFrame:
        """Return a row for each configuration of canaries: how often they occur, and means of the quantities."""
        rows = []
        for name, group in by_configuration(self.canaries(quantities)).items():
            means = group.reindex(columns=["p_u", "p_e", *COUNTS, *(quantity.name for quantity in quantities)]).mean()
            rows.append({"planted": name, "canaries": len(group)} | means.to_dict())
        scales = {quantity.name: 100 if quantity.is_flag else quantity.scale for quantity in quantities}
        frame = pd.DataFrame(rows, columns=["planted", "canaries", "p_u", "p_e", *COUNTS, *scales])
        return frame.assign(**{name: frame[name].astype("float64") * scale for name, scale in scales.items()})

    @cached_property
    def exposures(self) -> dict[int, float]:
        """Return mean exposure at the last round that is shown, by seed; an unknown seed is a negative place."""
        seeds = [
            -place if run.results.seed is None else run.results.seed
            for place, (run, _) in enumerate(self.shown_runs, 1)
        ]
        values = [run.value(PRIMARY, round_) for run, round_ in self.shown_runs]
        return {seed: value for seed, value in zip(seeds, values, strict=True) if not math.isnan(value)}

    def curve(self, quantity: Quantity, in_epochs: bool) -> Curve:
        """Return the mean of a quantity over seeds, with a band from the lowest to the highest of several seeds."""
        runs = [run.results for run, _ in self.shown_runs]
        return curve(runs, partial(measured_values, quantity), in_epochs, over_seeds=True, band=_extent)

    @property
    def path(self) -> NDArray[np.float64]:
        """Return float64 [evaluations, 4]: perplexity, mean exposure, and NaN instead of its interval."""
        path = exposure_by_utility([run.results for run, _ in self.shown_runs], over_seeds=True)
        path[:, 2:] = math.nan
        return path


def _extent(values: NDArray[np.float64]) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if len(values) > 1 else (math.nan, math.nan)


@dataclass(frozen=True, eq=False)
class SettingLine:
    """Settings that differ only in the partition: a row of a table that compares IID and non-IID."""

    label: str
    settings: list[Setting] = field(default_factory=list)

    @property
    def both_partitions(self) -> tuple[Setting, Setting] | None:
        """Return the IID and the non-IID setting; None without one of them."""
        by_partition = {setting.partition: setting for setting in reversed(self.settings)}
        both = [by_partition[partition] for partition in PARTITIONS if partition in by_partition]
        return (both[0], both[1]) if len(both) == len(PARTITIONS) else None


@dataclass(frozen=True, eq=False)
class Gathered:
    """The contents of a report."""

    sweeps: list[Sweep]
    lines: list[SettingLine]
    waiting: list[SweepRun]

    @property
    def settings(self) -> list[Setting]:
        return [setting for line in self.lines for setting in line.settings]

    @property
    def runs(self) -> list[RunView]:
        return [run for setting in self.settings for run in setting.runs]

    @cached_property
    def quantities(self) -> list[Quantity]:
        """Quantities in figures and maps: flags, numbers of canaries, and numbers of the model."""
        runs = [run.results for run in self.runs]
        return [quantity for quantity in select_for(quantities_of(runs), "report") if is_drawn(quantity, runs)]

    @property
    def in_epochs(self) -> bool:
        """Return whether the rounds per epoch are known for all runs."""
        return all(run.results.rounds_per_epoch is not None for run in self.runs)


def gather(paths: Sequence[Path]) -> Gathered:
    """Read run folders and sweeps, each once; InputError if a path is neither, a file is damaged, or no run started."""
    sweeps = [read_sweep(path) for path in paths if is_sweep(path)]
    alone = [(path, read_run(path), None) for path in paths if not is_sweep(path)]
    of_sweeps = [(sweep.path / RUNS / run.name, run.results, run) for sweep in sweeps for run in sweep.runs]
    runs = {path.resolve(): _view(path, results, planned) for path, results, planned in [*alone, *of_sweeps] if results}
    views = list(runs.values())
    distinct = without_copies([run.results for run in views], [run.results for run in views if run.planned])
    waiting = [run for sweep in sweeps for run in sweep.runs if run.results is None]
    if not runs:
        names = ", ".join(map(str, paths)) or "no paths"
        raise InputError(f"{names}: no run has started; train a run first")
    return Gathered(sweeps, _lines([run for run in views if run.results in distinct]), waiting)


def by_configuration(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return rows of a roster by the names of configurations of canaries, with the fewest expected copies first."""
    unknown = pd.Series(pd.NA, rows.index, "Int64")
    named = rows.assign(copies=rows.get("planned_insertions", rows.get("insertions", unknown)).astype("Int64"))
    names = pd.Series([name_of_configuration(row) for row in named.to_dict("records")], rows.index)
    numbers = named[["p_u", "p_e", "copies"]].astype("Float64").assign(name=names)
    numbers["often"] = (numbers["p_u"] * numbers["p_e"]).round(12).fillna(numbers["copies"]).fillna(0)
    order = numbers.sort_values(["often", "p_u"], na_position="first", kind="stable")["name"].unique()
    return {name: rows[names == name] for name in order}


def text_of_setting(value: Any, key: str = "") -> str:
    """Return the value of a setting as text."""
    if key == "canaries.p_u":
        return ", ".join(map(user_share, value))
    if key == "canaries.p_e":
        return ", ".join(f"{100 * share:.6g}%" for share in value)
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(text_of_setting, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _view(path: Path, results: RunResults, planned: SweepRun | None) -> RunView:
    file = path / "config.toml"
    return RunView(path, results, load(file) if file.is_file() else None, planned)


def _lines(runs: Sequence[RunView]) -> list[SettingLine]:
    """Group runs so that twins share a row: runs of a sweep by its rows, others by their names and series."""
    groups: dict[Any, dict[Any, list[RunView]]] = {}
    for index, run in enumerate(runs):
        series = run.results.series if run.results.seed is not None else None
        partition, rest = run.results.partition, run.results.label
        if run.planned is not None:
            key: Any = ("sweep", run.path.parent, repr(run.planned.row))
            within: Any = partition
        else:
            within, key = (partition, series or index), ("", rest)
            taken = groups.get(key, {})
            if within not in taken and any(other[0] == partition for other in taken):
                key = ("", rest, within)  # equal text, but other settings
        groups.setdefault(key, {}).setdefault(within, []).append(run)
    firsts = [next(iter(group.values()))[0].results for group in groups.values()]
    words = distinctions(firsts)
    names = [first.label + word for first, word in zip(firsts, words, strict=True)]
    lines = []
    for group, first, name, word in zip(groups.values(), firsts, names, words, strict=True):
        apart = word + f" [{first.name}]" * (names.count(name) > 1)
        settings = [
            Setting(runs[0].results.setting + apart, runs[0].results.partition, runs) for runs in group.values()
        ]
        order = [*PARTITIONS, None]
        lines.append(
            SettingLine(first.label + apart, sorted(settings, key=lambda setting: order.index(setting.partition)))
        )
    return lines


# Contrasts: the effect of one factor on the numbers of a report, with all other settings equal.
#
# A factor is a setting that differs between runs, or several that change only together, such as layers and units of
# equally large networks. A learning rate belongs to the factor that it changes with, unless some settings differ only
# in a learning rate. Two settings differ in one factor if no other pair of settings differs in a part of it.
#
# `contrasts` returns the frame of `flsim.results.differences` with a row for each contrast and quantity, and the
# columns
#
#     factor, setting      the factor, and what the compared settings share
#     scope                "factor": a mean over all pairs of settings; "pair": the IID and the non-IID run of one
#                          setting
#     is_main              whether the row is of a factor, or of the only pair of settings that a factor has
#     pairs, of_pairs      number of compared pairs of settings, of all
#
# Rows of a factor are means over pairs and seeds, with Student's t over seeds. Their flags are shares of the planted
# canaries, times the number in the row "canaries".


PARTITION, TECHNIQUE, OPTIMIZER, CLIP, NOISE, LENGTH, RATE = (
    *("Partition", "Technique", "Optimizer", "Clip", "Noise multiplier", "Length of training", "Learning rate"),
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
    LENGTH: ("training.rounds", "training.steps", "training.epochs", "training.words"),
}
FACTOR_OF = {key: factor for factor, keys in FACTORS.items() for key in keys}
ORDER = {factor: place for place, factor in enumerate([*FACTORS, RATE])}
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
    """A setting with the values of its configuration by factor and key, without unset values, and its sweep."""

    setting: Setting
    levels: Mapping[str, Mapping[str, Any]]
    sweep: Path | None

    @property
    def kind(self) -> Any:
        return self.levels[TECHNIQUE]["training.kind"]


def contrasts(gathered: Gathered) -> pd.DataFrame:
    """Return the frame that is described above; a single pair of partitions has its row, not that of a factor."""
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
    alike = [pair for pair in by_seed if len({frozenset(run.ceiling for run in of.values()) for of in pair}) == 1]
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
        is_unlike = any(all(pair) and pair not in alike for pair in by_seed)
        why = "the numbers of references differ" if is_unlike else "no seed is completed on both sides"
        why = f"seeds {lost}: a run diverged" if lost else why
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
        levels: dict[str, dict[str, Any]] = {}
        for key, value in flat(without_folders(run.config)):
            # older sweeps do not store the names of chosen settings, which were learning rates
            is_chosen = search and (key in search.chosen or (not search.chosen and RATES.fullmatch(key)))
            if not (value is None or FOLLOWING.fullmatch(key) or key == "seed" or is_chosen):
                factor = FACTOR_OF.get(key) or (RATE if RATES.fullmatch(key) else key)
                several = tuple(value) if isinstance(value, list) else (value,)
                levels.setdefault(factor, {})[key] = several if len(several) != 1 else several[0]
        for key, length in levels.get(LENGTH, {}).items():
            like = [other for other in lengths if math.isclose(other, length, rel_tol=LIKE_LENGTH)]
            lengths += [] if like else [length]
            levels[LENGTH][key] = like[0] if like else length
        # records that are not in partitions are drawn at random, as in "iid"
        levels[PARTITION] = {"data.partition": run.config.partition or "iid"}
        profiles.append(_Profile(setting, levels, sweep))
    return profiles


def _techniques(profiles: Sequence[_Profile]) -> dict[Setting, str]:
    """Return the name of each setting's technique; one technique with several names is central training."""
    names: dict[tuple[Any, ...], dict[Setting, str]] = {}
    for profile in profiles:
        technique = tuple(profile.levels[TECHNIQUE].values())
        names.setdefault(technique, {})[profile.setting] = PLAIN_NAME.sub("", profile.setting.technique)
    return {
        setting: name if len({*of_technique.values()}) == 1 else "central training"
        for of_technique in names.values()
        for setting, name in of_technique.items()
    }


def _differing(a: _Profile, b: _Profile) -> frozenset[str]:
    """Return the factors in which settings differ, without settings that only one technique has."""
    is_of_one_kind = a.kind == b.kind
    factors = {OPTIMIZER} if not is_of_one_kind and _optimizer(a) != _optimizer(b) else set()
    for factor in {*a.levels, *b.levels}:
        of_a, of_b = (profile.levels.get(factor, {}) for profile in (a, b))
        keys = {*of_a, *of_b}
        if not is_of_one_kind:
            common = {*of_a} & {*of_b} if factor != RATE else set()
            keys = {key for key in keys if key in common or not key.startswith(("training.", "local.", "audit."))}
        if any(of_a.get(key) != of_b.get(key) for key in keys):
            factors.add(factor)
    return frozenset(factors)


def _optimizer(profile: _Profile) -> Any:
    """Return the name of the optimizer that techniques have in common: SGD over records is like plain averaging."""
    values = profile.levels.get(OPTIMIZER, {})
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
    between, values = 0, pd.DataFrame([dict(level) for level in levels])
    changing = values.loc[:, values.nunique(dropna=False) > 1]
    if len(others) > 1 and changing.notna().all(axis=None) and changing.select_dtypes("number").equals(changing):
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


def _level(factor: str, profile: _Profile) -> tuple[Any, ...]:
    return tuple(profile.levels.get(factor, {}).items())


def _rank(factor: str, profile: _Profile) -> tuple[Any, ...]:
    """Return the position of a setting's value: non-IID data, central training, unset and small values are first."""
    if factor == PARTITION:
        return (profile.levels[PARTITION]["data.partition"] == "iid",)
    if factor == TECHNIQUE:
        return (profile.kind != "central",)
    if factor == OPTIMIZER:
        return ()
    return tuple(value if isinstance(value, int | float) else 0.0 for _, value in _level(factor, profile))


def _partition(partition: str) -> str:
    return PARTITIONS[partition].replace("N", "n")


# The text of a factor's values, for factors whose text is not only the values of its settings.
WORDS: Mapping[str, Callable[..., str]] = {
    PARTITION: _partition,
    CLIP: lambda clip, at: f"clip at quantile {at:g}" if at else "no clip" if clip is None else f"clip {clip:g}",
    NOISE: lambda noise: f"z={noise:g}" if noise else "no noise",
    "Batch size": "b_r={}".format,
    "Cohort size": "b_u={}".format,
    "data.corpus": lambda corpus: "/".join(Path(str(corpus).partition("?")[0]).parts[-2:]),
}


def _word(factor: str, profile: _Profile) -> str:
    values = profile.levels.get(factor, {})
    if factor in WORDS:
        return WORDS[factor](*map(values.get, FACTORS.get(factor, (factor,))))
    if factor == OPTIMIZER:
        local = values.get("local.optimizer", "sgd")
        return profile.setting.technique + (f" with local {local}" if local != "sgd" else "")
    texts = {key: text_of_setting(value) for key, value in values.items()}
    if factor == LENGTH:
        return ", ".join(f"{text} {key.rpartition('.')[2]}" for key, text in texts.items())
    if factor == RATE:
        texts = {key: text for key, text in texts.items() if key.endswith("learning_rate")} or texts
    return "".join(texts.values()) if len(texts) == 1 else ", ".join(f"{key} {text}" for key, text in texts.items())
