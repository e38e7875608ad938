"""What a report is about: runs, grouped as a table's rows group them, with what else their folders say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, shown
from flsim.results.columns import quantities_of
from flsim.results.copies import without_copies
from flsim.results.evaluations import read_evaluations
from flsim.results.run_file import WORLDS
from flsim.results.store import RunResults, read_run
from flsim.results.sweeps import RUNS, Sweep, SweepRun, is_sweep, read_sweep
from flsim.runs import roundlog
from flsim.runs.config import Config, load


@dataclass(frozen=True, eq=False)
class RunView:
    """A run.

    Attributes:
        path: its folder.
        results: what it found.
        config: its settings; None where the folder does not say them.
        planned: what the sweep that it is of says of it; None where it is of none.
    """

    path: Path
    results: RunResults
    config: Config | None
    planned: SweepRun | None = None

    @cached_property
    def _canaries(self) -> dict[str, pd.DataFrame]:
        rows = self.results.rows[self.results.rows["canary"] != ""]
        known = self.results.roster["canary"].tolist()
        return {
            str(metric): of.pivot(index="round", columns="canary", values="value").reindex(columns=known).dropna()
            for metric, of in rows.groupby("metric")
        }

    def of_canaries(self, metric: str) -> pd.DataFrame:
        """Float64 [rounds, canaries], of the rounds where it was measured of all canaries."""
        return self._canaries.get(metric, pd.DataFrame())

    @cached_property
    def _over_rounds(self) -> "dict[str, pd.Series[float]]":
        series: dict[str, pd.Series[float]] = {}
        for quantity in shown(quantities_of([self.results]), "report"):
            if quantity.of_canaries and len(values := self.of_canaries(quantity.name)):
                series[quantity.name] = (
                    (values == 1).sum(axis=1).astype("float64") if quantity.is_flag else values.mean(axis=1)
                )
        rows = self.results.rows
        for metric, of in rows[(rows["canary"] == "") & np.isfinite(rows["value"])].groupby("metric"):
            series[str(metric)] = of.set_index("round")["value"].sort_index()
        return series

    def over_rounds(self, metric: str) -> "pd.Series[float]":
        """By round: the count of a flag, the mean over canaries of a number, or a finite metric of the model."""
        return self._over_rounds.get(metric, pd.Series(dtype="float64"))

    @property
    def references(self) -> float | None:
        """|R| of the last evaluation; None where there is none."""
        last = self.results.evaluated
        return self.results.references(last[-1]) if last else None

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return roundlog.read(self.path)

    @property
    def training_seconds(self) -> float | None:
        """Of the clock, in rounds; None where the folder does not say."""
        seconds = [line["seconds"] for line in self.log if isinstance(line.get("seconds"), int | float)]
        return sum(seconds) if seconds else None

    @property
    def evaluation_seconds(self) -> float | None:
        """Of the clock, over all attempts; None without any."""
        found = read_evaluations(self.path)
        return sum(each.seconds for each in found) if found else None


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ in nothing but the seed.

    Attributes:
        label: in the words of a table, and unlike any other's of the report.
        world: "iid", "non-iid", or None where records are drawn in the same way in both.
        runs: all of them.
    """

    label: str
    world: str | None
    runs: list[RunView]

    @cached_property
    def shown(self) -> list[tuple[RunView, int]]:
        """Runs that means are over, each with its last evaluated round: the completed ones.

        Where none is: those that have not diverged, at the last round that all of them were evaluated at.
        """
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
        """Whether what is shown is of runs that are not completed."""
        return any(run.results.status != "completed" for run, _ in self.shown)

    @property
    def canaries(self) -> int:
        return len(self.runs[0].results.roster)

    @property
    def seeds(self) -> str:
        return f"{len(self.shown)} seed{'s' * (len(self.shown) != 1)}"

    def last(self, metric: str) -> pd.DataFrame:
        """The canaries of all shown runs at their last round: the roster's columns, and ``value``; maybe empty."""
        parts = []
        for run, round_ in self.shown:
            found = run.of_canaries(metric)
            if round_ in found.index:
                parts.append(run.results.roster.assign(value=found.loc[round_].to_numpy()))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def mean(self, metric: str) -> float | None:
        """Of `RunView.over_rounds` at the last round, over the runs that have it."""
        found = [values[round_] for run, round_ in self.shown if round_ in (values := run.over_rounds(metric)).index]
        return float(np.mean(found)) if found else None

    def share(self, metric: str) -> float | None:
        """Of canaries that are memorized at the last round."""
        last = self.last(metric)
        return None if last.empty else float((last["value"] == 1).mean())

    def curve(self, metric: str, in_epochs: bool) -> NDArray[np.float64]:
        """Float64 [points, 2 + seeds]: round or epochs, the mean over seeds, and each seed's own."""
        values = [run.over_rounds(metric) for run, _ in self.shown]
        common = sorted(set.intersection(*(set(each.index) for each in values)) if values else ())
        points = []
        for round_ in common:
            x = np.mean([run.results.epochs_of(round_) if in_epochs else round_ for run, _ in self.shown])
            each = [of[round_] for of in values]
            points.append((x, np.mean(each), *each))
        return np.array(points, dtype="float64").reshape(len(points), 2 + len(values))


@dataclass(frozen=True, eq=False)
class Line:
    """Settings that differ in the world alone: a row of a table of IID beside non-IID.

    Attributes:
        label: what they share.
        settings: one, or IID and non-IID.
    """

    label: str
    settings: list[Setting] = field(default_factory=list)

    def of(self, world: str) -> Setting | None:
        return next((setting for setting in self.settings if setting.world == world), None)

    @property
    def is_pair(self) -> bool:
        return bool((iid := self.of("iid")) and (other := self.of("non-iid")) and iid.shown and other.shown)


@dataclass(frozen=True, eq=False)
class Gathered:
    """All that a report shows.

    Attributes:
        sweeps: those among the paths.
        lines: all runs that have begun.
        waiting: runs of sweeps that have not.
    """

    sweeps: list[Sweep]
    lines: list[Line]
    waiting: list[SweepRun]

    @property
    def settings(self) -> list[Setting]:
        return [setting for line in self.lines for setting in line.settings]

    @property
    def runs(self) -> list[RunView]:
        return [run for setting in self.settings for run in setting.runs]

    @property
    def pairs(self) -> list[Line]:
        return [line for line in self.lines if line.is_pair]

    @cached_property
    def quantities(self) -> list[Quantity]:
        """What figures and maps show: flags, numbers of canaries, and numbers of the model."""
        return shown(quantities_of([run.results for run in self.runs]), "report")

    @property
    def in_epochs(self) -> bool:
        """Whether all runs know how many rounds an epoch is."""
        return all(run.results.rounds_per_epoch is not None for run in self.runs)


def gather(paths: Sequence[Path]) -> Gathered:
    """Read run folders and sweeps; a run that is named twice counts once.

    Raises:
        InputError: neither of both, something damaged, or no run that has begun.
    """
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
    kept = without_copies([run.results for run in views], [run.results for run in views if run.planned])
    waiting = [run for sweep in sweeps for run in sweep.runs if run.results is None]
    if not runs:
        names = ", ".join(map(str, paths)) or "no paths"
        raise InputError(f"{names}: no run has started, so there is nothing to report; train first")
    return Gathered(sweeps, _lines([run for run in views if run.results in kept]), waiting)


def _view(path: Path, results: RunResults, planned: SweepRun | None) -> RunView:
    file = path / "config.toml"
    return RunView(path, results, load(file) if file.is_file() else None, planned)


def _lines(runs: Sequence[RunView]) -> list[Line]:
    """Twins together: the runs of a sweep by its rows, others by their words, as `flsim table --over-seeds`."""
    groups: dict[Any, dict[Any, list[RunView]]] = {}
    for index, run in enumerate(runs):
        series = run.results.series if run.results.seed is not None else None
        world, rest = run.results.world, run.results.label
        if run.planned is not None:
            key: Any = ("sweep", run.path.parent, repr(run.planned.row))
            within: Any = world
        else:
            within, key = (world, series or index), ("", rest)
            taken = groups.get(key, {})
            if within not in taken and any(other[0] == world for other in taken):
                key = ("", rest, within)  # equal words, other settings
        groups.setdefault(key, {}).setdefault(within, []).append(run)
    found = list(groups.values())
    names = [next(iter(of.values()))[0].results.label for of in found]
    lines = []
    for of, name in zip(found, names, strict=True):
        first = next(iter(of.values()))[0]
        apart = f" [{_apart(first)}]" if names.count(name) > 1 else ""
        settings = [Setting(each[0].results.setting + apart, each[0].results.world, each) for each in of.values()]
        order = [*WORLDS, None]
        lines.append(Line(name + apart, sorted(settings, key=lambda setting: order.index(setting.world))))
    return lines


def _apart(run: RunView) -> str:
    """What tells a run's row from another of the same words."""
    if run.planned is None:
        return run.results.name
    axes: Mapping[str, Any] = {name: value for name, value in run.planned.axes.items() if name != "data.world"}
    return ", ".join([run.planned.grid, *(f"{name.split('.')[-1]} {value}" for name, value in axes.items())])
