"""Series of runs that differ only in their seed: groups, averaged runs, intervals, names and copies."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.results.rows import KEY
from flsim.results.store import RunResults, read_run_file, refuse_two_points, setting_of


@dataclass(frozen=True)
class Sample:
    """The runs of a series that can be averaged."""

    runs: list[RunResults]  # all runs of the series, in the order given
    taken: list[tuple[RunResults, int]]  # the averaged runs, each with its evaluated round
    left_out: dict[str, str]  # the reason for each other run, by name


def by_series(runs: Sequence[RunResults]) -> list[list[RunResults]]:
    """Return runs grouped by series, in the order given; an older run without a series is a separate group.

    A series does not fix the length of training. If a seed occurs twice, runs with equal numbers of rounds are a group.
    Raises InputError if two runs have the same series, seed and length.
    """
    groups: dict[tuple[str, int], list[RunResults]] = {}
    for index, run in enumerate(runs):
        known = run.series is not None and run.seed is not None
        groups.setdefault((run.series or "", -1) if known else ("", index), []).append(run)
    parts = [part for group in groups.values() for part in _by_length(group)]
    place = {id(run): index for index, run in enumerate(runs)}
    return sorted(parts, key=lambda part: place[id(part[0])])


def _by_length(group: list[RunResults]) -> list[list[RunResults]]:
    if len({run.seed for run in group}) == len(group):
        return [group]
    lengths: dict[int, dict[int | None, RunResults]] = {}
    for run in group:
        seeds = lengths.setdefault(run.rounds, {})
        if run.seed in seeds:
            names = f"{seeds[run.seed].name} and {run.name}"
            raise InputError(f"runs {names}: equal settings and seed {run.seed}; exclude one of them")
        seeds[run.seed] = run
    return [list(seeds.values()) for seeds in lengths.values()]


def named_apart(runs: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """Return the ``setting`` and ``series`` of each run folder, with its rounds if a seed is twice in a series."""
    described = {path: read_run_file(path) for path in runs}
    series = {path: run["series"] or str(path) for path, run in described.items()}
    times = Counter((series[path], run["seed"]) for path, run in described.items())
    twice = {series for (series, _), count in times.items() if count > 1}
    lengths = {path: f", {run['rounds']:,} rounds" if series[path] in twice else "" for path, run in described.items()}
    return {
        path: {
            "setting": setting_of(run["partition"], run["label"]) + lengths[path],
            "series": series[path] + lengths[path],
        }
        for path, run in described.items()
    }


def sample(runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None) -> Sample:
    """Return the runs of a series that can be averaged: with equal epochs, or rounds if epochs are unknown.

    Diverged runs are excluded, and those without an evaluation at this point, by default the end of completed runs.
    Raises InputError if the last evaluations are at different lengths, or no completed run was evaluated there.
    """
    refuse_two_points(round, epoch)
    is_last = round is None and epoch is None
    where = "yet" if round is None else f"at round {round}"
    where = where if epoch is None else f"at {epoch:g} epochs"
    taken, left_out, refused = [], {}, []
    for run in runs:
        why = " ".join(f": {run.reason}".split()) if run.reason else ""
        if run.status == "diverged" or (is_last and run.status != "completed"):
            left_out[run.name] = f"{run.status} at round {run.round} of {run.rounds}{why}"
            continue
        try:
            taken.append((run, run.at(round, epoch)))
        except InputError as error:
            left_out[run.name] = f"{run.status}, not evaluated {where}"
            if run.status == "completed" and run.evaluated:
                refused.append(error)
    if refused and not taken:
        raise refused[0]
    for run, round_ in taken[1:]:
        _refuse_unlike(*taken[0], run, round_, has_point=epoch is not None)
    return Sample(list(runs), taken, left_out)


def has_means(
    runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None
) -> tuple[bool, InputError | None]:
    """Return whether some setting has two seeds to average, and the reason if a setting has no mean."""
    try:
        return any(len(sample(group, round, epoch).taken) > 1 for group in by_series(runs)), None
    except InputError as error:
        return False, error


def are_of_one_length(lengths: Collection[float]) -> bool:
    """Return whether these rounds or epochs are alike; corpora of different seeds can differ slightly in records."""
    return min(lengths) >= 0.99 * max(lengths)


def _refuse_unlike(first: RunResults, round_: int, run: RunResults, other: int, has_point: bool) -> None:
    names = f"runs {first.name} and {run.name}"
    epochs = [first.epochs_of(round_) or 0.0, run.epochs_of(other) or 0.0]
    is_alike = are_of_one_length(epochs) and max(epochs) > 0
    if not (has_point or round_ == other or is_alike):
        raise InputError(
            f"{names}: last evaluated at rounds {round_} and {other}, which cannot be averaged; name --round or --epoch"
        )
    if len(first.roster) != len(run.roster):
        raise InputError(f"{names}: have {len(first.roster)} and {len(run.roster)} canaries; exclude one of them")
    references = first.references(round_), run.references(other)
    if references[0] != references[1]:
        raise InputError(
            f"{names}: ranked among different numbers of references, so their exposures cannot be averaged; "
            "evaluate all runs with the same evaluation.references"
        )


# Settings that are not properties of the training.
LEFT_OUT = ("seed", "data.corpus", "system.")


def distinctions(runs: Sequence[RunResults]) -> list[str]:
    """Return the suffixes of run names: the values of settings in which runs with equal names differ."""
    words = []
    for run in runs:
        alike = [other.settings for other in runs if other.setting == run.setting]
        words.append(words_of(run, differing(alike)))
    return words


def differing(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names in which settings of trainings differ."""
    names = {name for of_run in settings for name in of_run if not name.startswith(LEFT_OUT)}
    return {name for name in names if any(of_run.get(name) != settings[0].get(name) for of_run in settings)}


def words_of(run: RunResults, names: Collection[str]) -> str:
    """Return a run's values of some settings, such as ``", units 15"``, in the order of its configuration."""
    return "".join(f", {name.rpartition('.')[2]} {_text(run.settings[name])}" for name in run.settings if name in names)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def without_copies(runs: Sequence[RunResults], needed: Collection[RunResults] = ()) -> list[RunResults]:
    """Return the runs without copies of other runs, and print a line about each copy.

    Copies have the same identity and number of rounds. The copy with the most evaluations remains, or the first of
    equal copies. Raises InputError if two copies have different measurements of one model.
    """
    first_of: dict[tuple[str | None, int], RunResults] = {}
    for run in sorted(runs, key=lambda run: (run not in needed, -len(run.evaluated))):
        other = None if run.identity is None else first_of.setdefault((run.identity, run.rounds), run)
        if other is not None and other is not run:
            _refuse_different(other, run)
    remaining = [run for run in runs if run in needed or run.identity is None or run in first_of.values()]
    for run in runs:
        if run not in remaining:
            name = first_of[run.identity, run.rounds].name
            say(f"run {run.name}: has the settings, seed and rounds of {name}, and is shown once, as {name}")
    return remaining


def _refuse_different(run: RunResults, copy: RunResults) -> None:
    both = run.rows.merge(copy.rows, on=KEY, suffixes=("", "_of_copy"))
    differ = both[(both["value"] != both["value_of_copy"]) & both["value"].notna()]
    if not differ.empty:
        first = differ.iloc[0]
        raise InputError(
            f"runs {run.name} and {copy.name}: copies of one run, whose {first['metric']} of round "
            f"{first['round']} differ; exclude one of them"
        )
