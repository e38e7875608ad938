"""The report as one HTML file: no scripts, nothing fetched, the same bytes from the same results."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flsim.base.errors import InputError
from flsim.base.files import named_file
from flsim.measures.built_in import PRIMARY
from flsim.report import about, figures, ledger, maps, phrases, settings, summary, tables, worlds
from flsim.report.blocks import Section, plural
from flsim.report.gather import Gathered, gather

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Opening:
    """What a report begins with, of a sweep or of runs."""

    title: str
    question: str = ""
    facts: Sequence[tuple[str, str]] = ()


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write a report about run folders and sweeps, whole or not at all.

    Raises:
        InputError: not a .html file, as `flsim.base.files.named_file`, or as `flsim.report.gather.gather`.
    """
    if out.suffix.lower() not in {".html", ".htm"}:
        raise InputError(f"{out}: reports are written as .html; name such a file")
    with named_file(out) as partial:
        partial.write_text(render(gather(paths)), encoding="utf-8")


def render(of: Gathered) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["subscripts"] = subscripts
    openings, found = _openings(of), worlds.compared(of)
    title = " · ".join(opening.title for opening in openings)
    return environment.get_template("template.html").render(
        title=title,
        openings=openings,
        paragraph=" ".join(summary.paragraph(of, found)),
        tiles=summary.tiles(of),
        sections=sections(of, found),
        style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
    )


def sections(of: Gathered, found: pd.DataFrame) -> list[Section]:
    """All parts with anything to say, in order; `found` is of `flsim.report.worlds.compared`."""
    every = [
        Section("memorized", "What was memorized", tables.memorization(of)),
        Section("phrases", "Extracted phrases", phrases.extracted(of)),
        Section("worlds", "IID against non-IID", worlds.comparison(of, found)),
        Section("training", "Over training", figures.curves(of)),
        Section("configurations", "By how often canaries occur", maps.configurations(of)),
        Section(PRIMARY.name, f"{PRIMARY.title} of the canaries", figures.distributions(of)),
        Section("traces", "Canary by canary", figures.traces(of)),
        Section("settings", "Settings, beside the paper’s", settings.settings(of)),
        Section("data", "Data and canaries", about.data(of)),
        Section("privacy", "Privacy", ledger.privacy(of)),
        Section("failures", "What did not succeed", about.failures(of)),
        Section("provenance", "Provenance", about.provenance(of)),
    ]
    return [section for section in every if section.blocks]


def _openings(of: Gathered) -> list[Opening]:
    if not of.sweeps:
        names = [run.results.name for run in of.runs]
        title = (
            names[0]
            if len(names) == 1
            else f"{plural(len(names), 'run')}: {names[0]} {'and' if len(names) == 2 else 'to'} {names[-1]}"
        )
        return [Opening(title, "What did the models memorize of the canaries that were planted in their data?")]
    found = []
    for sweep in of.sweeps:
        facts = [("Published values", sweep.source)] if sweep.source else []
        facts.append(("Scale", f"{sweep.tier}: {sweep.about}" if sweep.about else sweep.tier))
        found.append(Opening(sweep.title, sweep.question, facts))
    return found


def subscripts(text: str | Markup) -> Markup:
    """Batch sizes and probabilities as the paper prints them: b_u with a lowered u."""
    return Markup(re.sub(r"(?<![.\w])([bp])_([uer])\b", r"<i>\1</i><sub>\2</sub>", str(escape(text))))
