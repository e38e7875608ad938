"""The settings that all runs of a sweep share, and the refusal of a command that would add runs with other ones.

Runs of one sweep are compared with each other, so they may differ only in axes, grids and seeds. A later command may
change the length of training, the rounds of evaluations and the use of machines, which are in no digest of a run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.mappings import flat
from flsim.runs.config import DataHParams, from_working_directory, toml
from flsim.runs.config.files import KINDS
from flsim.sweeps.definition import Definition, Tier
from flsim.sweeps.tuned import Tuned
from flsim.sweeps.values import Values, merge

CORPUS, TUNED = "data.corpus", "tuned"
LENGTH = {"training.rounds", "training.steps", "training.epochs", "training.words"}
FREE = {*LENGTH, "evaluation.every", "evaluation.every_epochs"}


def shared_settings(
    definition: Definition, tier: Tier, overrides: Sequence[str], corpus: str, tuned: Tuned | None = None
) -> dict[str, Any]:
    """Return the settings of all grids of a sweep by key, as values of JSON.

    Args:
        definition: the sweep.
        tier: one of its tiers.
        overrides: changes of the settings of all runs, as ``section.key=value``.
        corpus: digest of the corpus, in place of its path.
        tuned: outcome of the search that the tier names.
    """
    values: Values = {}
    for part in (definition.base, tier.set):
        merge(values, part)
    for override in overrides:
        toml.override_value(values, override, from_working_directory)
    settings = {key: value for key, value in flat(values) if key not in FREE and not key.startswith("system.")}
    settings |= {CORPUS: corpus} | ({TUNED: tuned.search} if tuned else {})
    known: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return known


def refuse_other_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError if settings that all runs of a folder share differ from those of a command for it."""
    defaults: dict[str, Any] = {}
    for kind in KINDS.values():
        defaults |= dict(flat(asdict(kind(DataHParams(Path())))))
    for key in [*before, *(key for key in now if key not in before)]:
        theirs, ours = (values.get(key, _plain(defaults.get(key))) for values in (before, now))
        if theirs == ours:
            continue
        if key == CORPUS:
            what = "its runs were trained on another corpus than this command names"
        elif key == TUNED:
            what = "its runs have settings of another search by `flsim tune` than this command"
        else:
            what = f"its runs have {key} = {_text(theirs)}, and this command gives {_text(ours)}"
        raise InputError(f"{folder}: {what}; runs of one sweep share it: give the same, or name another --out")


def _plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    return json.loads(json.dumps(value, default=str))


def _text(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
