"""A measure: a name, what it computes of a canary or of the model, and what its numbers are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flsim.measures.quantity import Quantity, Subject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flsim.canaries.spec import Canary
    from flsim.data.records import Users
    from flsim.data.vocabulary import Layout
    from flsim.measures.prediction import Predict
    from flsim.memorization.random_sampling import RandomSampler
    from flsim.memorization.template import Template
    from flsim.models.language_model import LanguageModel


@dataclass(frozen=True)
class Probe:
    """A canary before a model: what a measure of canaries computes from.

    Attributes:
        model: the model.
        canary: the canary; its id keys what is drawn for it.
        prefix: int64 [L], BOS and the words that are known.
        continuation: int64 [n], the words that are not.
        references: R, int64 [|R|, n].
        sampler: ranks among R; canaries of one length share it.
        layout: which token ids are words.
        beam_width: of a beam search.
        decide: whether to say only if the canary is memorized, where its rank costs more.
        samples: number of samples of the space, and of the model.
        nodes: limit of exact searches: how many beginnings of sequences they read.
        seed: the experiment's.
        without: models that never saw the canary.
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
        """The space of the continuation: any words, as many as it has."""
        from flsim.memorization.template import Template

        return Template.words(self.layout, len(self.continuation))

    @cached_property
    def score(self) -> float:
        """Log-perplexity of the continuation after the prefix, nats."""
        from flsim.memorization.score import log_perplexity

        return float(log_perplexity(self.model, self.prefix, self.continuation[None]))


@dataclass(frozen=True)
class ModelProbe:
    """A model before text that it was not trained on: what a measure of the model computes from.

    Attributes:
        model: the model.
        predict: what it predicts of batches of records, see `flsim.measures.prediction.Predict`.
        test: users whose text holds no canary.
        chosen: indices of those among them to measure on, ascending.
        device: where the model reads tokens.
        seed: the experiment's.
    """

    model: "LanguageModel"
    predict: "Predict"
    test: "Users"
    chosen: Sequence[int]
    device: "torch.device"
    seed: int


@dataclass(frozen=True, eq=False)
class Measure:
    """What an evaluation computes.

    Attributes:
        name: by which a built-in one is asked for, and a user's own is known to readers of its file.
        compute: takes a `Probe`, or a `ModelProbe` where its quantities are of the model; returns the value of each
            quantity by name, or the number itself where there is one quantity. A value may be left out where its
            quantity is partial.
        quantities: what its numbers are.
        description: a phrase that says what is measured, for the help of the command line.
        family: describes values whose names depend on the canaries, by name.
    """

    name: str
    compute: Callable[[Any], Mapping[str, float] | float]
    quantities: tuple[Quantity, ...] = ()
    description: str = ""
    family: Callable[[str], Quantity | None] | None = None

    @property
    def subject(self) -> Subject:
        """Whether it measures canaries or the model."""
        return self.quantities[0].subject if self.quantities else "canary"

    def quantity(self, name: str) -> Quantity | None:
        """The description of a value; None where it has none."""
        known = next((quantity for quantity in self.quantities if quantity.name == name), None)
        return self.family(name) if known is None and self.family else known
