"""The report as one HTML file without scripts or external files; equal results give equal bytes."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flsim.base.errors import InputError
from flsim.base.extensions import restrict_custom_code
from flsim.base.files import is_device, named_file
from flsim.report import evidence, figures, provenance, tables
from flsim.report.blocks import Block, Section, plural
from flsim.report.contrasts import contrasts
from flsim.report.gather import Gathered, gather
from flsim.results.run_file import PARTITIONS
from flsim.results.sweeps import NOT_SEARCHED, tuned_notes
from flsim.show.figure import page_style, with_classes

FOLDER = Path(__file__).parent
MOST_NAMES = 3  # in a title
ROWS = 8  # of the first table
ANSWER = "Effect of each factor, with all other settings equal"


@dataclass(frozen=True)
class Opening:
    """The beginning of a report about a sweep or about runs."""

    title: str
    question: str = ""
    facts: Sequence[tuple[str, str]] = ()


@restrict_custom_code()
def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write a report about run folders and sweeps, atomically; InputError for a suffix other than .html."""
    if not is_device(out) and out.suffix.lower() not in {".html", ".htm"}:
        raise InputError(f"{out}: reports have the format .html; use this suffix")
    with named_file(out) as partial:
        partial.write_text(render(gather(paths)), encoding="utf-8")


def render(gathered: Gathered) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["subscripts"] = subscripts
    openings, frame = _openings(gathered), contrasts(gathered)
    with page_style():
        html = environment.get_template("template.html").render(
            title=" · ".join(opening.title for opening in openings),
            openings=openings,
            answer=answer(gathered, frame),
            facts=_facts(gathered, openings),
            sections=sections(gathered, frame),
            style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
        )
    return with_classes(html, "/* styles of figures */")


def answer(gathered: Gathered, frame: pd.DataFrame) -> list[Block]:
    """Return the first screen: one figure, and at most eight effects of factors, or the means of each setting."""
    figure = figures.overview(gathered) or figures.primary_curve(gathered)
    frame = frame[frame["difference"].notna() & frame["is_main"].astype(bool)]
    contrast = frame.groupby(["factor", "setting", "a", "b"], sort=False)
    if frame.empty:
        return [*figure, *tables.answer(gathered, ROWS)]
    room = max(1, ROWS // contrast.ngroups)
    top = frame[contrast.cumcount() < room].head(ROWS)
    note = "" if contrast.ngroups <= ROWS else f" The first {ROWS} of {contrast.ngroups} contrasts."
    return [*figure, tables.contrast_table(top, gathered.quantities, ANSWER, tables.SHORT + note)]


def _facts(gathered: Gathered, openings: Sequence[Opening]) -> list[tuple[str, str]]:
    statuses = Counter([run.results.status for run in gathered.runs] + ["not begun"] * len(gathered.waiting))
    counts = [f"{statuses.pop('completed', 0)} of {len(gathered.runs) + len(gathered.waiting)} completed"]
    counts += [f"{count} {status}" for status, count in statuses.items()]
    facts = [("Runs", f"{', '.join(counts)}, of {plural(len(gathered.settings), 'setting')}")]
    return [*facts, *(fact for opening in openings for fact in opening.facts)]


def sections(gathered: Gathered, frame: pd.DataFrame) -> list[Section]:
    """Return all sections with blocks, in order; `frame` is that of `flsim.report.contrasts`."""
    compared = [*figures.forest(frame), *tables.contrast_blocks(frame, gathered.quantities)]
    memorized = [*tables.memorization(gathered), *tables.extracted(gathered)]
    every = [
        Section("contrasts", "Differences between settings", compared),
        Section("memorized", "What was memorized", memorized),
        Section("training", "Over training", figures.curves(gathered)),
        Section("utility", "Exposure at equal utility", figures.by_perplexity(gathered)),
        Section("configurations", "By how often canaries occur", figures.configurations(gathered)),
        Section("traces", "Canary by canary", figures.traces(gathered)),
        Section("forgetting", "Forgetting", evidence.forgetting(gathered)),
        Section("proof", "What an attacker can prove", [*evidence.proof(gathered), *evidence.membership(gathered)]),
        Section("privacy", "Privacy", evidence.privacy(gathered)),
        Section("settings", "Settings, next to the defaults", provenance.settings(gathered)),
        Section("data", "Data and canaries", provenance.data(gathered)),
        Section("failures", "Runs that failed or are not completed", provenance.failures(gathered)),
        Section("provenance", "Provenance", provenance.provenance(gathered)),
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
    """Return text with commands as code, and with batch sizes and probabilities as in the paper, with subscripts."""
    lowered = re.sub(r"(?<![.\w])([bp])_([uer])\b", r"<i>\1</i><sub>\2</sub>", str(escape(text)))
    return Markup(re.sub(r"`(flsim [^`<]+)`", r"<code>\1</code>", lowered))


def title_of(gathered: Gathered) -> str:
    """Return the title of a report on runs without a sweep: the training, its partitions, and the number of runs."""
    names = list(dict.fromkeys(line.label for line in gathered.lines))
    if len(names) > MOST_NAMES:
        names = list(dict.fromkeys(setting.technique for setting in gathered.settings))
    what = ", ".join(names) if len(names) <= MOST_NAMES else plural(len(names), "setting")
    known = {setting.partition for setting in gathered.settings}
    names = [name for partition, name in PARTITIONS.items() if partition in known]
    where = f", {' against '.join([*names[:1], *(name.replace('N', 'n') for name in names[1:])])}" if names else ""
    return f"{what}{where}: {plural(len(gathered.runs), 'run')}"
