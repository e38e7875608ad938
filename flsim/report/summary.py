"""The beginning of a report: a paragraph and a few numbers, computed from the results."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import holm
from flsim.measures.built_in import PRIMARY, QUANTITIES
from flsim.measures.quantity import flags
from flsim.report.blocks import listed, number, plural
from flsim.report.factors import techniques
from flsim.report.figures import ceiling_of
from flsim.report.gather import Gathered, Line, Setting
from flsim.results.ceiling import MANY, WHAT_TO_DO, at_ceiling
from flsim.results.differences import column
from flsim.results.pairs import LikeUtility, like_utility
from flsim.results.run_file import WORLDS
from flsim.show.memorization import text_of_count

LEVEL = 0.05  # of tests
FIRST = flags(QUANTITIES.values())[0]


@dataclass(frozen=True)
class Tile:
    """A number at the top of the report."""

    name: str
    value: str
    unit: str


def tiles(gathered: Gathered) -> list[Tile]:
    """Return flags and exposure, in both worlds if there are pairs, otherwise over all settings; and the run count.

    Several techniques have flags of their own.
    """
    entries = []
    worlds = _worlds(gathered.pairs)
    by_technique = _by_technique(gathered, gathered.pairs)
    of_techniques = {name: _worlds(lines) for name, lines in by_technique.items()} or {"": [gathered.settings]}
    for flag in flags(gathered.quantities):
        for technique, sides in of_techniques.items():
            name = f"{flag.outcome.capitalize()} ({flag.heading})" + f", {technique}" * (len(of_techniques) > 1)
            shares = [_mean([_share(setting, flag.name) for setting in settings]) for settings in sides]
            if all(share is not None for share in shares):
                entries.append(
                    Tile(name, " / ".join(number(share, "{:.0%}") for share in shares), _unit(worlds, "canaries"))
                )
    bits = [_mean([setting.mean(PRIMARY.name) for setting in settings]) for settings in worlds or [gathered.settings]]
    if len(of_techniques) == 1 and all(value is not None for value in bits):
        mean = " / ".join(number(value) for value in bits)
        entries.append(Tile(PRIMARY.caption, mean, _unit(worlds, PRIMARY.unit)))
    completed = sum(run.results.status == "completed" for run in gathered.runs)
    total = len(gathered.runs) + len(gathered.waiting)
    return [*entries, Tile("Runs completed", f"{completed} / {total}", f"{plural(len(gathered.settings), 'setting')}")]


def paragraph(gathered: Gathered, comparison: pd.DataFrame) -> list[str]:
    """Return sentences about RS, BS and exposure, then about missing runs.

    Args:
        gathered: all runs.
        comparison: the frame of `flsim.report.worlds.compared`.
    """
    measured = [
        setting for setting in gathered.settings if setting.shown_runs and setting.mean(PRIMARY.name) is not None
    ]
    pairs = [line for line in gathered.pairs if all(setting.mean(FIRST.name) is not None for setting in line.settings)]
    if pairs:
        sentences = [
            *_compared(gathered, pairs),
            *_agreement(pairs),
            *_chance(comparison),
            *_at_like_utility(_by_technique(gathered, pairs)),
        ]
    elif any(setting.mean(FIRST.name) is not None for setting in gathered.settings):
        sentences = _ranges(
            gathered, [setting for setting in gathered.settings if setting.mean(FIRST.name) is not None]
        )
    elif measured:
        ends = sorted((setting.mean(PRIMARY.name) or 0.0, setting.label) for setting in measured)
        sentences = [f"Mean exposure is {ends[0][0]:.1f} to {ends[-1][0]:.1f} bits."]
    else:
        sentences = ["Nothing has been evaluated yet, so there is no answer so far."]
    return [*sentences, *_missing(gathered)]


def _compared(gathered: Gathered, pairs: Sequence[Line]) -> list[str]:
    iid, other = _worlds(pairs)
    by_technique = _by_technique(gathered, pairs)
    sentences = []
    for technique, lines in by_technique.items():
        if len(by_technique) > 1:
            sentences.append(_of_technique(gathered, technique, *_worlds(lines)))
    for flag in flags(gathered.quantities) if len(by_technique) == 1 else []:
        metric = flag.name
        shares = [_mean([_share(setting, metric) for setting in settings]) for settings in (iid, other)]
        if shares[0] is not None and shares[1] is not None:
            sentences.append(
                f"{flag.title} {flag.finds} {_counted(iid, metric)} where data are IID and "
                f"{_counted(other, metric)} where they are non-IID."
            )
    bits = [_mean([setting.mean(PRIMARY.name) for setting in settings]) for settings in (iid, other)]
    if bits[0] is not None and bits[1] is not None:
        ceilings = {f"{bound:.1f}" for setting in (*iid, *other) if (bound := ceiling_of(setting))}
        most = f", of at most {ceilings.pop()}" if len(ceilings) == 1 else ""
        if len(by_technique) == 1:
            sentences.append(f"Mean exposure is {bits[0]:.1f} bits against {bits[1]:.1f}{most}.")
        sentences += _at_ceiling([*iid, *other])
    seeds = sorted({len(setting.shown_runs) for setting in (*iid, *other)})
    over = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else plural(seeds[0], "seed")
    whole = "These are means" if len(pairs) > len(by_technique) else "That is"
    sentences.append(f"{whole} over {plural(len(pairs), 'setting')} trained in both worlds, with {over} each.")
    return sentences + _diverged(gathered)


def _by_technique(gathered: Gathered, pairs: Sequence[Line]) -> dict[str, list[Line]]:
    """Return the lines of each technique, by its name; techniques are not averaged with each other."""
    names = techniques(gathered)
    groups: dict[str, list[Line]] = {}
    for line in pairs:
        groups.setdefault(names.get(line.settings[0], "unknown technique"), []).append(line)
    return groups


def _of_technique(gathered: Gathered, name: str, iid: Sequence[Setting], other: Sequence[Setting]) -> str:
    """Return a sentence on the shares of memorized canaries and the mean exposure of a technique in both worlds."""
    parts = list[str]()
    for flag in flags(gathered.quantities):
        a, b = (_mean([_share(setting, flag.name) for setting in settings]) for settings in (iid, other))
        if a is not None and b is not None:
            whole = "them" if parts else "the planted canaries"
            parts.append(f"{flag.title} {flag.finds} {a:.0%} against {b:.0%} of {whole}")
    bits = [_mean([setting.mean(PRIMARY.name) for setting in settings]) for settings in (iid, other)]
    if bits[0] is not None and bits[1] is not None:
        parts.append(f"mean exposure is {bits[0]:.1f} against {bits[1]:.1f} {PRIMARY.unit}")
    return f"With {name}, on IID against non-IID data, {listed(parts)}."


def _diverged(gathered: Gathered) -> list[str]:
    """Return a sentence on how many runs diverged in each world, which is an outcome too; none if none did."""
    lines = [line for line in gathered.lines if line.in_world("iid") and line.in_world("non-iid")]
    words = []
    for world, name in WORLDS.items():
        settings = [setting for line in lines if (setting := line.in_world(world))]
        total = sum(len(setting.runs) for setting in settings)
        words.append(f"{sum(setting.diverged for setting in settings)} of {total} {name} runs")
    if not any(setting.diverged for line in lines for setting in line.settings):
        return []
    return [f"Divergence is an outcome too: {listed(words)} diverged; such a seed is dropped from both worlds' means."]


def _at_ceiling(settings: Sequence[Setting]) -> list[str]:
    """Return a sentence on how many canaries have the largest possible exposure; none if they are few."""
    counts = at_ceiling([(run.results, round_) for setting in settings for run, round_ in setting.shown_runs])
    reached, total = counts.reached, counts.canaries
    if counts.share < MANY:
        return []
    return [
        f"{reached:,} of {total:,} canaries are at the ceiling of exposure, where differences cannot show; {WHAT_TO_DO}"
    ]


def _agreement(pairs: Sequence[Line]) -> list[str]:
    """Return a sentence on the number of settings in which each world memorizes more."""
    if len(pairs) < 2:
        return []
    rs = [[(setting.mean(FIRST.name) or 0.0) for setting in line.paired] for line in pairs]
    more, less = sum(a > b for a, b in rs), sum(a < b for a, b in rs)
    equal = len(rs) - more - less
    counts = ((more, "more with IID data"), (less, "more with non-IID data"), (equal, "equally many"))
    words = [f"{what} in {count}" for count, what in counts if count]
    return [f"Setting by setting, {FIRST.title} {FIRST.finds} {listed(words)} of {len(rs)}."]


def _at_like_utility(by_technique: Mapping[str, Sequence[Line]]) -> list[str]:
    """Return sentences on exposure where both models of a pair first predict equally well; none where none did."""
    differences: dict[str, list[LikeUtility]] = {}
    for technique, lines in by_technique.items():
        for line in lines:
            iid, other = ([run.results for run, _ in setting.shown_runs] for setting in line.paired)
            with suppress(InputError):
                compared = like_utility(iid, other)
                differences.setdefault(technique, []).append(compared)
    if not differences:
        return []
    begin = "Where both models first predict equally well, mean exposure"
    if len(by_technique) == 1 and len(of_all := next(iter(differences.values()))) > 1:
        mean = float(np.mean([one.mean_difference for one in of_all]))
        more = sum(one.mean_difference > 0 for one in of_all)
        says = f"{begin} is higher with IID data in {more} of {len(of_all)} settings, by {_bits(mean)} bits over all."
        return [says, *_left_out_at_like_utility(of_all), *_sure_at_like_utility(of_all)]
    words = []
    for technique, of_technique in differences.items():
        mean = float(np.mean([one.mean_difference for one in of_technique]))
        only = of_technique[0]
        has_interval = len(of_technique) == 1 and not math.isnan(only.ci_low)
        interval = f" (95% interval {_bits(only.ci_low)} to {_bits(only.ci_high)})" if has_interval else ""
        over = f" (mean over {len(of_technique)} settings)" if len(of_technique) > 1 else ""
        words.append(f"{_bits(mean)} bits{interval}{over}" + f" with {technique}" * (len(by_technique) > 1))
    says = f"{begin} with IID data less that with non-IID data is {listed(words)}."
    # A technique of one setting has its interval in that sentence.
    has_means = any(len(of_technique) > 1 for of_technique in differences.values())
    every = list(chain(*differences.values()))
    return [says, *_left_out_at_like_utility(every), *(_sure_at_like_utility(every) if has_means else [])]


def _left_out_at_like_utility(compared: Sequence[LikeUtility]) -> list[str]:
    """Return a sentence on how many pairs of runs these differences leave out; none where they have all."""
    lost = sum(len(one.left_out) for one in compared)
    total = lost + sum(len(one.seeds) for one in compared)
    return [f"There, {lost} of {plural(total, 'pair')} of runs cannot be compared."] if lost else []


def _sure_at_like_utility(compared: Sequence[LikeUtility]) -> list[str]:
    """Return a sentence on how many of the differences are significant; none where no setting has two seeds."""
    tested = [p for p in holm([one.p for one in compared]) if not math.isnan(p)]
    if not tested:
        return []
    sure = sum(p < LEVEL for p in tested) or "none"
    settings = f"{plural(len(tested), 'setting')} with several seeds"
    corrected = f"p < {LEVEL:g}, corrected for their number"
    return [f"Exposure differs there by more than chance in {sure} of {settings} ({corrected})."]


def _bits(difference: float) -> str:
    return number(difference, "{:+.2f}")


def _chance(comparison: pd.DataFrame) -> list[str]:
    """Return sentences on how many of the differences in exposure are significant."""
    tested = column(comparison, f"{PRIMARY.name}_p_holm").dropna()
    if tested.empty:
        return []
    sure = int((tested < LEVEL).sum())
    one_seed = (comparison.loc[tested.index, "over"] == "canaries").any()
    more = (
        " Where there is one seed, this is over the canaries of one pair of models, and says nothing about other seeds."
        if one_seed
        else ""
    )
    if len(tested) == 1:
        says = "differs by more than chance" if sure else "does not differ by more than chance"
        p = f"(p = {tested.iloc[0]:.2g})"
        if one_seed:
            return [f"Over the canaries of this one pair of models exposure {says} {p}; that is not about other seeds."]
        return [f"Exposure {says} {p}."]
    count = f"{sure} of {len(tested)}" if sure else f"none of {len(tested)}"
    corrected = f"p < {LEVEL:g}, corrected for their number"
    return [f"Exposure differs by more than chance in {count} settings ({corrected}).{more}"]


def _ranges(gathered: Gathered, settings: Sequence[Setting]) -> list[str]:
    sentences = []
    for flag in flags(gathered.quantities):
        metric = flag.name
        means = [(value, setting) for setting in settings if (value := setting.mean(metric)) is not None]
        if not means:
            continue
        low, high = min(means, key=lambda pair: pair[0]), max(means, key=lambda pair: pair[0])
        if len(means) == 1 or low[0] == high[0]:
            where = "" if len(means) == 1 else " in every setting"
            sentences.append(f"{flag.title} {flag.finds} {_counted([low[1]], metric)}{where}.")
        else:
            sentences.append(
                f"{flag.title} {flag.finds} from {_counted([low[1]], metric)} ({low[1].label}) to "
                f"{_counted([high[1]], metric)} ({high[1].label})."
            )
    bits = [value for setting in settings if (value := setting.mean(PRIMARY.name)) is not None]
    if bits:
        span = f"{bits[0]:.1f}" if len(bits) == 1 else f"{min(bits):.1f} to {max(bits):.1f}"
        sentences.append(f"Mean exposure is {span} bits.")
    return sentences


def _missing(gathered: Gathered) -> list[str]:
    statuses = [run.results.status for run in gathered.runs]
    words = [
        f"{count} {says}"
        for count, says in (
            (statuses.count("running"), "still in training"),
            (statuses.count("diverged"), "diverged"),
            (statuses.count("failed"), "failed"),
            (statuses.count("interrupted"), "interrupted"),
            (len(gathered.waiting), "not begun"),
        )
        if count
    ]
    total = len(gathered.runs) + len(gathered.waiting)
    if not words:
        return []
    unfinished = [setting.label for setting in gathered.settings if setting.is_unfinished]
    more = (
        " Where no run of a setting is completed, its latest evaluation stands for it, and the tables say so."
        if unfinished
        else ""
    )
    return [f"Of {plural(total, 'run')}, {listed(words)}.{more}"]


def _counted(settings: Sequence[Setting], metric: str) -> str:
    """Return the number of memorized canaries, or their share if settings have different numbers of canaries."""
    share = _mean([_share(setting, metric) for setting in settings])
    counts = {setting.canaries for setting in settings}
    if len(counts) > 1:
        return f"{share:.0%} of the planted canaries"
    memorized = _mean([setting.mean(metric) for setting in settings])
    return f"{number(memorized).removesuffix('.0')} of {text_of_count(counts.pop())} planted canaries ({share:.0%})"


def _share(setting: Setting, metric: str) -> float | None:
    memorized = setting.mean(metric)
    return memorized / setting.canaries if memorized is not None and setting.canaries else None


def _worlds(pairs: Sequence[Line]) -> list[list[Setting]]:
    """Return the IID settings and the non-IID ones, with the seeds of both; empty if there is no pair."""
    paired = [line.paired for line in pairs]
    by_world = [[settings[place] for settings in paired] for place in range(len(WORLDS))]
    return by_world if pairs else []


def _unit(worlds: Sequence[object], what: str) -> str:
    return f"{what}, IID / non-IID" if worlds else what


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None
