"""Words that tell trainings of the same name apart, such as ``units 15``, since a name does not have all settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from flsim.results.store import RunResults

# Settings that are no property of the training.
LEFT_OUT = ("seed", "data.corpus", "system.")


def distinctions(runs: Sequence[RunResults]) -> list[str]:
    """Return what to append to each run's name: its values of the settings in which runs of that name differ."""
    words = []
    for run in runs:
        alike = [other.settings for other in runs if other.setting == run.setting]
        names = [name for name in run.settings if not name.startswith(LEFT_OUT) and _differs(name, alike)]
        words.append("".join(f", {name.rpartition('.')[2]} {_text(run.settings[name])}" for name in names))
    return words


def _differs(name: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return any(of_run.get(name) != settings[0].get(name) for of_run in settings)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
