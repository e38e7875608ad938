"""The effect of each factor on mean exposure, in sentences: pairs of settings that differ in this factor alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from flsim.base.errors import InputError
from flsim.base.statistics import ROUNDING, t_interval
from flsim.measures.built_in import PRIMARY
from flsim.measures.utility import PERPLEXITY
from flsim.report.blocks import listed, number, plural
from flsim.report.factors import Contrast, contrasts
from flsim.report.gather import Gathered, RunView, Setting
from flsim.results.ceiling import MANY, WHAT_TO_DO, at_ceiling
from flsim.results.pairs import left_out_text, pair_at_like_utility

NOTE = (
    "Each effect is a mean over the pairs of settings that differ in this factor alone, and in what always changes "
    "with it, seed by seed, at the end of training; the 95% interval is Student’s t over seeds. Techniques are means "
    "over settings that only one of them has, such as the users in a round. Effects hold for these settings, and say "
    "nothing about others. A model that predicts better has often memorized more, so perplexities stand beside them. "
    f"Where many canaries are at the ceiling of exposure, differences cannot show; {WHAT_TO_DO}"
)
MOST = 12  # sentences

Pair = tuple[dict[int, RunView], dict[int, RunView]]  # completed runs of two settings, by seed


@dataclass(frozen=True)
class Effect:
    """Mean exposure at value a of a factor less that at value b.

    Attributes:
        contrast: the factor, its values, and the pairs of settings.
        compared: number of compared pairs; each has these seeds.
        differences: a - b in bits for each seed, means over the compared pairs; empty if nothing can be compared.
        low, high: 95% interval of their mean, from Student's t over seeds; NaN below two.
        perplexities: mean perplexities at a and at b; NaN if not measured.
        at_ceiling: shares of the canaries that have the largest possible exposure, at a and at b.
        alike: the same differences where both models first predict equally well (`flsim.results.pairs`), for
            each seed that has such a point in every pair.
        unlike: why a seed has none in some pair, by seed.
        alike_low, alike_high: 95% interval of their mean over seeds.
        diverged: seeds that are in no difference, since a run of a compared setting diverged.
    """

    contrast: Contrast
    compared: int
    differences: tuple[float, ...]
    low: float
    high: float
    perplexities: tuple[float, float]
    at_ceiling: tuple[float, float]
    alike: tuple[float, ...] = ()
    alike_low: float = math.nan
    alike_high: float = math.nan
    unlike: Mapping[int, str] = field(default_factory=dict)
    diverged: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        return float(np.mean(self.differences))

    @property
    def alike_mean(self) -> float:
        return float(np.mean(self.alike))


def effects(gathered: Gathered) -> list[Effect]:
    """Return the effect of each factor, in the order of `flsim.report.factors.contrasts`."""
    return [effect_of(contrast) for contrast in contrasts(gathered)]


def effect_of(contrast: Contrast) -> Effect:
    """Return the effect of one factor.

    Compared are completed runs. A seed without a completed run on one side of a pair is dropped from all pairs, so that
    every seed's mean is over the same settings. If none is left, pairs of the fewest common seeds are left out.
    """
    by_seed = [(_by_seed(a), _by_seed(b)) for a, b in contrast.pairs]
    pairs, seeds = _with_common_seeds([(a, b) for a, b in by_seed if {*a} & {*b} and _references(a) == _references(b)])
    compared = [both for both, pair in zip(contrast.pairs, by_seed, strict=True) if pair in pairs]
    diverged = _diverged(compared or contrast.pairs, seeds)
    nan = (math.nan, math.nan)
    if not seeds:
        return Effect(contrast, 0, (), *nan, nan, nan, diverged=diverged)
    differences = [np.mean([_exposure(a[seed]) - _exposure(b[seed]) for a, b in pairs]) for seed in seeds]
    rounded = np.round(differences, ROUNDING)
    sides = [[run[seed] for run in side for seed in seeds] for side in zip(*pairs, strict=True)]
    utility = [np.mean([_last(run, PERPLEXITY.name) for run in side]) for side in sides]
    shares = [at_ceiling([(run.results, run.results.evaluated[-1]) for run in dict.fromkeys(side)]) for side in sides]
    alike, unlike = _at_like_utility(pairs, seeds)
    return Effect(
        contrast,
        len(pairs),
        tuple(rounded.tolist()),
        *t_interval(rounded),
        (float(utility[0]), float(utility[1])),
        (shares[0].share, shares[1].share),
        alike,
        *(t_interval(np.asarray(alike)) if alike else nan),
        unlike,
        diverged,
    )


def _diverged(pairs: Sequence[tuple[Setting, Setting]], compared: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds of which a run diverged in a setting of the pairs, without those that are compared."""
    runs = [run.results for pair in pairs for setting in pair for run in setting.runs]
    seeds = {run.seed for run in runs if run.status == "diverged" and run.seed is not None}
    return tuple(sorted(seeds - {*compared}))


def _with_common_seeds(pairs: Sequence[Pair]) -> tuple[Sequence[Pair], list[int]]:
    """Return the pairs to compare, and the seeds that are completed on both sides of each."""
    for fewest in range(1, max((len({*a} & {*b}) for a, b in pairs), default=0) + 1):
        kept = [(a, b) for a, b in pairs if len({*a} & {*b}) >= fewest]
        seeds = set.intersection(*({*a} & {*b} for a, b in kept))
        if seeds:
            return kept, sorted(seeds)
    return [], []


def _at_like_utility(pairs: Sequence[Pair], seeds: Sequence[int]) -> tuple[tuple[float, ...], dict[int, str]]:
    """Return the mean difference of pairs where both models first predict equally well, for each seed that has it.

    A seed for which some pair has no such point is in the second mapping, with the reason of the first such pair.
    """

    def difference(a: RunView, b: RunView) -> float:
        return float(pair_at_like_utility(a.results, b.results).differences.mean())

    means, unlike = list[float](), dict[int, str]()
    for seed in seeds:
        try:
            means.append(float(np.mean([difference(a[seed], b[seed]) for a, b in pairs])))
        except InputError as error:
            unlike[seed] = str(error)
    return tuple(np.round(means, ROUNDING).tolist()), unlike


def sentences(every: Sequence[Effect]) -> list[Markup]:
    """Return a sentence for each effect, with the name of the factor in bold type."""
    texts = [Markup("<b>{}:</b> {}").format(_heading(effect.contrast), _sentence(effect)) for effect in every[:MOST]]
    left_out = len(every) - len(texts)
    return [*texts, *([Markup("{} more are not shown.").format(plural(left_out, "effect"))] if left_out else [])]


def _heading(contrast: Contrast) -> str:
    return contrast.factor + (f", with {contrast.within}" if contrast.within else "")


def _sentence(effect: Effect) -> str:
    contrast = effect.contrast
    between = f"{contrast.a} less {contrast.b}"
    if not effect.differences:
        return f"{between} is not compared, because no seed is completed on both sides{_lost(effect, '')}."
    ends = f", with {plural(contrast.between, 'value')} between them," if contrast.between else ""
    mean, low, high = (number(value, "{:+.2f}") for value in (effect.mean, effect.low, effect.high))
    count = len(effect.differences)
    interval = (
        "one seed, so no interval over seeds" if count == 1 else f"95% interval {low} to {high} over {count} seeds"
    )
    pairs = plural(effect.compared, "pair") + " of settings"
    if effect.compared < len(contrast.pairs):
        pairs += f" of {len(contrast.pairs)}, as others have too few seeds that are completed on both sides"
    text = f"{between}{ends} is {mean} bits ({interval}; {pairs}{_lost(effect, ', so dropped from all pairs')})"
    if not any(map(math.isnan, effect.perplexities)):
        a, b = (number(value, "{:.3g}") for value in effect.perplexities)
        text += f", at perplexity {a} against {b}"
    if effect.alike:
        mean, low, high = (
            number(value, "{:+.2f}") for value in (effect.alike_mean, effect.alike_low, effect.alike_high)
        )
        text += f"; where both first predict equally well {mean}" + f" ({low} to {high})" * (len(effect.alike) > 1)
        if effect.unlike:
            text += f" over {plural(len(effect.alike), 'seed')} ({left_out_text(effect.unlike)})"
    elif effect.unlike:
        text += f"; not compared where both first predict equally well ({next(iter(effect.unlike.values()))})"
    if max(effect.at_ceiling) >= MANY:
        a, b = (number(share, "{:.0%}") for share in effect.at_ceiling)
        text += f"; {a} and {b} of the canaries are at the ceiling"
    return f"{text}."


def _lost(effect: Effect, outcome: str) -> str:
    """Return words on the seeds that diverged, with the outcome for them; empty where none did."""
    seeds = listed([str(seed) for seed in effect.diverged])
    return f"; seed{'s' * (len(effect.diverged) > 1)} {seeds} diverged{outcome}" if seeds else ""


def _by_seed(setting: Setting) -> dict[int, RunView]:
    """Return the completed and evaluated runs of a setting, by seed."""
    return {
        run.results.seed: run
        for run in setting.runs
        if run.results.status == "completed" and run.results.seed is not None and run.results.evaluated
        if not math.isnan(_exposure(run))
    }


def _references(runs: dict[int, RunView]) -> set[float | None]:
    """Return the numbers of references of runs; exposures among different numbers have no difference."""
    return {run.references for run in runs.values()}


def _exposure(run: RunView) -> float:
    return _last(run, PRIMARY.name)


def _last(run: RunView, metric: str) -> float:
    """Return a metric at a run's last evaluation, as `RunView.over_rounds` does; NaN if it was not measured there."""
    values = run.over_rounds(metric)
    last = run.results.evaluated[-1]
    return float(values[last]) if last in values.index else math.nan
