"""The settings of the network: architecture and sizes."""

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
        embedding: D, size of the input embeddings and of the outputs that words are predicted from, which are tied.
        units: H, number of cells of each layer; for a transformer, number of hidden units of the feed-forward part.
        architecture: "cifg" is the paper's; "lstm", "gru" and "transformer" compare architectures, as The Secret Sharer
            does; "path/to/file.py:NAME" is a user's own `flsim.models.language_model.TrainableModel`.
        layers: number of stacked layers; "cifg" has 1.
        heads: number of heads of a transformer's attention, which share the embedding evenly.
        options: numbers by name, for a user's own architecture.

    Examples:
        >>> flsim.Model(embedding=32, units=64)                                # doctest: +SKIP
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
        """Return the architecture's name in a table's row; empty for the paper's."""
        if is_own(self.architecture):  # no code is executed to name a row
            return parts(self.architecture)[1]
        return BUILT_IN[self.architecture].label_of(self)
