"""Comparison of worlds: the series of a setting on IID data with those on users' own, in lines below a table."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, numbers
from flsim.results.ceiling import MANY, WHAT_TO_DO, at_ceiling
from flsim.results.formats import note
from flsim.results.inference import holm
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
    twins: dict[str, dict[str, list[list[RunResults]]]] = {}
    groups = by_series(runs)
    lengths = Counter((label, world) for label, world, _ in {(run.label, run.world, run.rounds) for run, *_ in groups})
    for group in groups:
        series, first = sample(group, round, epoch), group[0]
        if first.world is not None:
            has_lengths = max(lengths[first.label, world] for world in WORLDS) > 1
            label = first.label + f", {first.rounds:,} rounds" * has_lengths
            worlds = twins.setdefault(label, {world: [] for world in WORLDS})
            diverged = [run for run in group if run.status == "diverged"]
            worlds[first.world].append([run for run, _ in series.taken] + diverged)
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


def _lines(compared: Mapping[str, PairedOverSeeds | LikeUtility | str], is_corrected: bool) -> str:
    """Return a line for each comparison, or for the reason that there is none, by the label of its settings.

    If `is_corrected`, each p is also shown corrected by Holm; the family is the comparisons that have one.
    """
    p = holm([math.nan if isinstance(one, str) or not is_corrected else one.p for one in compared.values()])
    texts = [one if isinstance(one, str) else one.text(value) for one, value in zip(compared.values(), p, strict=True)]
    return "".join(note(f"{label}: {text}") for label, text in zip(compared, texts, strict=True))


def _compared(
    worlds: dict[str, list[list[RunResults]]], round: int | None, epoch: float | None, quantity: Quantity
) -> PairedOverSeeds | str:
    """Return the comparison of two series at one point in training, or why there is none."""
    if any(len(series) > 1 for series in worlds.values()):
        return "not compared, since several rows have this setting; show fewer runs"
    try:
        return paired_over_seeds(worlds["iid"][0], worlds["non-iid"][0], round, epoch, quantity)
    except InputError as error:
        return f"not compared: {error}"


def _at_equal_perplexity(twins: dict[str, dict[str, list[list[RunResults]]]], is_corrected: bool) -> str:
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


def _ceilings(twins: dict[str, dict[str, list[list[RunResults]]]], round: int | None, epoch: float | None) -> str:
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
