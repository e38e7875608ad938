"""The report as one HTML file without scripts or external files; equal results give equal bytes."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flsim.base.errors import InputError
from flsim.base.extensions import restrict_custom_code
from flsim.base.files import is_device, named_file
from flsim.report import figures, provenance, tables
from flsim.report.figures import Block, Facts, Section, listed, plural
from flsim.report.gather import Gathered, contrasts, gather
from flsim.results.rows import PARTITIONS
from flsim.results.sweeps import NOT_SEARCHED, tuned_notes
from flsim.show.figure import page_style

FOLDER = Path(__file__).parent
MOST_NAMES = 3  # in a title
ROWS = 8  # of the first table
ANSWER = "Effect of each factor, with all other settings equal"
SHORT = (
    "a − b: mean over pairs of settings that differ in this factor only, with its 95% interval and p over n seeds, or "
    "over the canaries of one seed. Holm: p corrected for the number of rows. Flags are percentages of the planted "
    "canaries."
)

Opening = dict[str, Any]  # the title, the question and the facts at the beginning of a report


@restrict_custom_code()
def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write a report about run folders and sweeps, atomically; InputError for a suffix other than .html."""
    if not is_device(out) and out.suffix.lower() not in {".html", ".htm"}:
        raise InputError(f"{out}: reports have the format .html; use this suffix")
    with named_file(out) as partial:
        partial.write_text(render(gather(paths)), encoding="utf-8")


def render(gathered: Gathered) -> str:
    """Return the page."""
    space: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, **space)
    environment.filters["subscripts"] = subscripts
    openings, frame = _openings(gathered), contrasts(gathered)
    with page_style():
        return environment.get_template("template.html").render(
            title=" · ".join(opening["title"] for opening in openings),
            openings=openings,
            answer=answer(gathered, frame),
            facts=_facts(gathered, openings),
            sections=sections(gathered, frame),
            style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
        )


def answer(gathered: Gathered, frame: pd.DataFrame) -> list[Block]:
    """Return the first screen: one figure, and at most eight effects of factors, or the means of each setting."""
    rows = tables.contrast_rows(frame[frame["is_main"]])
    names = list(dict.fromkeys(row["row"] for row in rows))
    room, top = max(1, ROWS // max(1, len(names))), list[dict[str, Any]]()
    for name in names[:ROWS]:
        top += [row for row in rows if row["row"] == name][:room]
    is_large = len(gathered.lines) > figures.MOST
    figure = figures.forest(frame[frame["row"].isin(names[:ROWS])], "top") if is_large else figures.overview(gathered)
    figure = figure or figures.primary_curve(gathered)
    if not top:
        return [*figure, *tables.answer(gathered, ROWS)]
    more = f" The first {ROWS} of {len(names)} contrasts." if len(names) > ROWS else ""
    return [*figure, *listed(ANSWER, top, tables.CONTRAST, SHORT + more)]


def _facts(gathered: Gathered, openings: Sequence[Opening]) -> Facts:
    statuses = Counter([run.results.status for run in gathered.runs] + ["not begun"] * len(gathered.waiting))
    counts = [f"{statuses.pop('completed', 0)} of {len(gathered.runs) + len(gathered.waiting)} completed"]
    counts += [f"{count} {status}" for status, count in statuses.items()]
    facts = [("Runs", f"{', '.join(counts)}, of {plural(len(gathered.settings), 'setting')}")]
    return Facts([*facts, *(fact for opening in openings for fact in opening["facts"])])


def sections(gathered: Gathered, frame: pd.DataFrame) -> list[Section]:
    """Return all sections with blocks, in order; `frame` is that of `flsim.report.gather`."""
    compared = [*figures.forest(frame), *tables.contrast_blocks(frame)]
    memorized = [*tables.memorization(gathered), *tables.extracted(gathered)]
    configurations = [*figures.configurations(gathered), *tables.configurations(gathered)]
    every = [
        Section("contrasts", "Differences between settings", compared),
        Section("memorized", "What was memorized", memorized),
        Section("training", "Over training", figures.curves(gathered)),
        Section("utility", "Exposure at equal utility", figures.by_perplexity(gathered)),
        Section("configurations", "By how often canaries occur", configurations),
        Section("traces", "Canary by canary", figures.traces(gathered)),
        Section("forgetting", "Forgetting", tables.forgetting(gathered)),
        Section("proof", "What an attacker can prove", [*tables.proof(gathered), *tables.membership(gathered)]),
        Section("privacy", "Privacy", tables.privacy(gathered)),
        Section("settings", "Settings, next to the defaults", provenance.settings(gathered)),
        Section("data", "Data", provenance.data(gathered)),
        Section("failures", "Runs that failed or are not completed", provenance.failures(gathered)),
        Section("provenance", "Provenance", provenance.provenance(gathered)),
    ]
    return [section for section in every if section.blocks]


def _openings(gathered: Gathered) -> list[Opening]:
    if not gathered.sweeps:
        title = gathered.runs[0].results.name if len(gathered.runs) == 1 else _title(gathered)
        question = "What did the models memorize of the canaries that were planted in their data?"
        facts = [("Tuning", note) for note in tuned_notes([run.path for run in gathered.runs])]
        return [{"title": title, "question": question, "facts": facts}]
    openings = list[Opening]()
    for sweep in gathered.sweeps:
        facts = [("Published values", sweep.source)] if sweep.source else []
        facts.append(("Scale", f"{sweep.tier}: {sweep.about}" if sweep.about else sweep.tier))
        facts.append(("Tuning", sweep.tuned or NOT_SEARCHED))
        openings.append({"title": sweep.heading, "question": sweep.question, "facts": facts})
    return openings


def subscripts(text: str | Markup) -> Markup:
    """Return text with commands as code, and with batch sizes and probabilities as in the paper, with subscripts."""
    lowered = re.sub(r"(?<![.\w])([bp])_([uer])\b", r"<i>\1</i><sub>\2</sub>", str(escape(text)))
    return Markup(re.sub(r"`(flsim [^`<]+)`", r"<code>\1</code>", lowered))


def _title(gathered: Gathered) -> str:
    """Return the title of a report on runs without a sweep: the training, its partitions, and the number of runs."""
    names = dict.fromkeys(line.label for line in gathered.lines)
    what = ", ".join(names) if len(names) <= MOST_NAMES else plural(len(names), "setting")
    known = {setting.partition for setting in gathered.settings}
    where = " against ".join(name for partition, name in PARTITIONS.items() if partition in known).replace(" N", " n")
    return f"{', '.join(filter(None, (what, where)))}: {plural(len(gathered.runs), 'run')}"
