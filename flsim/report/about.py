"""How runs came about: settings beside the paper's, data, canaries, privacy, what failed, and provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from flsim.config import Config, DataHParams
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
from flsim.errors import InputError
from flsim.privacy.accounting import CONVENTIONS
from flsim.report.blocks import Block, Cell, Facts, Fold, Heading, Prose, Table, duration, number, plural
from flsim.report.configurations import by_configuration, percent
from flsim.report.gather import Gathered, RunView, Setting
from flsim.results.tables import user_share

LEFT = Heading("", is_number=False)
COUNTS = {
    "planned_sharers": "Sharers, planned",
    "sharers": "actual",
    "planned_insertions": "Copies, planned",
    "insertions": "actual",
}


def settings(of: Gathered) -> list[Block]:
    """What differs from the defaults, which are the paper's: of all runs, then of each setting; then the machines'."""
    known = [(setting, run) for setting in of.settings for run in setting.runs if run.config is not None]
    if not known:
        return [Prose("These run folders do not say their settings: they have no config.toml.")]
    values = {id(run): _flat(run.config) for _, run in known if run.config}
    defaults = {id(run): _flat(_default(run.config)) for _, run in known if run.config}
    common = _agreed(list(values.values()))
    differing = [
        (key, value) for key, value in common.items() if any(each.get(key) != value for each in defaults.values())
    ]
    blocks: list[Block] = []
    shared = [(key, value) for key, value in differing if not key.startswith("system.")]
    if shared:
        rows = [
            [Markup("<code>{}</code>").format(key), _shown(value, key), _default_of(key, defaults)]
            for key, value in shared
        ]
        caption = "All runs: settings that differ from the defaults, which are the paper’s"
        blocks.append(Table(caption, [_left("Setting"), _left("Here"), _left("The paper’s")], rows))
    else:
        blocks.append(Prose("No setting that all runs share differs from the defaults, which are the paper’s."))
    rows = []
    for setting in of.settings:
        mine = [values[id(run)] for run in setting.runs if id(run) in values]
        if mine:
            own = [
                (key, value)
                for key, value in _agreed(mine).items()
                if key not in common and not key.startswith("system.")
                if value != defaults[id(setting.runs[0])].get(key) or _varies(key, list(values.values()))
            ]
            seeds = ", ".join(str(run.config.seed) for run in setting.runs if run.config)
            rows.append([setting.label, seeds, _pairs(own)])
    headings = [_left("Setting"), _left("Seeds"), _left("Its own settings")]
    own_table = Table("Each setting: what else differs from the defaults, or from other settings", headings, rows)
    blocks.append(own_table if len(rows) <= 8 else Fold(f"Each setting’s own settings: {len(rows)}", [own_table]))
    machines = [(key, value) for key, value in differing if key.startswith("system.")]
    if machines:
        blocks.append(
            Prose(
                Markup("Use of machines, which changes nothing but rounding: {}.").format(_pairs(machines)),
                is_note=True,
            )
        )
    return blocks


def _flat(config: Config) -> dict[str, Any]:
    """Settings by section.key, but for the seed and where the corpus lies."""
    found: dict[str, Any] = {}
    for section, values in asdict(config).items():
        if isinstance(values, dict):
            found |= {f"{section}.{key}": value for key, value in values.items()}
    del found["data.corpus"]
    return found


def _default(config: Config) -> Config:
    return type(config)(data=DataHParams(config.data.corpus))


def _default_of(key: str, defaults: Mapping[int, Mapping[str, Any]]) -> str:
    return _shown(next(each[key] for each in defaults.values() if key in each), key)


def _agreed(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all have, with one value."""
    first, *rest = values
    return {key: value for key, value in first.items() if all(key in each and each[key] == value for each in rest)}


def _varies(key: str, values: Sequence[Mapping[str, Any]]) -> bool:
    return any(key in each and each[key] != values[0].get(key, each[key]) for each in values)


def _pairs(found: Sequence[tuple[str, Any]]) -> Markup:
    written = [Markup("<code>{} = {}</code>").format(key, _shown(value, key)) for key, value in found]
    return Markup(", ").join(written) if written else Markup("none")


def _shown(value: Any, key: str = "") -> str:
    if key in {"canaries.p_u", "canaries.p_e"}:
        return ", ".join(user_share(each) if key.endswith("u") else percent(each) for each in value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def data(of: Gathered) -> list[Block]:
    """The corpora, and what was planted in them."""
    blocks: list[Block] = []
    paths = list(dict.fromkeys(run.config.data.corpus for run in of.runs if run.config))
    for path in paths:
        try:
            blocks.append(_corpus(path))
        except InputError as error:
            blocks.append(Prose(f"The corpus cannot be described: {error}", is_note=True))
    if not paths:
        blocks.append(Prose("These run folders do not say their corpus: they have no config.toml."))
    planted = _distinct_rosters(of)
    blocks += [_planted(*each) for each in planted[:1]]
    if len(planted) > 1:
        rest = [_planted(*each) for each in planted[1:]]
        blocks.append(Fold(f"Canaries of other runs: {plural(len(rest), 'more planting')}", rest))
    return blocks


@cache
def _inspected(path: Path) -> dict[str, Any]:
    return inspect(Corpus.open(path))


def _corpus(path: Path) -> Table:
    found = _inspected(path)
    rows = []
    for name, split in found["splits"].items():
        medians = [split[length].get("median") for length in ("words_per_record", "records_per_user", "words_per_user")]
        counts = [number(split[unit], "{:,}") for unit in ("users", "records", "words")]
        rows.append(
            [name, *counts, *(number(median, "{:,}") for median in medians), number(split["oov_share"], "{:.1%}")]
        )
    headings = [
        _left("Split"),
        *(Heading(text) for text in ("Users", "Records", "Words", "Words a record", "Records a user", "Words a user")),
        Heading("Out of vocabulary"),
    ]
    note = (
        f"Medians a record and a user. {found['vocabulary']:,} token ids in layout {found['layout']}; records of at "
        f"most {found['record_words']} words. Models are trained on train. Digest {found['digest'][:12]}."
    )
    notes = " ".join([note, *found["notes"], *(f"Warning: {warning}." for warning in found["warnings"])])
    return Table(f"The corpus {path.parent.name}/{path.name}", headings, rows, notes)


def _distinct_rosters(of: Gathered) -> list[tuple[RunView, list[str]]]:
    """The plantings that differ: a run of each, and the names of all runs that have it."""
    found: dict[str, tuple[RunView, list[str]]] = {}
    for run in of.runs:
        key = run.results.roster.drop(columns="words", errors="ignore").to_json()
        found.setdefault(key, (run, []))[1].append(run.results.name)
    return list(found.values())


def _planted(run: RunView, names: Sequence[str]) -> Table:
    roster = run.results.roster
    rows = []
    counts = [name for name in COUNTS if name in roster]
    for configuration, canaries in by_configuration(roster).items():
        means = [number(canaries[name].mean(), "{:,.1f}") for name in counts]
        rows.append([configuration.label, f"{len(canaries)}", *means])
    whose = f"in {names[0]}" + (f" and {plural(len(names) - 1, 'other run')}" if len(names) > 1 else "")
    headings = [_left("Configuration"), Heading("Canaries"), *(Heading(COUNTS[name]) for name in counts)]
    note = "Means over the configuration’s canaries. Actual copies are fewer where two canaries claim one record."
    return Table(f"Canaries planted {whose}: {len(roster)}", headings, rows, note)


def privacy(of: Gathered) -> list[Block]:
    """Each setting's mechanism, and each epsilon with its convention."""
    named = {convention.name: convention for convention in CONVENTIONS}
    rows: list[list[Cell]] = []
    without = []
    for setting in of.settings:
        found = _epsilons(setting)
        if not found:
            without.append(setting.label)
        for unit, name, epsilon, delta, round_, run in found:
            how = named.get(name)
            about = (
                [how.sampler, how.relation, how.sensitivity, how.accountant, how.conversion or "–"]
                if how
                else ["–"] * 5
            )
            noise = number(run.config.privacy.noise_multiplier if run.config else None, "{:g}")
            rows.append(
                [
                    setting.label,
                    name,
                    number(epsilon, "{:.4g}"),
                    number(delta, "{:.3g}"),
                    unit,
                    *about,
                    noise,
                    f"{round_:,}",
                ]
            )
    blocks: list[Block] = []
    if rows:
        headings = [_left("Setting"), _left("Convention"), Heading("ε"), Heading("δ")]
        headings += [
            _left(text) for text in ("Of one", "Sampler", "Relation", "Sensitivity", "Accountant", "Conversion")
        ]
        headings += [Heading("Noise z"), Heading("Rounds")]
        note = (
            "An ε says nothing without its convention. “paper” is how the paper counts: it takes S for what replacing "
            "a user changes, which can be 2S; the other holds as it stands. None accounts for choosing settings on "
            "the same data, and the noise of a simulation is a function of its seed."
        )
        blocks.append(Table("What was spent, by convention, at the last evaluation", headings, rows, note))
    if without and rows:
        blocks.append(Prose(f"Without noise, so that ε is infinite: {'; '.join(without)}.", is_note=True))
    if not rows:
        blocks.append(Prose("No run added noise, so no ε is finite: nothing here is differentially private."))
    return blocks


def _epsilons(setting: Setting) -> list[tuple[str, str, float, float | None, int, RunView]]:
    """Unit, convention, epsilon, delta, round, and the run, as the first shown run's rows have them."""
    for run, round_ in setting.shown[:1]:
        rows = run.results.rows
        found = rows[(rows["round"] == round_) & (rows["canary"] == "") & rows["metric"].str.contains("epsilon ")]
        return [
            (
                "record" if metric.startswith("record ") else "user",
                metric.removeprefix("record ").removeprefix("epsilon "),
                float(value),
                run.results.of_model("record delta" if metric.startswith("record ") else "delta", round_),
                round_,
                run,
            )
            for metric, value in zip(found["metric"], found["value"], strict=True)
        ]
    return []


def failures(of: Gathered) -> list[Block]:
    """Runs that are not completed, and evaluations that did not succeed."""
    rows: list[list[Cell]] = []
    for run in of.runs:
        results = run.results
        if results.status != "completed" or results.failures:
            reasons = [results.reason or "", *(f"{name}: {why}" for name, why in results.failures.items())]
            progress = f"{results.round:,} of {results.rounds:,}"
            rows.append([results.name, results.status, progress, " ".join(filter(None, reasons)) or "–"])
    rows += [[each.name, "not begun", "–", "–"] for each in of.waiting]
    for sweep in of.sweeps:
        for session in sweep.sessions:
            rows += [
                [str(name), "failed in a session", "–", str(why)]
                for name, why in dict(session.get("failed") or {}).items()
            ]
    if not rows:
        return [Prose("Nothing: all runs are completed, none diverged, and every evaluation succeeded.")]
    headings = [_left("Run"), _left("Status"), Heading("Rounds"), _left("Why")]
    return [Table("Runs that are not completed, and what failed", headings, rows)]


def provenance(of: Gathered) -> list[Block]:
    """Commands, versions, sessions, and each run's seed, digests, length and time."""
    blocks: list[Block] = []
    for sweep in of.sweeps:
        versions = ", ".join(f"{name} {number_}" for name, number_ in sweep.versions.items())
        facts: list[tuple[str, Cell]] = [("Command", Markup("<code>{}</code>").format(sweep.command))]
        facts += [("Versions", versions)] if versions else []
        blocks.append(Facts(facts))
        if sweep.sessions:
            blocks.append(_sessions(sweep.sessions))
    rows = []
    for run in of.runs:
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
    headings = [_left("Run"), *(Heading(text) for text in ("Seed", "Rounds", "Epochs", "Training", "Evaluation"))]
    headings += [_left("Settings’ digest"), _left("Series")]
    note = (
        "Rounds: completed, of those planned; of central training, steps. Digests are cut short: "
        "runs of one series differ in the seed alone. Times are the clock’s. "
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
                f"{session.get('at_once', '–')} on {session.get('cores', '–')}",
                f"{len(session.get('trained') or ())}",
                f"{len(session.get('failed') or ())}",
            ]
        )
    names = ("Time", "Peak memory", "Runs at once, on cores", "Trained", "Failed")
    return Table("When the sweep was at work", [_left("Began"), *(Heading(name) for name in names)], rows)


def _digest(value: str | None) -> Cell:
    return "–" if value is None or pd.isna(value) else Markup("<code>{}</code>").format(value[:12])


def _left(text: str) -> Heading:
    return Heading(text, is_number=False)
