"""A table of epsilon under all conventions."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import cache
from textwrap import fill
from typing import Any

import scipy

from flsim.base.errors import InputError
from flsim.base.progress import tracked
from flsim.privacy.accounting import check_delta
from flsim.privacy.conventions import PAPER, Convention, conventions_of, of_users
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.sampling import Relation

# The search for the noise that keeps a planned run within an epsilon.

TOLERANCE = 1e-3  # largest relative excess of the result over the smallest sufficient noise multiplier
LEAST_EPSILON, MOST_EPSILON = 1e-6, 1e6  # smallest and largest target
RANGE = 2.0**20  # the search for a noise multiplier is limited to this value and its inverse


def check_target(target: float) -> None:
    """Raise InputError unless the target epsilon is in the range of the accountants."""
    if not LEAST_EPSILON <= target <= MOST_EPSILON:
        raise InputError(f"epsilon must be from {LEAST_EPSILON:g} to {MOST_EPSILON:g}, found {target:g}")


def calibrate(planned: Entry, target: float, delta: float, convention: Convention, guess: float = 1.0) -> float:
    """Return a noise multiplier whose epsilon is at most `target`, at most 0.1% above the smallest such multiplier."""
    check_target(target)

    @cache
    def excess(log_noise: float) -> float:
        """Return log epsilon - log target, which is nearly linear in the logarithm of the noise multiplier."""
        noisy = replace(planned, noise_multiplier=math.exp(log_noise))
        spent = epsilon(Ledger((noisy,)), delta, convention)
        return math.log(max(spent, math.ulp(0.0))) - math.log(target)

    low, high = _bracket(excess, math.log(guess), f"{convention}: no noise multiplier gives epsilon {target:g}")
    log_noise = scipy.optimize.brentq(excess, low, high, xtol=TOLERANCE / 8) + TOLERANCE / 4
    while excess(log_noise) > 0:  # brentq can end above 0 if epsilon does not decrease smoothly
        log_noise += TOLERANCE / 4
    return math.exp(log_noise)


def _bracket(excess: Callable[[float], float], start: float, failure: str) -> tuple[float, float]:
    """Return (low, high) with excess(low) >= 0 >= excess(high); steps grow, and halve before a refused value."""
    step = math.copysign(math.log(1.2), excess(start))
    at = start
    while True:
        try:
            if excess(at + step) * step <= 0:
                return min(at, at + step), max(at, at + step)
        except InputError:
            if abs(step) < TOLERANCE:
                raise
            step /= 2
            continue
        at += step
        step *= 2
        if abs(at) > math.log(RANGE):
            raise InputError(f"{failure} at this delta (tried up to {math.exp(at):.1g}); raise epsilon or delta")


SOUND: dict[Relation, str] = {
    "replace-one": "2S (S: the clip norm) under replace-one, because exchanging a user moves the sum by up to 2S",
    "add-or-remove-one": "S under add-or-remove-one, with Poisson sampling",
    "zero-out": "S under zero-out, which compares with a run in which a user sends zeros",
}
NO_NOISE = "without noise epsilon is infinite"
TINY_NOISE = "epsilon is above 1e308 (shown as inf); raise the noise multiplier"
OF_USERS = """\
The row with {}: DP-SGD over records, and the epsilon of a user of at most {:,}
records, each of which is sampled independently (mixture of Gaussians).
"""
STAR = "* the paper's own (Thakkar et al., 2020), which takes S under replace-one.\n"


@dataclass(frozen=True)
class EpsilonLine:
    """The result under one convention: the epsilon so far, or the target with its noise multiplier.

    The note is the reason why an epsilon is infinite, or a value None because it cannot be computed.
    """

    convention: Convention
    epsilon: float | None
    noise_multiplier: float | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; null, with a note, for values that JSON cannot represent."""
        convention = self.convention
        names = ("sampler", "relation", "accountant", "conversion")
        values = {name: getattr(convention, name) for name in names} | {"sensitivity": convention.distance}
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        values |= {"epsilon": self.epsilon if finite else None, "convention": convention.name}
        if convention.records is not None:
            values |= {"records": convention.records, "unit": "user"}
        if self.noise_multiplier is not None:
            values["noise_multiplier"] = self.noise_multiplier
        return values | ({"note": self.note} if self.note else {})


def report(ledger: Ledger, delta: float, records: int | None = None) -> list[EpsilonLine]:
    """Return the epsilon so far by every convention for the sampler, and of users of so many records for DP-SGD."""
    check_delta(delta)
    if not ledger.entries:
        raise InputError("no round is completed, so there is no epsilon to report; train at least one round")
    has_noise = all(entry.noise_multiplier for entry in ledger.entries)
    lines, of_infinite = [], TINY_NOISE if has_noise else NO_NOISE
    for convention in tracked("accounting", _about(ledger, records)):
        try:
            spent = epsilon(ledger, delta, convention)
        except InputError as error:
            lines.append(EpsilonLine(convention, None, note=str(error)))
        else:
            lines.append(EpsilonLine(convention, spent, note=of_infinite if spent == math.inf else None))
    return lines


def calibrated(planned: Entry, target: float, delta: float, records: int | None = None) -> list[EpsilonLine]:
    """Return the noise multipliers that keep planned rounds within a target epsilon, by the conventions of `report`."""
    check_delta(delta)
    check_target(target)
    lines, guess = [], 1.0
    for convention in tracked("calibrating noise", _about(Ledger((planned,)), records)):
        try:
            if convention.records:  # RDP has no limit, and its noise multiplier is near that of losses
                of_rdp = replace(convention, accountant="rdp", conversion="tight")
                guess = calibrate(planned, target, delta, of_rdp, guess)
            guess = calibrate(planned, target, delta, convention, guess)
            lines.append(EpsilonLine(convention, target, guess))
        except InputError as error:
            lines.append(EpsilonLine(convention, target, note=str(error)))
    return lines


def _about(ledger: Ledger, records: int | None) -> list[Convention]:
    samplers = dict.fromkeys(entry.sampler for entry in ledger.entries)
    conventions = [convention for sampler in samplers for convention in conventions_of(sampler)]
    return conventions if records is None else [*conventions, of_users(records)]


def to_text(lines: list[EpsilonLine], calibration: bool = False) -> str:
    """Return a table within 80 columns, with notes on soundness and on missing values."""
    if lines and all(line.note == NO_NOISE for line in lines):
        return f"{NO_NOISE}, under every convention\n"
    result = "noise" if calibration else "epsilon"
    table = [("sampler", "relation", "sens.", "accountant", "conversion", result)]
    for line in lines:
        one, star = line.convention, "*" * (line.convention == PAPER)
        names = one.sampler, one.relation, one.distance, one.accountant, one.conversion or "-"
        table.append((*names, _number(line, calibration) + star))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in table)
    starred = STAR if any(line.convention == PAPER for line in lines) else ""
    users = "".join(OF_USERS.format(one.distance, one.records) for line in lines if (one := line.convention).records)
    text += starred + users + soundness({line.convention.relation for line in lines}) + _to_cite(lines, calibration)
    notes = [f"{'-: ' * (_number(line, calibration) == '-')}{line.note}" for line in lines if line.note]
    return text + "".join(f"{fill(note, 80, subsequent_indent='  ')}\n" for note in dict.fromkeys(notes))


def soundness(relations: Collection[Relation] = SOUND.keys()) -> str:
    """Return a sentence on the sensitivity that covers each relation."""
    sound = "; ".join(sentence for relation, sentence in SOUND.items() if relation in relations)
    return fill(f"Sound: sensitivity {sound}.", 80) + "\n"


def _to_cite(lines: list[EpsilonLine], calibration: bool) -> str:
    """Return the rows to cite: for each sampler the first sound convention, which runs also report."""
    cited = dict[object, str]()
    for line in lines:
        convention, value = line.convention, _number(line, calibration)
        if convention.is_sound and (key := (convention.sampler, convention.records)) not in cited:
            unit = f"users of {convention.records:,} records" if convention.records else None
            names = (unit, convention.sampler, convention.relation, convention.accountant, convention.conversion)
            cited[key] = "" if value == "-" else f"{', '.join(filter(None, names))}: {value}"
    texts = list(filter(None, cited.values()))
    return fill(f"Cite: {'; '.join(texts)}.", 80, subsequent_indent="  ") + "\n" if texts else ""


def _number(line: EpsilonLine, calibration: bool) -> str:
    """Return the epsilon, or a noise multiplier to copy: four digits, rounded up, so that its epsilon is reached."""
    value = line.noise_multiplier if calibration else line.epsilon
    if value is None:
        return "-"
    if calibration:
        return f"{Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value):f}"
    if value >= 1e5:
        return f"{value:.0e}" if math.isfinite(value) else "inf"
    return f"{value:.0f}" if value >= 1e3 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"
