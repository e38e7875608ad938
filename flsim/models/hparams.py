"""The settings of the network: architecture and sizes."""

from typing import Annotated

from flsim.base.extensions import CustomName, declared_label, is_custom, refuse_options
from flsim.base.settings import settings
from flsim.models.architectures import BUILT_IN
from flsim.models.language_model import ModelSettings


@settings
class ModelHParams(ModelSettings):
    """Architecture and sizes of the network; see `flsim.models.architectures`.

    Attributes:
        embedding: Size D of the word embeddings, which the output layer shares. Unit: values.
        units: Number H of cells in each layer; of a transformer, of hidden units in each feed-forward part; of a
            convolutional network, of filters. Unit: cells.
        architecture: Network: the paper's "cifg", another built-in network, or a custom subclass of
            `flsim.models.language_model.TrainableModel`.
        layers: Number of layers; "cifg" has 1. Unit: layers.
        heads: Number of attention heads of a transformer, which divides `embedding`. Unit: heads.
        filter_width: Number of tokens that a filter of a convolutional network reads, e.g. 5. Unit: tokens.
        options: Numbers or text for a custom architecture, e.g. { scale = 2.5 }. Unit: none.

    Examples:
        >>> flsim.Model(embedding=32, units=64)                                # doctest: +SKIP
    """

    architecture: Annotated[str, CustomName("architecture", BUILT_IN)] = "cifg"

    def __post_init__(self) -> None:
        if not is_custom(self.architecture):
            BUILT_IN[self.architecture].refuse_settings(self)
        refuse_options(self.architecture, self.options, "options")

    @property
    def label(self) -> str:
        """Return the architecture's name in a table's row; empty for the paper's."""
        if is_custom(self.architecture):  # no code is executed to name a row
            return declared_label(self.architecture)
        return BUILT_IN[self.architecture].label_of(self)
