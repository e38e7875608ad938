"""The written-out gradients by architecture."""

from flsim.models.language_model import Params
from flsim.training.cohort.cifg_gradient import PackedCIFG
from flsim.training.cohort.gradient import PackedModel
from flsim.training.cohort.products import Products
from flsim.training.cohort.recurrent_gradient import GRUCell, LSTMCell, PackedRecurrent


def packed_model(like: Params, products: Products | None = None) -> PackedModel:
    """Return the written-out gradient of a built-in model that declares one.

    Args:
        like: parameters of the model, whose names and shapes tell its architecture; on a CPU.
        products: see `PackedModel`.
    """
    recurrent = like.get("cells.weight_hh_l0")
    if recurrent is None:
        return PackedCIFG(like, products)
    has_memory = recurrent.shape[0] == 4 * recurrent.shape[1]  # the gates of an LSTM; a GRU has three
    return PackedRecurrent(like, LSTMCell if has_memory else GRUCell, products)
