"""The report as one HTML file without scripts or external files; equal results give equal bytes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flsim.base.errors import InputError
from flsim.base.extensions import executing_only
from flsim.base.files import is_device, named_file
from flsim.measures.built_in import PRIMARY
from flsim.report import (
    about,
    effects,
    figures,
    forgetting,
    ledger,
    like_utility,
    maps,
    membership,
    phrases,
    proof,
    settings,
    summary,
    tables,
    worlds,
)
from flsim.report.blocks import Section, listed, plural
from flsim.report.factors import name_of
from flsim.report.gather import Gathered, gather
from flsim.report.overview import overview
from flsim.results.run_file import WORLDS
from flsim.results.sweeps import NOT_SEARCHED, tuned_notes

FOLDER = Path(__file__).parent
MOST_NAMES = 3  # in a title


@dataclass(frozen=True)
class Opening:
    """The beginning of a report about a sweep or about runs."""

    title: str
    question: str = ""
    facts: Sequence[tuple[str, str]] = ()


@executing_only()
def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write a report about run folders and sweeps, whole or not at all.

    Raises:
        InputError: `out` is a file of another suffix than .html, or `flsim.base.files.named_file` or
            `flsim.report.gather.gather` refuses a path.
    """
    if not is_device(out) and out.suffix.lower() not in {".html", ".htm"}:
        raise InputError(f"{out}: reports are written as .html; name such a file")
    with named_file(out) as partial:
        partial.write_text(render(gather(paths)), encoding="utf-8")


def render(gathered: Gathered) -> str:
    """Return the whole page."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["subscripts"] = subscripts
    openings, comparison = _openings(gathered), worlds.compared(gathered)
    title = " · ".join(opening.title for opening in openings)
    return environment.get_template("template.html").render(
        title=title,
        openings=openings,
        paragraph=" ".join(summary.paragraph(gathered, comparison)),
        overview=overview(gathered),
        factors=effects.sentences(effects.effects(gathered)),
        factor_note=effects.NOTE,
        tiles=summary.tiles(gathered),
        sections=sections(gathered, comparison),
        style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
    )


def sections(gathered: Gathered, comparison: pd.DataFrame) -> list[Section]:
    """Return all sections with blocks, in order; `comparison` is the frame of `flsim.report.worlds.compared`."""
    every = [
        Section("memorized", "What was memorized", tables.memorization(gathered)),
        Section("phrases", "Extracted phrases", phrases.extracted(gathered)),
        Section("worlds", "IID against non-IID", worlds.comparison(gathered, comparison)),
        Section("utility", "At like utility", like_utility.at_like_utility(gathered)),
        Section("training", "Over training", figures.curves(gathered)),
        Section("configurations", "By how often canaries occur", maps.configurations(gathered)),
        Section(PRIMARY.name, f"{PRIMARY.title} of the canaries", figures.distributions(gathered)),
        Section("traces", "Canary by canary", figures.traces(gathered)),
        Section("forgetting", "Forgetting", forgetting.forgetting(gathered)),
        Section("settings", "Settings, beside the defaults", settings.settings(gathered)),
        Section("data", "Data and canaries", about.data(gathered)),
        Section("privacy", "Privacy", ledger.privacy(gathered)),
        Section("proof", "What an attacker can prove", [*proof.proof(gathered), *membership.membership(gathered)]),
        Section("failures", "What did not succeed", about.failures(gathered)),
        Section("provenance", "Provenance", about.provenance(gathered)),
    ]
    return [section for section in every if section.blocks]


def _openings(gathered: Gathered) -> list[Opening]:
    if not gathered.sweeps:
        title = gathered.runs[0].results.name if len(gathered.runs) == 1 else title_of(gathered)
        question = "What did the models memorize of the canaries that were planted in their data?"
        notes = tuned_notes([run.path for run in gathered.runs])
        return [Opening(title, question, [("Tuning", note) for note in notes])]
    openings = []
    for sweep in gathered.sweeps:
        facts = [("Published values", sweep.source)] if sweep.source else []
        facts.append(("Scale", f"{sweep.tier}: {sweep.about}" if sweep.about else sweep.tier))
        facts.append(("Tuning", sweep.tuned or NOT_SEARCHED))
        openings.append(Opening(sweep.heading, sweep.question, facts))
    return openings


def subscripts(text: str | Markup) -> Markup:
    """Return text with commands as code, and with batch sizes and probabilities as the paper has them, b_u lowered."""
    lowered = re.sub(r"(?<![.\w])([bp])_([uer])\b", r"<i>\1</i><sub>\2</sub>", str(escape(text)))
    return Markup(re.sub(r"`(flsim [^`<]+)`", r"<code>\1</code>", lowered))


def title_of(gathered: Gathered) -> str:
    """Return the title of a report on runs of no sweep: what was trained, in which worlds, and the number of runs."""
    names = list(dict.fromkeys(line.label for line in gathered.lines))
    if len(names) > MOST_NAMES:
        names = list(dict.fromkeys(name_of(setting) for setting in gathered.settings))
    what = listed(names) if len(names) <= MOST_NAMES else plural(len(names), "setting")
    worlds = [WORLDS[world] for world in WORLDS if any(setting.world == world for setting in gathered.settings)]
    where = (
        f", {worlds[0]} against {worlds[1].replace('N', 'n')}"
        if len(worlds) > 1
        else f", {worlds[0]}"
        if worlds
        else ""
    )
    return f"{what}{where}: {plural(len(gathered.runs), 'run')}"
