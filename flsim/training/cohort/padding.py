"""Parameters with more units than the model has; the added units are 0, get gradients of 0, and so stay 0.

With a unit's weights 0 its c is 0, and so is o tanh c. With its row of the projection 0 its gates' gradients are 0.
"""

from torch import Tensor
from torch.nn.functional import pad

from flsim.models.language_model import Params

GATES = ("input_weight", "recurrent_weight", "gate_bias")


def units_of(params: Params) -> int:
    return params["projection"].shape[-2]


def width_of(params: Params) -> int:
    return params["projection"].shape[-1]


def widened(params: Params, units: int) -> Params:
    """Return the same model with this many units, no fewer than it has."""
    own = units_of(params)

    def widen(name: str, value: Tensor) -> Tensor:
        if name in GATES:
            return pad(value.reshape(*value.shape[:-1], 3, own), (0, units - own)).flatten(-2)
        return pad(value, (0, 0, 0, units - own)) if name == "projection" else value

    return params if units == own else {name: widen(name, value) for name, value in params.items()}


def narrowed(params: Params, like: Params) -> Params:
    """Return the parameters in the shapes of `like`, without the units that `widened` added."""
    units, own = units_of(params), units_of(like)

    def narrow(name: str, value: Tensor) -> Tensor:
        if name in GATES:
            return value.reshape(*value.shape[:-1], 3, units)[..., :own].flatten(-2)
        return value[:own] if name == "projection" else value

    return {name: narrow(name, value) for name, value in params.items()}
