"""Words that tell trainings of the same name apart, such as ``units 15``, since a name does not have all settings."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flsim.results.store import RunResults

# Settings that are no property of the training.
LEFT_OUT = ("seed", "data.corpus", "system.")


def distinctions(runs: Sequence[RunResults]) -> list[str]:
    """Return what to append to each run's name: its values of the settings in which runs of that name differ."""
    words = []
    for run in runs:
        alike = [other.settings for other in runs if other.setting == run.setting]
        words.append(words_of(run, differing(alike)))
    return words


def differing(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names in which settings of trainings differ."""
    names = {name for of_run in settings for name in of_run if not name.startswith(LEFT_OUT)}
    return {name for name in names if _differs(name, settings)}


def words_of(run: RunResults, names: Collection[str]) -> str:
    """Return a run's values of some settings, such as ``", units 15"``, in the order of its configuration."""
    return "".join(f", {name.rpartition('.')[2]} {_text(run.settings[name])}" for name in run.settings if name in names)


def _differs(name: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return any(of_run.get(name) != settings[0].get(name) for of_run in settings)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
