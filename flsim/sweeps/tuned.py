"""The outcome of `flsim tune`: a TOML file with the chosen values of each group, and all trials of the search.

A tier of a sweep names the file (``tuned = "..."``). Its runs then take the values. The seeds of the search, and the
corpus of the search if it had its own, are refused.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from flsim.base.errors import InputError
from flsim.base.files import new_file
from flsim.runs.config import toml
from flsim.sweeps.search import Point
from flsim.sweeps.values import Strict, Values, slug

DIGITS = 12  # of a digest that people read


@dataclass(frozen=True)
class TunedTrial(Strict):
    """A trial of a group.

    Attributes:
        values: values of the searched settings.
        perplexities: perplexity after each share of training that it reached; infinite where it diverged.
    """

    values: Point
    perplexities: tuple[float, ...]

    @property
    def has_diverged(self) -> bool:
        """Return whether a run of the trial diverged."""
        return math.inf in self.perplexities


@dataclass(frozen=True)
class TunedGroup(Strict):
    """The outcome for the runs of a sweep that take the same values.

    Attributes:
        name: name of the group.
        grid: its grid.
        axes: values of the axes that all its runs have.
        values: the chosen values, by setting.
        perplexity: perplexity of the chosen trial at the end of training.
        widenings: how often its range was widened.
        trials: all its trials.
    """

    name: str
    grid: str
    axes: Values
    values: Point
    perplexity: float
    widenings: int
    trials: tuple[TunedTrial, ...]


@dataclass(frozen=True)
class Tuned(Strict):
    """The outcome of a search.

    Attributes:
        title, tier: the sweep's title, and the tier.
        training: digest of the grids and settings of training; see `flsim.sweeps.definition.training_digest`.
        search: digest of the search: its settings, and those of its first runs.
        objective: what was minimized, for people.
        method, trials, halving: as in `flsim.sweeps.search.Rule`.
        runs: number of runs of a trial, over seeds and axes.
        by: axes of the sweep by which groups differ.
        seeds: seeds of the search.
        corpus: digest of the corpus of the search.
        has_own_corpus: whether the search had another corpus than the sweep.
        groups: outcomes by group.
        source: the file; empty in the file itself.
    """

    title: str
    tier: str
    training: str
    search: str
    objective: str
    method: str
    trials: int
    halving: tuple[float, ...]
    runs: int
    by: tuple[str, ...]
    seeds: tuple[int, ...]
    corpus: str
    has_own_corpus: bool
    groups: tuple[TunedGroup, ...]
    source: str = ""

    def values_for(self, grid: str, axes: Values, overrides: Iterable[str] = ()) -> Point:
        """Return the chosen values for a run.

        Raises:
            InputError: the run is in no group, or an override changes a chosen value.
        """
        for group in self.groups:
            if group.grid == grid and all(axes.get(axis) == value for axis, value in group.axes.items()):
                for override in overrides:
                    if (key := override.partition("=")[0].strip()) in group.values:
                        raise InputError(
                            f"--set {key}: {self.source} has chosen it; remove `tuned` from the tier to set it"
                        )
                return group.values
        point = ", ".join(f"{axis} {value}" for axis, value in axes.items())
        raise InputError(f"{self.source}: nothing was tuned for grid {grid} with {point}; tune it with `flsim tune`")

    def refuse_seed(self, seed: int) -> None:
        """Raise InputError for a seed of the search."""
        if seed in self.seeds:
            raise InputError(
                f"seed {seed}: {self.source} was tuned on it, so it must not be reported; take other seeds"
            )

    def refuse_corpus(self, digest: str, where: object) -> None:
        """Raise InputError for the digest of the corpus that the search had of its own."""
        if self.has_own_corpus and digest == self.corpus:
            raise InputError(
                f"{where}: {self.source} was tuned on this corpus, so it must not be reported; take another"
            )

    @property
    def keys(self) -> list[str]:
        """Return the settings that were chosen, such as ``local.learning_rate``."""
        return sorted({key for group in self.groups for key in group.values})

    @property
    def note(self) -> str:
        """Return sentences below a table on how the values were chosen."""
        shares = ", ".join(f"{100 * share:g}%" for share in self.halving[:-1])
        widened = [group.name for group in self.groups if group.widenings]
        before = " before ranges were widened" * bool(widened)
        parts = [
            f"Settings were chosen by {self.objective} alone, never by canaries (search {self.search[:DIGITS]}): "
            f"{_chosen(self.groups)}.",
            f"Each group had the same budget{before}: {self.trials} trials ({self.method}) of {self.runs} "
            f"{'run' if self.runs == 1 else 'runs'}" + (f", halved after {shares} of training" if shares else "") + ",",
            f"on seeds {', '.join(map(str, self.seeds))}"
            + (" and a corpus of their own." * self.has_own_corpus or "."),
        ]
        if widened:
            parts.append(f"Ranges were widened, with more trials, for {', '.join(widened)}.")
        return " ".join(parts)

    def write(self, path: Path) -> None:
        """Write the file."""
        values = asdict(self)
        del values["source"]
        with new_file(path) as partial:
            partial.write_text(f"# Written by `flsim tune`; name it in a tier of the sweep.\n\n{tomli_w.dumps(values)}")


def _chosen(groups: Iterable[TunedGroup]) -> str:
    """Return the chosen values in words, each with the groups that have it.

    Groups of a grid are named by no more of their axes than tell different values apart: ``sgd`` where all of its
    groups share them, and not ``sgd-iid, sgd-non-iid``.
    """
    of_grids: dict[str, list[TunedGroup]] = {}
    for group in groups:
        of_grids.setdefault(group.grid, []).append(group)
    names: dict[str, list[str]] = {}
    for grid, of_grid in of_grids.items():
        for name, values in _shortest(grid, of_grid).items():
            text = ", ".join(f"{key} {value:g}" for key, value in values.items())
            names.setdefault(text, []).append(name)
    return "; ".join(f"{text} for {', '.join(of_text)}" for text, of_text in names.items())


def _shortest(grid: str, groups: Sequence[TunedGroup]) -> dict[str, Point]:
    """Return the values of a grid's groups by the shortest names that tell different values apart."""
    most = max(len(group.axes) for group in groups)
    for length in range(most):
        values: dict[str, list[Point]] = {}
        for group in groups:
            parts = [slug(axis, value) for axis, value in list(group.axes.items())[:length]]
            values.setdefault("-".join([grid, *parts]), []).append(group.values)
        if all(value == of_name[0] for of_name in values.values() for value in of_name):
            return {name: of_name[0] for name, of_name in values.items()}
    return {group.name: group.values for group in groups}


def read_tuned(path: Path) -> Tuned:
    """Read the outcome of a search.

    Raises:
        InputError: there is no such file, or it is no outcome of a search.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file, and a tier takes its settings from it; make it with `flsim tune`")
    values: dict[str, Any] = toml.read(path)
    tuned = toml.validate(Tuned, values, str(path))
    for group in tuned.groups:
        if not math.isfinite(group.perplexity) or not group.values:
            raise InputError(f"{path}: group {group.name} has no chosen values; make it again with `flsim tune`")
    return replace(tuned, source=str(path))
