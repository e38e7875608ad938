"""Sections of a report on the runs: settings next to the defaults, data and canaries, failures, and provenance."""

from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.base.settings import flat
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
from flsim.data.manifest import WHOLE
from flsim.report.figures import Block, Facts, Note, duration, listed, plural
from flsim.report.gather import Gathered, text_of_setting
from flsim.runs.config import Config, DataHParams
from flsim.runs.config.custom_code import without_folders
from flsim.show.table import Field

NUMBERS = ("users", "records", "words", "words_per_record", "records_per_user", "words_per_user")
SPLITS = (
    Field("Split", "split"),
    *(Field(name.capitalize().replace("_", " "), name, "{:,}") for name in NUMBERS),
    Field("Out of vocabulary", "oov_share", "{:.1%}"),
)
SETTING = (Field("Setting", "key"), Field("Here", "here"), Field("Default", "default"))
FURTHER = (Field("Setting", "label"), Field("Seeds", "seeds"), Field("Further settings", "further"))
FAILED = (Field("Run", "run"), Field("Status", "status"), Field("Rounds", "rounds"), Field("Why", "why"))
SESSION = (
    *(Field("Start", "began"), Field("Time", "time"), Field("Peak memory", "memory", "{:.1f} GiB")),
    *(Field("Runs at once, on cores", "cores"), Field("Trained", "trained", "{}"), Field("Failed", "failed", "{}")),
)
RUN = (
    *(Field("Run", "run"), Field("Seed", "seed", "{}"), Field("Rounds", "rounds"), Field("Epochs", "epochs", "{:.3g}")),
    *(Field("Training", "training"), Field("Evaluation", "evaluation")),
    *(Field("Digest of settings", "digest"), Field("Series", "series")),
)


def data(gathered: Gathered) -> list[Block]:
    """Return the section on the corpora."""
    blocks: list[Block] = []
    paths = list(dict.fromkeys(run.config.data.corpus for run in gathered.runs if run.config))
    for path in paths:
        try:
            blocks += _corpus(path)
        except InputError as error:
            blocks.append(Note(f"The corpus cannot be described: {error}"))
    if not paths:
        blocks.append(Note("The corpus of these runs is not known, because their folders have no config.toml."))
    return blocks


@cache
def _corpus(path: Path | str) -> list[Block]:
    summary = inspect(Corpus.open(path))
    rows = [
        {"split": name} | split | {key: of.get("median") for key, of in split.items() if "_per_" in key}
        for name, split in summary["splits"].items()
    ]
    by = " Words are single characters." * (summary["by"] == "characters")
    of_authors = ", with complete authors" * (summary["utility"] in WHOLE.values())
    note = (
        f"Medians per record and per user. {summary['vocabulary']:,} token ids in layout {summary['layout']}; records "
        f"of at most {summary['record_words']} words.{by} Models are trained on train; accuracy and perplexity are "
        f"measured on {summary['utility']}{of_authors}. Digest {summary['digest'][:12]}."
    )
    notes = [note, *summary["notes"], *(f"Warning: {warning}." for warning in summary["warnings"])]
    name = "/".join(Path(str(path).partition("?")[0]).parts[-2:])
    return listed(f"The corpus {name}", rows, SPLITS, *notes)


def failures(gathered: Gathered) -> list[Block]:
    """Return the section on runs that are not completed, and on evaluations that failed."""
    rows = list[dict[str, Any]]()
    for run in gathered.runs:
        results = run.results
        if results.status != "completed" or results.failures:
            whys = [results.reason or "", *(f"{name}: {why}" for name, why in results.failures.items())]
            cells = {"run": results.name, "status": results.status, "why": " ".join(filter(None, whys))}
            rows.append(cells | {"rounds": f"{results.round:,} of {results.rounds:,}"})
    rows += [{"run": waiting.name, "status": "not begun"} for waiting in gathered.waiting]
    failed = [session.get("failed") or {} for sweep in gathered.sweeps for session in sweep.sessions]
    of_sessions = [{"run": str(name), "why": str(why)} for reasons in failed for name, why in reasons.items()]
    rows += [{"status": "failed in a session"} | cells for cells in of_sessions]
    if not rows:
        return [Note("None: all runs are completed, no run diverged, and every evaluation succeeded.")]
    return listed("Runs that are not completed, and failures", rows, FAILED)


def provenance(gathered: Gathered) -> list[Block]:
    """Return the section on commands, versions, sessions, and each run's seed, digests, length and time."""
    blocks: list[Block] = []
    for sweep in gathered.sweeps:
        versions = ", ".join(f"{name} {number_}" for name, number_ in sweep.versions.items())
        counts = [f" ({plural(len(one['runs']), 'run')})" * (len(sweep.commands) > 1) for one in sweep.commands]
        facts = [("Command", f"`{one['command']}`{count}") for one, count in zip(sweep.commands, counts, strict=True)]
        blocks.append(Facts([*facts, *([("Versions", versions)] if versions else [])]))
        sessions = [
            {
                "began": str(session.get("began", "–")),
                "time": duration(session.get("seconds")),
                "memory": (session.get("peak_memory") or float("nan")) / 2**30,
                "cores": f"{session.get('at_once') or 'as many as fit'} on {session.get('cores') or '–'}",
                "trained": len(session.get("trained") or ()),
                "failed": len(session.get("failed") or ()),
            }
            for session in sweep.sessions
        ]
        blocks += listed("Sessions of the sweep", sessions, SESSION)
    rows = [
        {
            "run": run.results.name,
            "seed": "–" if run.results.seed is None else run.results.seed,
            "rounds": f"{run.results.round:,} / {run.results.rounds:,}",
            "epochs": run.results.epochs_of(run.results.round),
            "training": duration(run.training_seconds),
            "evaluation": duration(run.evaluation_seconds),
            "digest": run.config.digest[:12] if run.config else None,
            "series": None if pd.isna(run.results.series) else str(run.results.series)[:12],
        }
        for run in gathered.runs
    ]
    note = (
        "Rounds: completed and planned; in central training, steps. Digests are shortened. "
        "Runs of one series differ only in their seed. Times are wall-clock times. "
        f"Reported by flsim {version('flsim-memorization')}."
    )
    return [*blocks, *listed("Runs", rows, RUN, note)]


OF_PAPER = "which are the values of Thakkar et al. (2020) if the paper has values"


def settings(gathered: Gathered) -> list[Block]:
    """Return the section on settings: common differences from the defaults, then those of each setting."""
    configs = {place: run.config for place, run in enumerate(gathered.runs) if run.config is not None}
    if not configs:
        return [Note("The settings of these runs are not known, because their folders have no config.toml.")]
    plain = {place: type(config)(data=DataHParams(config.data.corpus)) for place, config in configs.items()}
    here, defaults = (pd.DataFrame({place: _texts(one) for place, one in of.items()}) for of in (configs, plain))
    here, defaults = here.fillna("none"), defaults.reindex(here.index).fillna("none")
    is_common = here.nunique(axis=1) == 1
    differs = (here != defaults).any(axis=1)
    common = here[is_common & differs].iloc[:, 0]
    rows = [{"key": key, "here": text, "default": defaults.loc[str(key)].iloc[0]} for key, text in common.items()]
    blocks: list[Block] = [Note(f"No setting that all runs share differs from the defaults, {OF_PAPER}.")]
    if rows:
        blocks = listed(f"All runs: settings that differ from the defaults, {OF_PAPER}", rows, SETTING, most=40)
    further, places = list[dict[str, Any]](), {run: place for place, run in enumerate(gathered.runs)}
    for setting in gathered.settings:
        known = [places[run] for run in setting.runs if places[run] in configs]
        if known:
            values = here.loc[~is_common, known]
            values = values[(values.nunique(axis=1) == 1) & (values.iloc[:, 0] != defaults.loc[values.index, known[0]])]
            seeds = ", ".join(str(configs[place].seed) for place in known)
            further.append({"label": setting.label, "seeds": seeds, "further": _listed(values.iloc[:, 0])})
    note = "Settings of system change only rounding."
    return [*blocks, *listed("Each setting: further differences from the defaults", further, FURTHER, note)]


def _texts(config: Config) -> dict[str, str]:
    """Return settings as text by section.key, without the seed and the path of the corpus; unset ones are missing."""
    texts = {key: text_of_setting(value, key) for key, value in flat(without_folders(config))}
    return {key: text for key, text in texts.items() if key not in {"seed", "data.corpus"}}


def _listed(values: "pd.Series[str]") -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items()) or "none"
