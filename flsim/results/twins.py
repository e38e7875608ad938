"""Comparison of worlds: the series of a setting on IID data with those on users' own, in lines below a table."""

from collections import Counter
from collections.abc import Sequence

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, numbers
from flsim.results.ceiling import MANY, WHAT_TO_DO, at_ceiling
from flsim.results.formats import note
from flsim.results.like_utility import like_utility
from flsim.results.pairing import compared_in
from flsim.results.run_file import WORLDS
from flsim.results.seeds import by_series, sample
from flsim.results.store import RunResults
from flsim.results.worlds import paired_over_seeds, without_diverged

HEADING = """{} of IID less Non-IID{}, paired over the canaries of each seed: mean,
95% interval and p from Student's t over seeds, and seeds with the mean's sign.
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
    perplexity.

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
        lines = [
            note(f"{label}: {_line(worlds, round, epoch, quantity)}")
            for label, worlds in twins.items()
            if all(worlds.values())
        ]
        heading = HEADING.format(quantity.title, f", {quantity.unit}" if quantity.unit else "")
        text += "\n" * bool(text) + heading + "".join(lines) if lines else ""
        if quantity.is_primary:
            text += _at_equal_perplexity(twins) if round is None and epoch is None else ""
            text += _ceilings(twins, round, epoch)
    return text


def _line(worlds: dict[str, list[list[RunResults]]], round: int | None, epoch: float | None, quantity: Quantity) -> str:
    if any(len(series) > 1 for series in worlds.values()):
        return "not compared, since several rows have this setting; show fewer runs"
    try:
        return str(paired_over_seeds(worlds["iid"][0], worlds["non-iid"][0], round, epoch, quantity))
    except InputError as error:
        return f"not compared: {error}"


def _at_equal_perplexity(twins: dict[str, dict[str, list[list[RunResults]]]]) -> str:
    """Return a line for each twins with one series in each world; empty if there are none."""
    lines = []
    for label, (iid, other) in ((label, tuple(worlds.values())) for label, worlds in twins.items()):
        if not len(iid) == len(other) == 1:
            continue
        kept = without_diverged(iid[0], other[0])
        if not all(kept):
            continue
        try:
            compared = str(like_utility(*kept))
        except InputError as error:
            compared = f"not compared: {error}"
        lines.append(note(f"{label}: {compared}"))
    return "".join([AT_EQUAL_PERPLEXITY, *lines]) if lines else ""


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
