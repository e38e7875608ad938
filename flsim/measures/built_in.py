"""The lists of built-in measures: those of every evaluation, and those that `also` requests by name."""

from flsim.measures.beam_search import BEAM_SEARCH
from flsim.measures.calibrated import CALIBRATED
from flsim.measures.contexts import CONTEXTS
from flsim.measures.extrapolation import EXTRAPOLATION
from flsim.measures.generation import GENERATION
from flsim.measures.path import PATH
from flsim.measures.quantity import Quantity
from flsim.measures.random_sampling import RANDOM_SAMPLING
from flsim.measures.space import SPACE
from flsim.measures.utility import UTILITY

ALWAYS = (RANDOM_SAMPLING, BEAM_SEARCH, UTILITY)
ALSO = {measure.name: measure for measure in (SPACE, EXTRAPOLATION, PATH, GENERATION, CONTEXTS)}
WITH_OTHER_MODELS = (CALIBRATED,)  # for evaluations that have models without the canaries
MEASURES = (*ALWAYS, *ALSO.values(), *WITH_OTHER_MODELS)
QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for measure in MEASURES for quantity in measure.quantities}
PRIMARY = next(quantity for quantity in QUANTITIES.values() if quantity.is_primary)


def described(name: str) -> Quantity | None:
    """Return the description of a built-in measure's value; None for another name."""
    return next((quantity for measure in MEASURES if (quantity := measure.quantity(name))), None)
