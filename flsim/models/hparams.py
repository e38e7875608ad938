"""Which network, and of what size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from flsim.base.errors import InputError, at_least_one
from flsim.base.extensions import Own, is_own, parts, refuse_unknown
from flsim.models.architectures import BUILT_IN
from flsim.models.language_model import ModelSettings


@dataclass(frozen=True)
class ModelHParams(ModelSettings):
    """Architecture and sizes of the network; see `flsim.models.architectures`.

    Attributes:
        embedding: D, size of the input embeddings and of what words are predicted from, which are tied.
        units: H, number of cells of each layer; of a transformer, of the feed-forward's hidden units.
        architecture: "cifg" is the paper's; "lstm", "gru" and "transformer" compare architectures, as The Secret Sharer
            does; "path/to/file.py:NAME" is a `flsim.models.language_model.TrainableModel` of your own.
        layers: on top of each other; "cifg" has 1.
        heads: of a transformer's attention; they share the embedding evenly.
        options: numbers by name, for an architecture of your own.
    """

    architecture: Annotated[str, Own("architecture")] = "cifg"
    options: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least_one(embedding=self.embedding, units=self.units, layers=self.layers, heads=self.heads)
        refuse_unknown(self.architecture, BUILT_IN, "architecture")
        if not is_own(self.architecture):
            BUILT_IN[self.architecture].refuse_settings(self)
        for name, value in self.options.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"options.{name} must be a finite number, found {value!r}")

    @property
    def label(self) -> str:
        """The architecture's name in a table's row; empty where it is the paper's."""
        if is_own(self.architecture):  # no code is executed to name a row
            return parts(self.architecture)[1]
        return BUILT_IN[self.architecture].label_of(self)
