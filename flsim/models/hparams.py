"""Which network, and of what size."""

from dataclasses import dataclass
from typing import Literal

from flsim.base.errors import InputError, at_least_one

Architecture = Literal["cifg", "lstm", "gru", "transformer"]
NAMES: dict[Architecture, str] = {"cifg": "CIFG", "lstm": "LSTM", "gru": "GRU", "transformer": "Transformer"}


@dataclass(frozen=True)
class ModelHParams:
    """Architecture and sizes of the network; see `flsim.models.architectures`.

    Attributes:
        embedding: D, size of the input embeddings and of what words are predicted from, which are tied.
        units: H, number of cells of each layer; of a transformer, of the feed-forward's hidden units.
        architecture: "cifg" is the paper's; the others compare architectures, as The Secret Sharer does.
        layers: on top of each other; "cifg" has 1.
        heads: of a transformer's attention; they share the embedding evenly.
    """

    embedding: int = 96
    units: int = 670
    architecture: Architecture = "cifg"
    layers: int = 1
    heads: int = 4

    def __post_init__(self) -> None:
        at_least_one(embedding=self.embedding, units=self.units, layers=self.layers, heads=self.heads)
        if self.architecture not in NAMES:
            raise InputError(f"architecture must be one of {', '.join(NAMES)}, found {self.architecture!r}")
        if self.architecture == "cifg" and self.layers > 1:
            raise InputError(f'architecture "cifg" has one layer, found layers = {self.layers}; take "lstm" or "gru"')
        if self.architecture == "transformer" and self.embedding % self.heads:
            raise InputError(
                f"embedding must be a multiple of heads, found embedding = {self.embedding} and heads = {self.heads}"
            )
        if self.architecture != "transformer" and self.heads != type(self).heads:
            raise InputError(f'heads is for architecture "transformer", found "{self.architecture}"; remove it')

    @property
    def label(self) -> str:
        """In the name of a table's row; empty where it is the paper's architecture."""
        if self.architecture == "cifg":
            return ""
        return NAMES[self.architecture] + (f" {self.layers} layers" if self.layers > 1 else "")
