"""Section of a report on IID against non-IID, with a drawing of each interval."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity, flags, numbers
from flsim.report.blocks import Block, Cell, Heading, Prose, Table, left, number
from flsim.report.gather import Gathered, Line, RunView, Setting
from flsim.report.svg import image
from flsim.results.ceiling import MANY, WHAT_TO_DO
from flsim.results.differences import Pair, beside, column, differences
from flsim.results.published import COUNTED_OF, PREFIX
from flsim.results.sweeps import SweepRun
from flsim.show.differences import STANDARD, quantities_in_pairs, signed
from flsim.show.memorization import text_of_count

WIDTH, HIGH = 132, 16  # pixels of an interval
NAMES = " and ".join(flag.heading for flag in flags(STANDARD))
NOTE = (
    "The same canaries are planted in both worlds, so each is compared with itself. With several seeds, counts are "
    "means over them; the 95% interval and p of exposure are Student’s t over the seeds’ mean differences; p of "
    f"{NAMES} is exact, exchanging the worlds within seeds (Fisher), and at least 2/2ⁿ with n seeds. With one seed, "
    "marked †, they are Student’s t and McNemar’s exact test over its canaries: about these two models, not about "
    "other seeds. A seed that diverged in one world is dropped from both. In brackets: p corrected for the number of "
    "rows (Holm)."
)
CEILING = (
    " At the ceiling: canaries whose exposure is the largest that |R| references can show. Where many are there, a "
    f"difference near zero does not mean that the worlds are alike: more cannot show; {WHAT_TO_DO}"
)


def compared(gathered: Gathered) -> pd.DataFrame:
    """Return a row of `flsim.results.differences.beside` for each element of `both`, in order."""
    pairs = [Pair(line.label, _planned(iid), _planned(other)) for line, iid, other in both(gathered)]
    return beside(differences(pairs))


def both(gathered: Gathered) -> list[tuple[Line, Setting, Setting]]:
    """Return the lines that were trained in both worlds, with their IID and non-IID settings."""
    return [
        (line, iid, other)
        for line in gathered.lines
        if (iid := line.in_world("iid")) and (other := line.in_world("non-iid"))
    ]


def comparison(gathered: Gathered, frame: pd.DataFrame) -> list[Block]:
    """Return a row for each line that was trained in both worlds, and the reasons for missing comparisons.

    Args:
        gathered: all runs.
        frame: the frame of `compared`.
    """
    lines = both(gathered)
    if not lines:
        return [Prose("No setting was trained both on IID and on non-IID data, so there is nothing to compare here.")]
    bounds = [
        bound for name in ("difference", "low", "high") for bound in column(frame, f"{PRIMARY.name}_{name}").dropna()
    ]
    finite = [float(bound) for bound in bounds if np.isfinite(bound)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    quantities = quantities_in_pairs(frame)
    canaries = column(frame, "canaries_value_a")
    has_published = bool(column(frame, f"{PREFIX}{COUNTED_OF[0]}_difference").notna().any())
    has_diverged = any(bool((column(frame, f"diverged_value_{side}") > 0).any()) for side in "ab")
    has_ceiling = any(bool((column(frame, f"at_ceiling_value_{side}") / canaries >= MANY).any()) for side in "ab")
    records: Sequence[Mapping[Any, Any]] = frame.to_dict("records")
    rows = [
        [
            line.label,
            *_cells(row, quantities, has_published, has_diverged),
            _whisker(f"difference-{index}", row, low, high, line.label),
            _p(row, PRIMARY.name),
            *[_both(row, "at_ceiling")] * has_ceiling,
            *(
                cell
                for quantity in _others(quantities)
                for cell in (_difference(row, quantity), _p(row, quantity.name))
            ),
        ]
        for index, ((line, _, _), row) in enumerate(zip(lines, records, strict=True))
    ]
    headings = [left("Setting"), Heading("Seeds")]
    headings += [Heading(Markup("Diverged, IID&nbsp;/ non"))] * has_diverged
    for flag in flags(quantities):
        headings += [Heading(Markup("{}, IID&nbsp;/ non").format(flag.heading))]
        headings += [Heading(Markup("<em>published</em>"))] if has_published and flag.name in COUNTED_OF else []
        headings += [Heading("p")]
    note = f"{NOTE} {NAMES} count canaries of {_listed(canaries)} planted"
    note += f", published ones of {_listed(column(frame, 'published_canaries_value_a'))}." if has_published else "."
    scale = f"from {number(low)} to {number(high)} bits"
    headings += [Heading(_less(PRIMARY)), left(scale), Heading("p")]
    headings += [Heading(Markup("At the ceiling, IID&nbsp;/ non"))] * has_ceiling
    note += CEILING * has_ceiling
    for quantity in _others(quantities):
        headings += [Heading(_less(quantity)), Heading("p")]
        note += f" {quantity.title}: {quantity.sentence}"
    blocks: list[Block] = [Table("IID against non-IID: the same canaries, paired", headings, rows, note)]
    why = [
        f"{line.label}: {row['left_out']}"
        for (line, *_), row in zip(lines, records, strict=True)
        if _has(row, "left_out")
    ]
    return [*blocks, Prose(f"Not compared, or only in part. {'. '.join(why)}.", is_note=True)] if why else blocks


def _planned(setting: Setting) -> list[SweepRun]:
    return [run.planned or _without_sweep(run) for run in setting.runs]


def _without_sweep(run: RunView) -> SweepRun:
    """Return a run of no sweep as an entry of a sweep."""
    seed = -1 if run.results.seed is None else run.results.seed
    return SweepRun(run.results.name, "", seed, {}, None, run.results)


def _others(quantities: Sequence[Quantity]) -> list[Quantity]:
    """Return the numbers of canaries other than the primary one."""
    return [quantity for quantity in numbers(quantities) if not quantity.is_primary]


def _less(quantity: Quantity) -> str:
    unit = f", {quantity.unit}" if quantity.unit else ""
    return f"{quantity.title}, IID less non{unit}"


def _cells(
    row: Mapping[Any, Any], quantities: Sequence[Quantity], has_published: bool, has_diverged: bool
) -> list[Cell]:
    mark = " †" if row.get("over") == "canaries" else ""
    cells: list[Cell] = [f"{number(row.get('seeds'), '{:.0f}')}{mark}", *[_both(row, "diverged")] * has_diverged]
    for flag in flags(quantities):
        cells.append(_both(row, flag.name))
        if has_published and flag.name in COUNTED_OF:
            cells.append(_both(row, f"{PREFIX}{flag.name}"))
        cells.append(_p(row, flag.name))
    return [*cells, _difference(row, PRIMARY)]


def _difference(row: Mapping[Any, Any], quantity: Quantity) -> Cell:
    """Return a mean difference and its interval."""
    template = f"{{:{signed(quantity)}}}"
    mean, low, high = (number(row.get(f"{quantity.name}_{name}"), template) for name in ("difference", "low", "high"))
    if _has(row, f"{quantity.name}_low"):
        return Markup("{} <small>{}</small>").format(mean, f"{low} to {high}")
    return mean


def _both(row: Mapping[Any, Any], name: str) -> str:
    values = [row.get(f"{name}_value_{side}") for side in "ab"]
    return "–" if any(map(pd.isna, values)) else " / ".join(number(value).removesuffix(".0") for value in values)


def _p(row: Mapping[Any, Any], name: str) -> Cell:
    if not _has(row, f"{name}_p"):
        return "–"
    p, corrected = (number(row[f"{name}_{value}"], "{:.2g}") for value in ("p", "p_holm"))
    return Markup("{} <small>({})</small>").format(p, corrected)


def _listed(values: "pd.Series[float]") -> str:
    return " or ".join(text_of_count(value) for value in sorted(set(values.dropna()))) or "–"


def _has(row: Mapping[Any, Any], name: str) -> bool:
    return not pd.isna(row.get(name))


def _whisker(id_: str, row: Mapping[Any, Any], low: float, high: float, label: str) -> Cell:
    """Return a drawing of a mean and its interval on a scale that all rows share, with zero marked."""
    if not _has(row, f"{PRIMARY.name}_difference"):
        return "–"

    def at(value: float) -> float:
        return 5 + (WIDTH - 10) * (value - low) / ((high - low) or 1.0)

    mean = float(row[f"{PRIMARY.name}_difference"])
    content = Markup('<path class="rule" d="M{:.1f},1V{}"/>').format(at(0), HIGH - 1)
    told = f"IID less non-IID: {mean:+.2f} bits"
    if _has(row, f"{PRIMARY.name}_low"):
        begin, end = (float(row[f"{PRIMARY.name}_{end}"]) for end in ("low", "high"))
        content += Markup('<path class="w" d="M{:.1f},{}H{:.1f}"/>').format(at(begin), HIGH // 2, at(end))
        told += f", 95% interval {begin:+.2f} to {end:+.2f}"
    content += Markup('<circle class="dot" cx="{:.1f}" cy="{}" r="3.2"/>').format(at(mean), HIGH // 2)
    return image(id_, f"Difference, {label}", f"{told}. The dotted line is zero.", WIDTH, HIGH, content)
