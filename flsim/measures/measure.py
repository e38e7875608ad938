"""The interface of a measure: its name, its computation for a canary or for the model, and its quantities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flsim.measures.quantity import Quantity, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from flsim.canaries.spec import Canary
    from flsim.data.records import Users
    from flsim.data.vocabulary import Layout
    from flsim.measures.memorization.random_sampling import RandomSampler
    from flsim.measures.memorization.score import Template
    from flsim.models.language_model import LanguageModel, TrainableModel


Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Probe:
    """A canary with a model: the input of a measure of canaries.

    Attributes:
        model: the model.
        canary: the canary; its id keys the random streams of the measure.
        prefix: int64 [L], BOS and the known words.
        continuation: int64 [n], the other words.
        references: R, int64 [|R|, n].
        sampler: the sampler that ranks among R; canaries of one length share it.
        layout: the token layout, which determines which ids are words.
        beam_width: width of a beam search.
        decide: whether to compute only whether the canary is memorized, if its rank is more expensive.
        samples: number of samples of the space, and of the model.
        nodes: limit of exact searches: largest number of beginnings of sequences to read.
        seed: the experiment's seed.
        without: models that were not trained on the canary.
    """

    model: "LanguageModel"
    canary: "Canary"
    prefix: "Tensor"
    continuation: "Tensor"
    references: "Tensor"
    sampler: "RandomSampler"
    layout: "Layout"
    beam_width: int
    decide: bool
    samples: int
    nodes: int
    seed: int
    without: "Sequence[LanguageModel]" = ()

    @property
    def template(self) -> "Template":
        """Return the space of the continuation."""
        return continuations(self.canary, len(self.prefix) - 1, self.layout)

    @cached_property
    def score(self) -> float:
        """Return the log-perplexity of the continuation after the prefix, nats."""
        from flsim.measures.memorization.score import log_perplexity

        return float(log_perplexity(self.model, self.prefix, self.continuation[None]))


def continuations(canary: "Canary", known: int, layout: "Layout") -> "Template":
    """Return the space after a canary's first words: the rest of its template (all digits), or words or pieces."""
    from flsim.measures.memorization.score import Template

    if canary.template is not None:
        return Template(tuple(tuple(sorted(ids)) for ids in canary.template.allowed[known:]))
    of_words = max(canary.tokens) <= layout.last_word or not layout.pieces
    return (Template.words if of_words else Template.text)(layout, len(canary.tokens) - known)


@dataclass(frozen=True)
class ModelProbe:
    """A model with text that it was not trained on: the input of a measure of the model.

    Attributes:
        model: the model, which `flsim.models.language_model.predictions` applies to batches of records.
        test: users whose text has no canary.
        chosen: indices of the test users to measure on, ascending.
        seed: the experiment's seed.
    """

    model: "TrainableModel"
    test: "Users"
    chosen: Sequence[int]
    seed: int


@dataclass(frozen=True, eq=False)
class Measure:
    """A measure that an evaluation computes.

    Attributes:
        name: the name by which a built-in measure is requested, or the name of a custom measure in its file.
        compute: function of a `Probe`, or of a `ModelProbe` if its quantities are of the model. It returns the value of
            each quantity by name, or the number itself if there is one quantity. Values of partial quantities can be
            omitted. Built-in measures can return values in the order of quantities, with None for a missing value.
        quantities: descriptions of its numbers.
        description: a phrase about the measure, for the help of the command line.
        family: function that describes values whose names depend on the canaries, by name.
        takes_any_secret: whether it measures secrets whose digits depend on each other, as a check digit does.
    """

    name: str
    compute: Callable[[Any], Mapping[str, float] | Values | float]
    quantities: tuple[Quantity, ...] = ()
    description: str = ""
    family: Callable[[str], Quantity | None] | None = None
    takes_any_secret: bool = True

    @property
    def subject(self) -> Subject:
        """Return whether the measure is of canaries or of the model."""
        return self.quantities[0].subject if self.quantities else "canary"

    def quantity(self, name: str) -> Quantity | None:
        """Return the description of a value; None if it has none."""
        known = next((quantity for quantity in self.quantities if quantity.name == name), None)
        return self.family(name) if known is None and self.family else known
