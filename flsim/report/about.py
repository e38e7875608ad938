"""Sections of a report on data and canaries, on failures, and on provenance."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
from flsim.data.manifest import WHOLE
from flsim.report.blocks import Block, Cell, Facts, Fold, Heading, Prose, Table, duration, left, number, plural
from flsim.report.configurations import by_configuration
from flsim.report.gather import Gathered, RunView

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
            blocks.append(Prose(f"The corpus cannot be described: {error}", is_note=True))
    if not paths:
        blocks.append(Prose("The corpus of these runs is not known, because their folders have no config.toml."))
    planted = _distinct_rosters(gathered)
    blocks += [_planted(*planting) for planting in planted[:1]]
    if len(planted) > 1:
        rest = [_planted(*planting) for planting in planted[1:]]
        blocks.append(Fold(f"Canaries of other runs: {plural(len(rest), 'more planting')}", rest))
    return blocks


@cache
def _inspected(path: Path | str) -> dict[str, Any]:
    return inspect(Corpus.open(path))


def _corpus(path: Path | str) -> Table:
    summary = _inspected(path)
    rows = []
    for name, split in summary["splits"].items():
        medians = [split[length].get("median") for length in ("words_per_record", "records_per_user", "words_per_user")]
        counts = [number(split[unit], "{:,}") for unit in ("users", "records", "words")]
        rows.append(
            [name, *counts, *(number(median, "{:,}") for median in medians), number(split["oov_share"], "{:.1%}")]
        )
    headings = [
        left("Split"),
        *(
            Heading(text)
            for text in ("Users", "Records", "Words", "Words per record", "Records per user", "Words per user")
        ),
        Heading("Out of vocabulary"),
    ]
    by = " Words are single characters." if summary["by"] == "characters" else ""
    about_users = ", whose authors are neither cut nor dropped" if summary["utility"] in WHOLE.values() else ""
    note = (
        f"Medians per record and per user. {summary['vocabulary']:,} token ids in layout {summary['layout']}; records "
        f"of at most {summary['record_words']} words.{by} Models are trained on train; accuracy and perplexity are "
        f"measured on {summary['utility']}{about_users}. Digest {summary['digest'][:12]}."
    )
    notes = " ".join([note, *summary["notes"], *(f"Warning: {warning}." for warning in summary["warnings"])])
    name = "/".join(Path(str(path).partition("?")[0]).parts[-2:])
    return Table(f"The corpus {name}", headings, rows, notes)


def _distinct_rosters(gathered: Gathered) -> list[tuple[RunView, list[str]]]:
    """Return the different plantings: a run of each, and the names of all runs that have it."""
    by_roster: dict[str, tuple[RunView, list[str]]] = {}
    for run in gathered.runs:
        key = run.results.roster.drop(columns="words", errors="ignore").to_json()
        by_roster.setdefault(key, (run, []))[1].append(run.results.name)
    return list(by_roster.values())


def _planted(run: RunView, names: Sequence[str]) -> Table:
    roster = run.results.roster
    rows = []
    counts = [name for name in COUNTS if name in roster]
    for configuration, canaries in by_configuration(roster).items():
        means = [number(canaries[name].mean(), "{:,.1f}") for name in counts]
        rows.append([configuration.label, f"{len(canaries)}", *means])
    whose = f"in {names[0]}" + (f" and {plural(len(names) - 1, 'other run')}" if len(names) > 1 else "")
    headings = [left("Configuration"), Heading("Canaries"), *(Heading(COUNTS[name]) for name in counts)]
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
        return [Prose("Nothing: all runs are completed, none diverged, and every evaluation succeeded.")]
    headings = [left("Run"), left("Status"), Heading("Rounds"), left("Why")]
    return [Table("Runs that are not completed, and what failed", headings, rows)]


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
    rows = []
    for run in gathered.runs:
        results = run.results
        rows.append(
            [
                results.name,
                "–" if results.seed is None else str(results.seed),
                f"{results.round:,} / {results.rounds:,}",
                number(results.epochs_of(results.round), "{:.3g}"),
                duration(run.training_seconds),
                duration(run.evaluation_seconds),
                _digest(run.config.digest if run.config else None),
                _digest(results.series),
            ]
        )
    headings = [left("Run"), *(Heading(text) for text in ("Seed", "Rounds", "Epochs", "Training", "Evaluation"))]
    headings += [left("Settings’ digest"), left("Series")]
    note = (
        "Rounds: completed and planned; in central training, steps. Digests are shortened. "
        "Runs of one series differ only in their seed. Times are wall-clock times. "
        f"Reported by flsim {version('flsim-memorization')}."
    )
    table = Table("Runs", headings, rows, note)
    blocks.append(table if len(rows) <= 8 else Fold(f"Every run: {len(rows)}", [table]))
    return blocks


def _sessions(sessions: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for session in sessions:
        memory = session.get("peak_memory")
        rows.append(
            [
                str(session.get("began", "–")),
                duration(session.get("seconds")),
                "–" if memory is None else f"{memory / 2**30:.1f} GiB",
                f"{session.get('at_once') or 'as many as fit'} on {session.get('cores') or '–'}",
                f"{len(session.get('trained') or ())}",
                f"{len(session.get('failed') or ())}",
            ]
        )
    names = ("Time", "Peak memory", "Runs at once, on cores", "Trained", "Failed")
    return Table("When the sweep was at work", [left("Began"), *(Heading(name) for name in names)], rows)


def _digest(value: str | None) -> Cell:
    return "–" if value is None or pd.isna(value) else Markup("<code>{}</code>").format(value[:12])
