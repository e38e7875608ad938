"""The choice of an evaluation's measures: those of every evaluation, and those that `also` names, a user's own too."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real

from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import custom_code_errors, is_custom, resolve
from flsim.measures.built_in import ALSO, QUANTITIES
from flsim.measures.measure import Measure, ModelProbe, Probe
from flsim.measures.quantity import Quantity, refuse_unfit
from flsim.models.language_model import refusing_changes
from flsim.results.columns import names_of
from flsim.results.frames import TAKEN


def measures(also: Iterable[str]) -> dict[str, Measure]:
    """Return measures by the names that `also` lists, executing the files of a user's own.

    Raises:
        InputError: a name is unknown, a file fails, or it has no fit `Measure`.
    """
    taken = dict.fromkeys(TAKEN, "a table of results")
    taken |= {column: "flsim" for quantity in QUANTITIES.values() for column in names_of(quantity)}
    resolved = {}
    for name in also:
        resolved[name] = measure = resolve(name, ALSO, "measure")
        if is_custom(name):
            for quantity in _fit(measure, name).quantities:
                for column in names_of(quantity):
                    if column in taken:
                        raise InputError(
                            f"{name}: {taken[column]} has {column} already; rename the quantity {quantity.name}"
                        )
                taken |= dict.fromkeys(names_of(quantity), name)
    return resolved


def own_quantities(also: Iterable[str]) -> list[Quantity]:
    """Return the quantities of a user's own measures among these names."""
    chosen = measures(also)
    return [quantity for name, measure in chosen.items() if is_custom(name) for quantity in measure.quantities]


def refuse_own_of_model(also: Iterable[str]) -> None:
    """Raise InputError where a user's own measure is of the model, which is measured only with test users."""
    for name, measure in measures(also).items():
        if measure.subject == "model":
            raise InputError(f"{name}: measures the model, which takes test users; name a --corpus that has some")


def values_of(name: str, measure: Measure, probe: Probe | ModelProbe) -> dict[str, float]:
    """Compute a measure's values by the names of its quantities.

    Raises:
        RunFailed: a user's own measure failed, and the message names its file and line; or it changed the model or the
            words that it read, or computed something else than finite numbers of its quantities.
        Diverged: a built-in measure met a value that is not finite.
    """
    if not is_custom(name):
        return dict(measure.compute(probe))  # type: ignore[arg-type]
    models, words = [probe.model], {}
    if isinstance(probe, Probe):
        models += probe.without
        words = {"prefix": probe.prefix, "continuation": probe.continuation, "references": probe.references}
    with refusing_changes(name, models, words), custom_code_errors():
        computed = measure.compute(probe)
    values = computed if isinstance(computed, Mapping) else {measure.quantities[0].name: computed}
    where = f"canary {probe.canary.id}" if isinstance(probe, Probe) else "the model"
    numbers = {str(key): _number(name, measure.quantity(key), key, value, where) for key, value in values.items()}
    missing = [
        quantity.name for quantity in measure.quantities if quantity.name not in numbers and not quantity.is_partial
    ]
    if missing:
        raise RunFailed(f"{name}: computed no {missing[0]} of {where}; compute it, or describe it as is_partial")
    return numbers


def _number(name: str, quantity: Quantity | None, key: object, value: object, where: str) -> float:
    """Return a value that a quantity can have; raise RunFailed for any other."""
    if quantity is None:
        raise RunFailed(f"{name}: computed {key!r:.60} of {where}, which none of its quantities is; list it there")
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")  # a tensor's or an array's number
    number = value.item() if is_scalar else value  # type: ignore[attr-defined]
    problem = ""
    if not isinstance(number, Real):
        problem = "not a number; return a number, or leave the value out"
    elif not math.isfinite(number):
        problem = "not finite; return a finite number, or leave the value out"
    elif quantity.is_flag and number not in (0, 1):
        problem = "not a flag; return 1 where the canary is memorized, else 0"
    elif quantity.kind == "count" and number % 1:
        problem = "not a count; return a whole number"
    elif quantity.is_log and number <= 0:
        problem = "not above 0, as a logarithmic axis needs it"
    if problem:
        raise RunFailed(f"{name}: {quantity.name} of {where} is {number!r:.60}, which is {problem}")
    return float(number)  # type: ignore[arg-type]


def _fit(measure: object, name: str) -> Measure:
    """Return a user's own measure; raise InputError where it is none, or its quantities cannot be stored or shown."""
    if not isinstance(measure, Measure):
        raise InputError(f"{name}: is a {type(measure).__name__}, not a flsim.measures.Measure; make it one")
    if not callable(measure.compute) or not isinstance(measure.quantities, tuple) or not measure.quantities:
        raise InputError(f"{name}: a Measure needs a function `compute` and a tuple of at least one Quantity")
    if measure.family is not None:
        raise InputError(f"{name}: `family` is of built-in measures alone; list the quantities")
    for quantity in measure.quantities:
        if not isinstance(quantity, Quantity):
            raise InputError(f"{name}: quantities must be flsim.measures.Quantity, found a {type(quantity).__name__}")
        try:
            refuse_unfit(quantity)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    if len({quantity.subject for quantity in measure.quantities}) > 1:
        raise InputError(f"{name}: quantities of canaries and of the model are two measures; split it")
    return measure
