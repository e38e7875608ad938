"""Learning rate schedules: each is a function (step or round, total) -> factor of the learning rate.

Central steps, local training and the server's step share them. A user's own, ``path/to/file.py:NAME``, is such a
function, which may take options as further arguments. Steps and rounds count from 0, so the last one is total - 1.
"""

import math
from collections.abc import Callable

import numpy as np

from flsim.base.errors import InputError
from flsim.base.extensions import is_own, made, naming_own_code, resolve

Schedule = Callable[[int, int], float]


def constant(_at: int, _total: int) -> float:
    """Return the factor 1 at every step."""
    return 1.0


def linear(at: int, total: int) -> float:
    """Return 1 - t / T, which falls along a line and would be 0 one step after the last."""
    return 1 - at / total


def cosine(at: int, total: int) -> float:
    """Return (1 + cos(pi t / T)) / 2, half a cosine (Loshchilov and Hutter, 2017, equation 5, without restarts)."""
    return (1 + math.cos(math.pi * (at / total))) / 2


def steps(at: int, total: int, milestones: tuple[float, ...] = (), factor: float = 0.1) -> float:
    """Return `factor` to the power of the number of milestones that are behind, like torch's MultiStepLR.

    Args:
        at: the step or round, from 0.
        total: number of steps or rounds of the whole training.
        milestones: completed steps or rounds after which the factor applies; below 1, fractions of `total`.
        factor: the factor of each milestone.
    """
    return factor ** sum(at >= (round(one * total) if one < 1 else one) for one in milestones)


SAMPLES = 1_000  # rates of a schedule that their sum is estimated from
SCHEDULES: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine, "steps": steps}


def label_of_steps(milestones: tuple[float, ...], factor: float, whose: str = "rate") -> str:
    """Return the part of a run's name that tells milestones, e.g. ``"rate x0.1 at 60%"``; empty without any."""
    times = ", ".join(f"{100 * one:g}%" if one < 1 else f"{one:g}" for one in milestones)
    return f"{whose} x{factor:g} at {times}" if milestones else ""


def refuse_wrong_milestones(schedule: str, milestones: tuple[float, ...], factor: float, prefix: str = "") -> None:
    """Raise InputError where milestones or their factor are wrong, or are set with another schedule than "steps".

    Args:
        schedule: name of the schedule.
        milestones: the setting ``milestones``.
        factor: the setting ``milestone_factor``.
        prefix: beginning of the settings' names, e.g. ``"server_"``.
    """
    if (schedule == "steps") != bool(milestones):
        what = "needs" if schedule == "steps" else "has no"
        raise InputError(f'{prefix}schedule "{schedule}" {what} {prefix}milestones, found {list(milestones)}')
    for one in milestones:
        if not (0 < one < 1 or (one >= 1 and float(one).is_integer())):
            raise InputError(
                f"{prefix}milestones must be fractions of training below 1, or whole numbers from 1, found {one:g}"
            )
    if not 0 < factor < math.inf:
        raise InputError(f"{prefix}milestone_factor must be above 0, found {factor:g}")


def rate_at(
    rate: float,
    schedule: str,
    at: int,
    total: int,
    warmup: int = 0,
    milestones: tuple[float, ...] = (),
    factor: float = 0.1,
) -> float:
    """Return the learning rate of a step or round.

    Args:
        rate: the highest learning rate, which the schedule's factor multiplies.
        schedule: a key of `SCHEDULES`, or a user's own.
        at: the step or round, from 0.
        total: number of steps or rounds of the whole training.
        warmup: number of first steps in which the rate rises along a line; the schedule covers the other steps.
        milestones: of schedule "steps", when the rate changes; counted from the beginning, also with a warmup.
        factor: of schedule "steps", what each milestone multiplies the rate by.

    Raises:
        InputError: a user's own schedule failed, or returned a factor that is negative or not finite.
    """
    if at < warmup:
        return rate * (at + 1) / warmup
    if schedule == "steps":
        return rate * steps(at, total, milestones, factor)
    with naming_own_code(InputError):
        factor = made(schedule, resolve(schedule, SCHEDULES, "schedule"), at - warmup, max(total - warmup, 1))
    if is_own(schedule) and not (isinstance(factor, int | float) and 0 <= factor < math.inf):
        raise InputError(
            f"{schedule}: gave the factor {factor!r} at {at:,} of {total:,}; return a finite number of at least 0"
        )
    return rate * factor


def total_rate(rate: Callable[[int], float], steps: int) -> float:
    """Return the sum of the rates of steps 0 to `steps` - 1; of many steps it is estimated from evenly spaced ones."""
    sampled = range(steps) if steps <= SAMPLES else np.linspace(0, steps - 1, SAMPLES).astype(int).tolist()
    return steps * float(np.mean([rate(step) for step in sampled]))
