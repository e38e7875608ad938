"""An attack of a user's own, made safe: its errors name its file, and it leaves the models as they were."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import calling_own, short_name
from flsim.membership.attack import Attack, Floats, Learned
from flsim.models.unchanged import refusing_changes

if TYPE_CHECKING:
    from flsim.membership.candidates import Candidates


def own_attack(name: str, attack: object) -> Attack:
    """Return the attack at ``path/to/file.py:NAME``, whose calls raise RunFailed with its file in any failure.

    Args:
        name: the name of the user's object.
        attack: the object, an `Attack` or a function of `Candidates`.

    Raises:
        InputError: the object is neither, such as a class.
    """
    if not isinstance(attack, Attack):
        if isinstance(attack, type) or not callable(attack):
            kind = "class" if isinstance(attack, type) else type(attack).__name__
            raise InputError(f"{name}: is a {kind}; make it a flsim.membership.Attack or a function of candidates")
        attack = Attack(short_name(name), attack)
    score, fit = attack.score, attack.fit
    if isinstance(score, type) or not callable(score):
        raise InputError(f"{name}: its `score` is {score!r:.60}; make it a function")
    if fit is None:
        return replace(attack, score=_guarded_score(name, score))
    if isinstance(fit, type) or not callable(fit):
        raise InputError(f"{name}: its `fit` is {fit!r:.60}; make it a function, or leave it out")

    def statistics(candidates: "Candidates") -> Floats:
        return _checked(name, _guarded_score(name, score)(candidates), len(candidates))

    return replace(attack, score=statistics, fit=_guarded_fit(name, fit))


def _guarded_score(name: str, score: Callable[["Candidates"], Any]) -> Callable[["Candidates"], Any]:
    def guarded(candidates: "Candidates") -> Any:
        models = [candidates.model, candidates.reference]
        with refusing_changes(name, models), calling_own(name, "score(candidates)"):
            return score(candidates)

    return guarded


def _checked(name: str, values: Any, count: int) -> Floats:
    """Return statistics as float64 [count, F]; raise RunFailed where they are something else."""
    with suppress(TypeError, ValueError):
        statistics = np.asarray(values, np.float64)
        if statistics.ndim == 2 and len(statistics) == count:
            return statistics
    raise RunFailed(f"{name}: score returned no row of numbers for each of {count} records; fit needs float64 [N, F]")


def _guarded_fit(name: str, fit: Callable[..., Learned]) -> Callable[..., Learned]:
    def guarded(statistics: Floats, is_member: Any) -> Learned:
        with calling_own(name, "fit(statistics, is_member), which returns a function of statistics"):
            learned = fit(statistics, is_member)
            if not callable(learned):
                raise TypeError(f"fit returned a {type(learned).__name__}")

        def scores(values: Floats) -> Floats:
            with calling_own(name, "a function of statistics [n, F] as what fit returns"):
                return learned(values)

        return scores

    return guarded
