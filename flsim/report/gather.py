"""The data of a report: its runs, grouped like the rows of a table, and groups of their canaries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import quantities_of
from flsim.results.differences import name_of_configuration
from flsim.results.seeds import distinctions, without_copies
from flsim.results.store import PARTITIONS, RunResults, read_evaluations, read_run
from flsim.results.sweeps import RUNS, Sweep, SweepRun, is_sweep, read_sweep
from flsim.results.tables import user_share
from flsim.runs import roundlog
from flsim.runs.config import Config, load
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
        """Return float64 [rounds, planted canaries] of the rounds in which the metric was measured for all canaries."""
        measured = {
            round_: values
            for round_ in self.results.evaluated
            if (values := self.results.of_canaries(metric, round_, is_partial=True)) is not None
        }
        frame = pd.DataFrame(measured).T.dropna()
        return frame[self.results.planted["canary"].tolist()] if len(frame) else frame

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
class Line:
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
    lines: list[Line]
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
    runs: dict[Path, RunView] = {}
    for path in paths:
        if not is_sweep(path):
            runs[path.resolve()] = _view(path, read_run(path), None)
    for sweep in sweeps:
        for run in sweep.runs:
            if run.results is not None:
                path = sweep.path / RUNS / run.name
                runs[path.resolve()] = _view(path, run.results, run)
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


def percent(share: float) -> str:
    """Return a share as a percentage with up to six digits."""
    return f"{100 * share:.6g}%"


def text_of_setting(value: Any, key: str = "") -> str:
    """Return the value of a setting as text."""
    if key in {"canaries.p_u", "canaries.p_e"}:
        return ", ".join(map(user_share if key.endswith("u") else percent, value))
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(text_of_setting, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _view(path: Path, results: RunResults, planned: SweepRun | None) -> RunView:
    file = path / "config.toml"
    return RunView(path, results, load(file) if file.is_file() else None, planned)


def _lines(runs: Sequence[RunView]) -> list[Line]:
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
        lines.append(Line(first.label + apart, sorted(settings, key=lambda setting: order.index(setting.partition))))
    return lines
