"""Sections of a report on the runs: settings next to the defaults, data and canaries, failures, and provenance."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
from flsim.data.manifest import WHOLE
from flsim.report.blocks import Block, Cell, Facts, Fold, Note, Table, duration, folded, number, plural
from flsim.report.gather import Gathered, RunView, by_configuration, percent
from flsim.results.tables import user_share
from flsim.runs.config import Config, DataHParams
from flsim.runs.config.custom_code import without_folders

COUNTS = {
    "planned_sharers": "Sharers, planned",
    "sharers": "actual",
    "planned_insertions": "Copies, planned",
    "insertions": "actual",
}


def data(gathered: Gathered) -> list[Block]:
    """Return the section on the corpora and the canaries planted in them."""
    blocks: list[Block] = []
    paths = list(dict.fromkeys(run.config.data.corpus for run in gathered.runs if run.config))
    for path in paths:
        try:
            blocks.append(_corpus(path))
        except InputError as error:
            blocks.append(Note(f"The corpus cannot be described: {error}"))
    if not paths:
        blocks.append(Note("The corpus of these runs is not known, because their folders have no config.toml."))
    by_roster: dict[str, tuple[RunView, list[str]]] = {}  # a run of each planting, and the names of all runs with it
    for run in gathered.runs:
        key = run.results.roster.drop(columns="words", errors="ignore").to_json()
        by_roster.setdefault(key, (run, []))[1].append(run.results.name)
    planted = list(by_roster.values())
    blocks += [_planted(*planting) for planting in planted[:1]]
    if len(planted) > 1:
        rest = [_planted(*planting) for planting in planted[1:]]
        blocks.append(Fold(f"Canaries of other runs: {plural(len(rest), 'more planting')}", rest))
    return blocks


@cache
def _corpus(path: Path | str) -> Table:
    summary = inspect(Corpus.open(path))
    rows = []
    for name, split in summary["splits"].items():
        medians = [split[length].get("median") for length in ("words_per_record", "records_per_user", "words_per_user")]
        counts = [number(split[unit], "{:,}") for unit in ("users", "records", "words")]
        rows.append(
            [name, *counts, *(number(median, "{:,}") for median in medians), number(split["oov_share"], "{:.1%}")]
        )
    headings = ["Split", "Users", "Records", "Words", "Words per record", "Records per user", "Words per user"]
    headings.append("Out of vocabulary")
    by = " Words are single characters." if summary["by"] == "characters" else ""
    of_authors = ", with complete authors" if summary["utility"] in WHOLE.values() else ""
    note = (
        f"Medians per record and per user. {summary['vocabulary']:,} token ids in layout {summary['layout']}; records "
        f"of at most {summary['record_words']} words.{by} Models are trained on train; accuracy and perplexity are "
        f"measured on {summary['utility']}{of_authors}. Digest {summary['digest'][:12]}."
    )
    notes = " ".join([note, *summary["notes"], *(f"Warning: {warning}." for warning in summary["warnings"])])
    name = "/".join(Path(str(path).partition("?")[0]).parts[-2:])
    return Table(f"The corpus {name}", headings, rows, notes)


def _planted(run: RunView, names: Sequence[str]) -> Table:
    roster = run.results.roster
    rows = []
    counts = [name for name in COUNTS if name in roster]
    for configuration, canaries in by_configuration(roster).items():
        means = [number(canaries[name].mean(), "{:,.1f}") for name in counts]
        rows.append([configuration.label, f"{len(canaries)}", *means])
    whose = f"in {names[0]}" + (f" and {plural(len(names) - 1, 'other run')}" if len(names) > 1 else "")
    headings = ["Configuration", "Canaries", *(COUNTS[name] for name in counts)]
    note = "Means over the configuration’s canaries. There are fewer actual copies if two canaries claim one record."
    return Table(f"Canaries planted {whose}: {len(roster)}", headings, rows, note)


def failures(gathered: Gathered) -> list[Block]:
    """Return the section on runs that are not completed, and on evaluations that failed."""
    rows: list[list[Cell]] = []
    for run in gathered.runs:
        results = run.results
        if results.status != "completed" or results.failures:
            reasons = [results.reason or "", *(f"{name}: {why}" for name, why in results.failures.items())]
            progress = f"{results.round:,} of {results.rounds:,}"
            rows.append([results.name, results.status, progress, " ".join(filter(None, reasons)) or "–"])
    rows += [[waiting.name, "not begun", "–", "–"] for waiting in gathered.waiting]
    for sweep in gathered.sweeps:
        for session in sweep.sessions:
            rows += [
                [str(name), "failed in a session", "–", str(why)]
                for name, why in dict(session.get("failed") or {}).items()
            ]
    if not rows:
        return [Note("None: all runs are completed, no run diverged, and every evaluation succeeded.")]
    caption = "Runs that are not completed, and failures"
    return [Table(caption, ["Run", "Status", "Rounds", "Why"], rows)]


def provenance(gathered: Gathered) -> list[Block]:
    """Return the section on commands, versions, sessions, and each run's seed, digests, length and time."""
    blocks: list[Block] = []
    for sweep in gathered.sweeps:
        versions = ", ".join(f"{name} {number_}" for name, number_ in sweep.versions.items())
        facts: list[tuple[str, Cell]] = []
        for command, names in sweep.commands:
            runs = Markup(" <small>({})</small>").format(plural(len(names), "run")) if len(sweep.commands) > 1 else ""
            facts.append(("Command", Markup("<code>{}</code>{}").format(command, runs)))
        facts += [("Versions", versions)] if versions else []
        blocks.append(Facts(facts))
        if sweep.sessions:
            blocks.append(_sessions(sweep.sessions))
    rows: list[list[Cell]] = []
    for run in gathered.runs:
        results = run.results
        seed = "–" if results.seed is None else str(results.seed)
        progress = [f"{results.round:,} / {results.rounds:,}", number(results.epochs_of(results.round), "{:.3g}")]
        times = [duration(run.training_seconds), duration(run.evaluation_seconds)]
        digests = [_digest(run.config.digest if run.config else None), _digest(results.series)]
        rows.append([results.name, seed, *progress, *times, *digests])
    headings = ["Run", "Seed", "Rounds", "Epochs", "Training", "Evaluation", "Digest of settings", "Series"]
    note = (
        "Rounds: completed and planned; in central training, steps. Digests are shortened. "
        "Runs of one series differ only in their seed. Times are wall-clock times. "
        f"Reported by flsim {version('flsim-memorization')}."
    )
    return [*blocks, *folded(Table("Runs", headings, rows, note), "All runs")]


def _sessions(sessions: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            str(session.get("began", "–")),
            duration(session.get("seconds")),
            number((session.get("peak_memory") or float("nan")) / 2**30, "{:.1f} GiB"),
            f"{session.get('at_once') or 'as many as fit'} on {session.get('cores') or '–'}",
            f"{len(session.get('trained') or ())}",
            f"{len(session.get('failed') or ())}",
        ]
        for session in sessions
    ]
    names = ["Start", "Time", "Peak memory", "Runs at once, on cores", "Trained", "Failed"]
    return Table("Sessions of the sweep", names, rows)


def _digest(value: str | None) -> Cell:
    return "–" if value is None or pd.isna(value) else Markup("<code>{}</code>").format(value[:12])


OF_PAPER = "which are the paper’s values if the paper states them"


def settings(gathered: Gathered) -> list[Block]:
    """Return the section on settings that differ from the defaults: of all runs, of each setting, and of machines."""
    configs = {run: run.config for run in gathered.runs if run.config is not None}
    if not configs:
        return [Note("The settings of these runs are not known, because their folders have no config.toml.")]
    values = {run: _flat(config) for run, config in configs.items()}
    defaults = {run: _flat(type(config)(data=DataHParams(config.data.corpus))) for run, config in configs.items()}
    common = _agreed(list(values.values()))
    differing = {
        key: value for key, value in common.items() if any(default.get(key) != value for default in defaults.values())
    }
    shared = {key: value for key, value in differing.items() if not key.startswith("system.")}
    blocks: list[Block] = [Note(f"No setting that all runs share differs from the defaults, {OF_PAPER}.")]
    if shared:
        known = {key: value for values in reversed(defaults.values()) for key, value in values.items()}
        rows = [[_code(key), _text_of(value, key), _text_of(known[key], key)] for key, value in shared.items()]
        caption = f"All runs: settings that differ from the defaults, {OF_PAPER}"
        blocks = [Table(caption, ["Setting", "Here", "Default"], rows)]
    rows = []
    for setting in gathered.settings:
        runs = [run for run in setting.runs if run in values]
        if runs:
            further = {
                key: value
                for key, value in _agreed([values[run] for run in runs]).items()
                if key not in common and not key.startswith("system.") and value != defaults[runs[0]].get(key)
            }
            rows.append([setting.label, ", ".join(str(configs[run].seed) for run in runs), _pairs(further)])
    table = Table("Each setting: further differences from the defaults", ["Setting", "Seeds", "Further settings"], rows)
    blocks += folded(table, "Settings of each row")
    machines = {key: value for key, value in differing.items() if key.startswith("system.")}
    text = Markup("Use of machines, which changes only rounding: {}.").format(_pairs(machines))
    return [*blocks, *([Note(text)] if machines else [])]


def _flat(config: Config) -> dict[str, Any]:
    """Return settings by section.key, without the seed and the path of the corpus."""
    settings_by_key: dict[str, Any] = {}
    for section, values in without_folders(config).items():
        if isinstance(values, dict):
            settings_by_key |= {f"{section}.{key}": value for key, value in values.items()}
    del settings_by_key["data.corpus"]
    return settings_by_key


def _agreed(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all runs have with the same value."""
    first, *rest = values
    return {
        key: value for key, value in first.items() if all(key in others and others[key] == value for others in rest)
    }


def _code(key: str) -> Markup:
    """Return the name of a setting, with line breaks allowed at dots and underscores."""
    return Markup("<code>{}</code>").format(Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(key)))))


def _pairs(values: Mapping[str, Any]) -> Markup:
    written = [Markup("{} <code>= {}</code>").format(_code(key), _text_of(value, key)) for key, value in values.items()]
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
