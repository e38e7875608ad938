"""Comparison of worlds: the series of a setting on IID data with those on users' own, in lines below a table."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flsim.base.errors import InputError
from flsim.base.statistics import holm
from flsim.measures.quantity import Quantity, numbers
from flsim.results.ceiling import MANY, WHAT_TO_DO, at_ceiling
from flsim.results.distinctions import differing, words_of
from flsim.results.formats import note
from flsim.results.like_utility import LikeUtility, like_utility
from flsim.results.pairing import compared_in
from flsim.results.run_file import WORLDS
from flsim.results.seeds import by_series, sample
from flsim.results.store import RunResults
from flsim.results.worlds import PairedOverSeeds, paired_over_seeds, without_diverged

HEADING = """{} of IID less Non-IID{}, paired over the canaries of each seed: mean,
95% interval and p from Student's t over seeds, and seeds with the mean's sign.
"""
CORRECTED = """Holm: that p corrected for the number of tests in the same list.
"""
AT_EQUAL_PERPLEXITY = """The same at equal perplexity: each seed at the lowest that both runs reached.
"""
CEILING = (
    "Canaries at the ceiling of exposure, IID and Non-IID: {}. They are ranked before all references, and differences "
    f"between them cannot show; {WHAT_TO_DO}"
)

Row = tuple[RunResults, list[RunResults]]  # the first run of a series, and those to compare
Twins = dict[str, list[list[RunResults]]]  # the runs to compare of each series, by world


def compare_worlds(runs: Sequence[RunResults], round: int | None = None, epoch: float | None = None) -> str:
    """Return a line for each two series whose settings differ only in the world; empty if there are none.

    There is a line for exposure, and one for each number of canaries of a user's own measures. The compared runs are
    those that a table over seeds averages, and seeds that diverged are named. Series that cannot be compared have a
    line with the reason. At the end of training there is a second line for exposure: its difference at equal
    perplexity. Where several settings are compared, each p is followed by its value corrected for their number by Holm,
    the end of training, equal perplexity and each number of canaries by itself.

    Raises:
        InputError: as for `flsim.results.seeds_table.seeds_table`.
    """
    twins = _twins(runs, round, epoch)
    text = ""
    for quantity in numbers(compared_in(runs)):
        compared = {
            label: _compared(worlds, round, epoch, quantity) for label, worlds in twins.items() if all(worlds.values())
        }
        is_corrected = len(compared) > 1
        heading = HEADING.format(quantity.title, f", {quantity.unit}" if quantity.unit else "")
        heading += CORRECTED * is_corrected
        text += "\n" * bool(text) + heading + _lines(compared, is_corrected) if compared else ""
        if quantity.is_primary:
            text += _at_equal_perplexity(twins, is_corrected) if round is None and epoch is None else ""
            text += _ceilings(twins, round, epoch)
    return text


def _twins(runs: Sequence[RunResults], round: int | None, epoch: float | None) -> dict[str, Twins]:
    """Return the series of both worlds by name: the label, the length where it differs, and settings as in a table."""
    named: dict[str, dict[str, list[Row]]] = {}
    groups = by_series(runs)
    lengths = Counter((label, world) for label, world, _ in {(run.label, run.world, run.rounds) for run, *_ in groups})
    for group in groups:
        series, first = sample(group, round, epoch), group[0]
        if first.world is not None:
            has_lengths = max(lengths[first.label, world] for world in WORLDS) > 1
            label = first.label + f", {first.rounds:,} rounds" * has_lengths
            worlds = named.setdefault(label, {world: [] for world in WORLDS})
            diverged = [run for run in group if run.status == "diverged"]
            worlds[first.world].append((first, [run for run, _ in series.taken] + diverged))
    return {
        label + words: {world: [series for _, series in rows] for world, rows in part.items()}
        for label, worlds in named.items()
        for words, part in _told_apart(worlds).items()
    }


def _told_apart(worlds: dict[str, list[Row]]) -> dict[str, dict[str, list[Row]]]:
    """Return rows of one label in parts to compare, by the words that tell them apart; "" where none are needed.

    First come rows that are equal in all settings that tell rows of one world apart. Of others a search may have chosen
    a rate for each row. They are told apart by settings of which both worlds have the same values.
    """
    if max(map(len, worlds.values())) == 1:
        return {"": worlds}
    names = {name for rows in worlds.values() for name in differing([first.settings for first, _ in rows])}
    twins = {words: part for words, part in _parts(worlds, names).items() if _is_pair(part)}
    paired = {id(row) for part in twins.values() for rows in part.values() for row in rows}
    others = {world: [row for row in rows if id(row) not in paired] for world, rows in worlds.items()}
    if not all(others.values()):
        return twins
    values = {
        name: [{repr(first.settings.get(name)) for first, _ in rows} for rows in others.values()] for name in names
    }
    return twins | _parts(others, {name for name, (iid, other) in values.items() if iid == other})


def _parts(worlds: dict[str, list[Row]], names: Collection[str]) -> dict[str, dict[str, list[Row]]]:
    """Return rows of both worlds by the words of their values of some settings."""
    parts: dict[str, dict[str, list[Row]]] = {}
    for world, rows in worlds.items():
        for row in rows:
            part = parts.setdefault(words_of(row[0], names), {name: [] for name in WORLDS})
            part[world].append(row)
    return parts


def _is_pair(worlds: dict[str, list[Row]]) -> bool:
    return all(len(rows) == 1 for rows in worlds.values())


def _lines(compared: Mapping[str, PairedOverSeeds | LikeUtility | str], is_corrected: bool) -> str:
    """Return a line for each comparison, or for the reason that there is none, by the label of its settings.

    If `is_corrected`, each p is also shown corrected by Holm; the family is the comparisons that have one.
    """
    p = holm([math.nan if isinstance(one, str) or not is_corrected else one.p for one in compared.values()])
    texts = [one if isinstance(one, str) else one.text(value) for one, value in zip(compared.values(), p, strict=True)]
    return "".join(note(f"{label}: {text}") for label, text in zip(compared, texts, strict=True))


def _compared(worlds: Twins, round: int | None, epoch: float | None, quantity: Quantity) -> PairedOverSeeds | str:
    """Return the comparison of two series at one point in training, or why there is none."""
    if any(len(series) > 1 for series in worlds.values()):
        return "not compared, since several rows have this setting; show fewer runs"
    try:
        return paired_over_seeds(worlds["iid"][0], worlds["non-iid"][0], round, epoch, quantity)
    except InputError as error:
        return f"not compared: {error}"


def _at_equal_perplexity(twins: dict[str, Twins], is_corrected: bool) -> str:
    """Return a line for each twins with one series in each world; empty if there are none."""
    compared: dict[str, PairedOverSeeds | LikeUtility | str] = {}
    for label, (iid, other) in ((label, tuple(worlds.values())) for label, worlds in twins.items()):
        if not len(iid) == len(other) == 1:
            continue
        kept = without_diverged(iid[0], other[0])
        if not all(kept):
            continue
        try:
            compared[label] = like_utility(*kept)
        except InputError as error:
            compared[label] = f"not compared: {error}"
    return AT_EQUAL_PERPLEXITY + _lines(compared, is_corrected) if compared else ""


def _ceilings(twins: dict[str, Twins], round: int | None, epoch: float | None) -> str:
    """Return a sentence on the shares of canaries at the ceiling in both worlds; empty where they are few."""
    words = []
    for label, worlds in twins.items():
        shares = [
            at_ceiling([(run, run.at(round, epoch)) for runs in of_world for run in runs if run.status != "diverged"])
            for of_world in worlds.values()
        ]
        if all(worlds.values()) and max(count.share for count in shares) >= MANY:
            words.append(f"{label} {' and '.join(f'{count.share:.0%}' for count in shares)}")
    return note(CEILING.format("; ".join(words))) if words else ""
