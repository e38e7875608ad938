"""The interface of a measure, and the description of its numbers: unit, direction, a sentence, and their places.

Tables, plots, reports, comparisons, traces and trackers read these descriptions, and contain no names of measures. A
description is plain data: that of a custom measure is stored with the rows, so that showing results does not execute
code.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from flsim.base.errors import InputError
from flsim.base.settings import settings

if TYPE_CHECKING:
    from torch import Tensor

    from flsim.canaries.spec import Canary
    from flsim.data.records import Layout, Users
    from flsim.measures.memorization.score import RandomSampler, Template
    from flsim.models.language_model import LanguageModel, TrainableModel

Subject = Literal["canary", "model"]
Kind = Literal["number", "count", "flag"]
Better = Literal["higher", "lower"]
Place = Literal["table", "plot", "report", "compare", "trace", "canaries", "screen"]
EVERYWHERE: tuple[Place, ...] = ("table", "plot", "report", "compare", "trace", "canaries")
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
FORMAT = re.compile(r"\{:[+,]{0,2}(\.\d)?[feg]\}", re.ASCII)
LONGEST = 500  # largest length of a text


@settings
class Quantity:
    """The description of one number of each canary, or of the model.

    Attributes:
        name: name of its rows, in the metric column.
        description: a sentence about its meaning.
        unit: unit such as ``"bits"``; empty for a number without one, and for flags.
        better: which values are better; None if neither are.
        subject: whether each canary has a value, or the model.
        kind: a number, a count (an integer), or a flag (1 if a canary is memorized, else 0).
        title: a noun phrase for headings of plots; default the name.
        heading: heading of a column, as short as possible; default the title.
        format: format of a value, as `str.format` takes it.
        is_percentage: whether it is a fraction that is shown times 100; only for the model.
        is_log: whether it is above 0 and drawn on a logarithmic axis.
        is_ranked: whether it comes from a rank among |R| references: two values are comparable if |R| is equal, and no
            value exceeds log2(|R| + 1).
        is_partial: whether values of canaries can be missing; it is then listed, but not counted or averaged.
        is_standard: whether every table has a column for it, measured or not.
        is_primary: whether it is the quantity of comparisons, traces and reports; one quantity is primary.
        places: the places that show it.
        beside: name of the quantity in whose columns it is shown; empty for separate columns.
        column: prefix of the columns of its intervals; default the name.
        caption: title of a panel; default by title.
        axis: label of its axis; default the unit.
        outcome: for a flag, a noun phrase for a canary with 1.
        finds: for a flag, the verb after the title, as in "Beam Search extracts".
        short: heading in the list of canaries; default the heading.
        note: sentence below a table of runs; default by the description.
        about: text below a list of canaries; default by the description.
    """

    name: str
    description: str
    unit: str = ""
    better: Better | None = None
    subject: Subject = "canary"
    kind: Kind = "number"
    title: str = ""
    heading: str = ""
    format: str = "{:.3g}"
    is_percentage: bool = False
    is_log: bool = False
    is_ranked: bool = False
    is_partial: bool = False
    is_standard: bool = False
    is_primary: bool = False
    places: tuple[Place, ...] = EVERYWHERE
    beside: str = ""
    column: str = ""
    caption: str = ""
    axis: str = ""
    outcome: str = "memorized"
    finds: str = "finds"
    short: str = ""
    note: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        title = self.title or self.name.replace("_", " ")
        defaults = {"title": title, "heading": title, "column": self.name, "axis": self.unit}
        defaults["short"] = self.heading or title
        for name, default in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or default)

    @property
    def is_flag(self) -> bool:
        return self.kind == "flag"

    @property
    def of_canaries(self) -> bool:
        return self.subject == "canary"

    @property
    def is_listed(self) -> bool:
        """Whether a list of canaries has a column for it; built-in quantities without place or text have none."""
        return bool(self.is_standard or self.places or self.about)

    @property
    def column_heading(self) -> str:
        """Return the heading of a column whose values are multiplied by `scale`."""
        return f"{self.heading} %" if self.is_percentage else self.heading

    @property
    def phrase(self) -> str:
        """Return the title with its unit."""
        unit = "%" if self.is_percentage else self.unit
        return f"{self.title}, {unit}" if unit else self.title

    @property
    def scale(self) -> int:
        """Return the factor of displayed values."""
        return 100 if self.is_percentage else 1

    def is_like(self, other: "Quantity") -> bool:
        """Return whether values of two quantities are comparable; descriptions can differ only in text."""
        return all(
            getattr(self, field) == getattr(other, field)
            for field in ("name", "subject", "kind", "unit", "better", "is_ranked", "is_log", "is_percentage")
        )

    @property
    def sentence(self) -> str:
        """Return the unit, the direction and the description."""
        details = ", ".join(filter(None, (self.unit, f"{self.better} is better" if self.better else "")))
        return f"{details}. {self.description}" if details else self.description


def interval_of(quantity: Quantity) -> tuple[Quantity, Quantity]:
    """Return the descriptions of the ends of a quantity's 95% interval, which are not shown separately."""
    low, high = (
        Quantity(
            name=f"{quantity.name}_{end}",
            description=f"The {where} end of the 95% interval of {quantity.name}.",
            unit=quantity.unit,
            format=quantity.format,
            places=(),
        )
        for end, where in (("low", "lower"), ("high", "upper"))
    )
    return low, high


def select_for(quantities: Iterable[Quantity], place: Place) -> list[Quantity]:
    """Return the quantities of a place: flags, then numbers of canaries, then numbers of the model."""
    shown = [quantity for quantity in quantities if place in quantity.places and not quantity.is_partial]
    return sorted(shown, key=lambda quantity: (not quantity.of_canaries, not quantity.is_flag))


def panels_first(quantities: Iterable[Quantity]) -> list[Quantity]:
    """Return the quantities with those of the model that have a panel in a plot before those without a panel."""
    return sorted(quantities, key=lambda quantity: not quantity.of_canaries and "plot" not in quantity.places)


def flags(quantities: Iterable[Quantity]) -> list[Quantity]:
    return [quantity for quantity in quantities if quantity.is_flag]


def numbers(quantities: Iterable[Quantity]) -> list[Quantity]:
    return [quantity for quantity in quantities if quantity.of_canaries and not quantity.is_flag]


def of_model(quantities: Iterable[Quantity]) -> list[Quantity]:
    return [quantity for quantity in quantities if not quantity.of_canaries]


def to_json(quantity: Quantity) -> dict[str, Any]:
    """Return a description in the form of JSON."""
    return asdict(quantity) | {"places": list(quantity.places)}


def from_json(values: Mapping[str, Any]) -> Quantity:
    """Return the description that `to_json` wrote; raise InputError if it fails the checks for untrusted data."""
    known = {field.name for field in fields(Quantity)}
    try:
        return refuse_unfit(Quantity(**{name: value for name, value in values.items() if name in known}))
    except (InputError, AttributeError) as error:
        raise InputError(f"not the description of a quantity: {error}") from error


def refuse_unfit(quantity: Quantity) -> Quantity:
    """Return a custom description unchanged, or raise InputError if it cannot be stored or shown."""
    name = quantity.name
    if not NAME.fullmatch(name):
        raise InputError(f"a quantity's name must be lower-case letters, digits and _, at most 40, found {name!r:.60}")
    if not set(quantity.places) <= set(EVERYWHERE):
        raise InputError(f"quantity {name}: places must be of {', '.join(EVERYWHERE)}, found {quantity.places!r:.80}")
    if not FORMAT.fullmatch(quantity.format):
        raise InputError(f"quantity {name}: format must be like {{:.2f}} or {{:.3g}}, found {quantity.format!r:.60}")
    for field, value in asdict(quantity).items():
        if isinstance(value, str) and (len(value) > LONGEST or not value.isprintable()):
            raise InputError(f"quantity {name}: {field} must be one line of at most {LONGEST} characters")
    if not quantity.description:
        raise InputError(f"quantity {name}: a description is required; describe the quantity in one sentence")
    if quantity.is_flag and not quantity.of_canaries:
        raise InputError(f"quantity {name}: a flag needs the subject canary; make it a number, or remove the subject")
    if quantity.is_percentage and quantity.of_canaries:
        raise InputError(
            f"quantity {name}: is_percentage needs a quantity of the model, not of canaries; multiply by 100, and "
            "use the unit %"
        )
    if quantity.is_standard or quantity.is_primary or quantity.beside or quantity.column != name:
        raise InputError(
            f"quantity {name}: `is_standard`, `is_primary`, `beside` and `column` are for built-in quantities only"
        )
    return quantity


# The interface of a measure: its name, its computation for a canary or for the model, and its quantities.

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
