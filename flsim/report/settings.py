"""Section of a report on settings, beside the defaults, which are the paper's as far as it states them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from flsim.report.blocks import Block, Fold, Prose, Table, left
from flsim.report.configurations import percent
from flsim.report.gather import Gathered
from flsim.results.tables import user_share
from flsim.runs.config import Config, DataHParams
from flsim.runs.config.own_code import without_folders

OF_PAPER = "which are the paper’s where it states them"


def settings(gathered: Gathered) -> list[Block]:
    """Return the section on settings that differ from the defaults.

    First come settings common to all runs, then those of each setting, then the use of machines.
    """
    known = [(setting, run) for setting in gathered.settings for run in setting.runs if run.config is not None]
    if not known:
        return [Prose("The settings of these runs are not known, because their folders have no config.toml.")]
    values = {id(run): _flat(run.config) for _, run in known if run.config}
    defaults = {id(run): _flat(_default(run.config)) for _, run in known if run.config}
    common = _agreed(list(values.values()))
    differing = [
        (key, value)
        for key, value in common.items()
        if any(values_of_run.get(key) != value for values_of_run in defaults.values())
    ]
    blocks: list[Block] = []
    shared = [(key, value) for key, value in differing if not key.startswith("system.")]
    if shared:
        rows = [[_code(key), _text_of(value, key), _default_of(key, defaults)] for key, value in shared]
        caption = f"All runs: settings that differ from the defaults, {OF_PAPER}"
        blocks.append(Table(caption, [left("Setting"), left("Here"), left("Default")], rows))
    else:
        blocks.append(Prose(f"No setting that all runs share differs from the defaults, {OF_PAPER}."))
    rows = []
    for setting in gathered.settings:
        mine = [values[id(run)] for run in setting.runs if id(run) in values]
        if mine:
            default = next(defaults[id(run)] for run in setting.runs if id(run) in defaults)  # some lack a config.toml
            own = [
                (key, value)
                for key, value in _agreed(mine).items()
                if key not in common and not key.startswith("system.")
                if value != default.get(key)
            ]
            seeds = ", ".join(str(run.config.seed) for run in setting.runs if run.config)
            rows.append([setting.label, seeds, _pairs(own)])
    headings = [left("Setting"), left("Seeds"), left("Its own settings")]
    own_table = Table("Each setting: what else differs from the defaults", headings, rows)
    blocks.append(own_table if len(rows) <= 8 else Fold(f"Each setting’s own settings: {len(rows)}", [own_table]))
    machines = [(key, value) for key, value in differing if key.startswith("system.")]
    if machines:
        blocks.append(
            Prose(
                Markup("Use of machines, which changes only rounding: {}.").format(_pairs(machines)),
                is_note=True,
            )
        )
    return blocks


def _flat(config: Config) -> dict[str, Any]:
    """Return settings by section.key, without the seed and the place of the corpus."""
    settings_by_key: dict[str, Any] = {}
    for section, values in without_folders(config).items():
        if isinstance(values, dict):
            settings_by_key |= {f"{section}.{key}": value for key, value in values.items()}
    del settings_by_key["data.corpus"]
    return settings_by_key


def _default(config: Config) -> Config:
    return type(config)(data=DataHParams(config.data.corpus))


def _default_of(key: str, defaults: Mapping[int, Mapping[str, Any]]) -> str:
    return _text_of(next(values[key] for values in defaults.values() if key in values), key)


def _agreed(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all runs have with the same value."""
    first, *rest = values
    return {
        key: value for key, value in first.items() if all(key in others and others[key] == value for others in rest)
    }


def _code(key: str) -> Markup:
    """Return a setting's name, which may be broken at its dots and underscores."""
    return Markup("<code>{}</code>").format(Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(key)))))


def _pairs(settings_and_values: Sequence[tuple[str, Any]]) -> Markup:
    written = [
        Markup("{} <code>= {}</code>").format(_code(key), _text_of(value, key)) for key, value in settings_and_values
    ]
    return Markup(", ").join(written) if written else Markup("none")


def _text_of(value: Any, key: str = "") -> str:
    if key in {"canaries.p_u", "canaries.p_e"}:
        return ", ".join(user_share(number) if key.endswith("u") else percent(number) for number in value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(_text_of, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
