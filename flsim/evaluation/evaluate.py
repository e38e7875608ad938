"""The evaluation of one model: the attacks on every canary, and the utility of the model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flsim.base.errors import Diverged, InputError, RunFailed
from flsim.base.extensions import CustomName, custom_code_errors, is_custom, resolve
from flsim.base.machine import refuse_beyond_memory
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import Count, Whole, bounds, settings
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import Canary
from flsim.data.corpus import Split
from flsim.data.manifest import WHOLE
from flsim.data.records import Users
from flsim.data.vocabulary import Layout
from flsim.measures.built_in import ALSO, ALWAYS, QUANTITIES, WITH_OTHER_MODELS
from flsim.measures.measure import Measure, ModelProbe, Probe, continuations
from flsim.measures.memorization.importance_sampling import refuse_too_many_samples
from flsim.measures.memorization.random_sampling import RandomSampler, references, refuse_too_many
from flsim.measures.memorization.search import beam_search
from flsim.measures.quantity import Quantity, Subject, refuse_unfit
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import LanguageModel, TrainableModel, refusing_changes
from flsim.models.quantization import FEWEST, MOST, quantized
from flsim.results.columns import names_of
from flsim.results.frames import TAKEN
from flsim.results.rows import REFERENCES, WHOLE_TEST_USERS, Row


@settings
class EvaluationHParams:
    """Settings of an evaluation; the defaults are the paper's (section 4.1, "Evaluation Methods").

    Attributes:
        references: Number |R| of references, which are random continuations for the rank of each canary. More
            references give larger possible exposures, and take more time. Unit: references.
        beam_width: Number of phrases that Beam Search keeps at each step. More phrases find more canaries, and take
            more time. Unit: phrases.
        prefix: Number of a canary's first words that the attacker knows; for canaries.template, it is the text before
            the first hole, and this number has no effect. Unit: words.
        test_users: Number of test users that utility is measured on, drawn once from the seed. If the corpus has
            complete test authors, each of these authors is one user. When not set, or if the corpus has fewer: all.
            Unit: users.
        decide: Measure only whether each canary is memorized, at a fraction of the cost of its rank. Exposure is then
            not available.
        also: Further measures; see docs/measures.md.
        samples: Number of sequences that the measures "space" and "generation" draw. Unit: sequences.
        nodes: Largest number of prefixes that the searches of the measures "space" and "path" read. Unit: prefixes.
        weight_bits: Number of bits to which weights are rounded before measuring. When not set: weights are not
            rounded. Unit: bits.
        utility_only: Measure only the utility of the model, and no canaries.
    """

    references: Count = 2_000_000
    beam_width: Count = 5
    prefix: Count = 1
    test_users: Count | None = None
    decide: bool = False
    also: tuple[Annotated[str, CustomName("measure", ALSO)], ...] = ()
    samples: Count = 5_000
    nodes: Count = 20_000
    weight_bits: Annotated[Whole, bounds(ge=FEWEST, le=MOST)] | None = None
    utility_only: bool = False

    def refuse_too_large(self, length: int, continuations: int) -> None:
        """Raise InputError if references or beams exceed the memory of this machine."""
        refuse_too_many(self.references, length)
        width = min(self.beam_width, continuations)
        # The last step holds phrases without and with their last word, and a score and three indices of each.
        needed = 8 * width * (length - 1 + length + 4)
        refuse_beyond_memory(needed, f"evaluation.beam_width = {self.beam_width:,}", "set a smaller beam_width")
        if self.also:  # some measures draw sequences
            refuse_too_many_samples(self.samples, length)


def evaluate(
    model: TrainableModel,
    canaries: Sequence[Canary],
    test: Users,
    hparams: EvaluationHParams,
    seed: int,
    run: str,
    round: int,
    without: Sequence[LanguageModel] = (),
) -> list[Row]:
    """Return all measurements of one model, as a function of the arguments only, for any order of canaries.

    R is one draw from the seed for all canaries, rounds and runs, so their exposures are paired. Rows of canaries are
    in the order of their ids, before those of the model. Raises Diverged if a parameter or a score is not finite, and
    InputError if a canary is not longer than the prefix, or the vocabularies of model and test users differ.
    """
    if model.vocabulary_size != test.layout.vocabulary_size:
        raise InputError(
            f"the vocabulary of the model has {model.vocabulary_size:,} tokens, but the test users' corpus has "
            f"{test.layout.vocabulary_size:,}; evaluate it on the corpus that it was trained on"
        )
    if not len(test):
        raise InputError("the corpus has no test users for utility; import it with a larger test split")
    refuse_short(canaries, hparams)
    for template in {canary.template for canary in canaries if canary.template}:
        refuse_uncounted(template.template, hparams.also)
    try:
        refuse_non_finite(model)
        if hparams.weight_bits is not None:
            model = quantized(model, hparams.weight_bits)
        measured = () if hparams.utility_only else canaries
        of_canaries = measure_canaries(model, measured, test.layout, hparams, seed, without)
        of_model = measure_model(model, test, hparams, seed)
    except Diverged as error:
        raise Diverged(f"round {round}: {error}") from error
    return rows_of(run, round, of_canaries, of_model | {REFERENCES: count_references(canaries, hparams)})


def rows_of(
    run: str, round: int, of_canaries: Sequence[tuple[str, dict[str, float]]], of_model: dict[str, float]
) -> list[Row]:
    """Return rows of each canary's values, then of the model's."""
    rows = [Row(run, round, name, id_, float(value)) for id_, values in of_canaries for name, value in values.items()]
    return rows + [Row(run, round, name, "", float(value)) for name, value in of_model.items()]


def refuse_uncounted(template: str, also: Sequence[str]) -> None:
    """Raise InputError if a measure cannot count fillings of a template: card and social security numbers."""
    counting = [name for name in also if name in ALSO and not ALSO[name].takes_any_secret]
    for hole in ("{card}", "{ssn}"):
        if hole in template and counting:
            raise InputError(
                f"evaluation.also: {counting[0]} does not count fillings of {hole}; use {{dN}}, or remove the measure"
            )


def known_words(canary: Canary, hparams: EvaluationHParams) -> int:
    """Return the number of a canary's first words that the attacker knows: `prefix`, or the text before a secret."""
    return canary.template.known if canary.template else hparams.prefix


def count_references(canaries: Sequence[Canary], hparams: EvaluationHParams) -> int:
    """Return |R|: the number in the settings, or, for a small template, all fillings that are not canaries."""
    templates = {canary.template.hidden for canary in canaries if canary.template}
    counts = (one.count_references(hparams.references, len(_secrets(one, canaries))) for one in templates)
    return min(counts, default=hparams.references)


def refuse_short(canaries: Sequence[Canary], hparams: EvaluationHParams) -> None:
    """Raise InputError if the prefix covers a complete canary."""
    for canary in canaries:
        if len(canary.tokens) <= known_words(canary, hparams):
            raise InputError(
                f"a prefix of {hparams.prefix} covers all words of canary {canary.id}, which has "
                f"{len(canary.tokens)} words; lower the prefix"
            )


def refuse_non_finite(model: nn.Module) -> None:
    """Raise Diverged if a parameter is not finite."""
    # Comparisons with NaN are false, so every canary would count as memorized.
    for name, parameter in model.named_parameters():
        bad = parameter.numel() - int(parameter.isfinite().sum())
        if bad:
            raise Diverged(f"{bad:,} of {parameter.numel():,} values of parameter {name} are not finite")


def measure_canaries(
    model: TrainableModel,
    canaries: Sequence[Canary],
    layout: Layout,
    hparams: EvaluationHParams,
    seed: int,
    without: Sequence[LanguageModel] = (),
) -> list[tuple[str, dict[str, float]]]:
    """Return (id, metric -> value) of each canary, in the order of ids."""
    chosen = _chosen("canary", hparams) | {measure.name: measure for measure in WITH_OTHER_MODELS if without}
    drawn = {
        space: _references(*space, canaries, layout, hparams, seed).to(model.device)
        for space in {_space(canary, hparams) for canary in canaries}
    }
    samplers = {space: RandomSampler(model, among) for space, among in drawn.items()}
    measured = []
    for canary in tracked("measuring canaries", sorted(canaries, key=lambda canary: canary.id)):
        tokens = torch.tensor((layout.bos, *canary.tokens), device=model.device)
        known = 1 + known_words(canary, hparams)
        probe = Probe(
            model=model,
            canary=canary,
            prefix=tokens[:known],
            continuation=tokens[known:],
            references=drawn[_space(canary, hparams)],
            sampler=samplers[_space(canary, hparams)],
            layout=layout,
            beam_width=hparams.beam_width,
            decide=hparams.decide,
            samples=hparams.samples,
            nodes=hparams.nodes,
            seed=seed,
            without=without,
        )
        values: dict[str, float] = {}
        for name, measure in chosen.items():
            values |= values_of(name, measure, probe)
        measured.append((canary.id, values))
    return measured


def _space(canary: Canary, hparams: EvaluationHParams) -> tuple[Secrets | None, int]:
    """Return the template and the length of the hidden part; canaries with equal values share R."""
    return canary.template and canary.template.hidden, len(canary.tokens) - known_words(canary, hparams)


def _references(
    template: Secrets | None,
    length: int,
    canaries: Sequence[Canary],
    layout: Layout,
    hparams: EvaluationHParams,
    seed: int,
) -> torch.Tensor:
    """Return R, int64 [|R|, length]: random words, or fillings of a template that are not canaries."""
    if template is None:
        return references(seed, hparams.references, length, layout)
    secrets = _secrets(template, canaries)
    refuse_too_many(template.count_references(hparams.references, len(secrets)), template.length)
    return torch.from_numpy(template.references(seed, hparams.references, secrets))


def _secrets(template: Secrets, canaries: Sequence[Canary]) -> NDArray[np.int64]:
    """Return the different secrets of this template, int64 [m, length]."""
    own = ((canary.template, canary.tokens) for canary in canaries)
    return np.unique([tokens[one.known :] for one, tokens in own if one and one.hidden == template], axis=0)


def measure_model(model: TrainableModel, test: Users, hparams: EvaluationHParams, seed: int) -> dict[str, float]:
    """Return metric -> value of the model, over the test users that the seed chooses."""
    count = min(hparams.test_users or len(test), len(test))
    users = stream(seed, "test users").choice(len(test), count, replace=False)
    probe = ModelProbe(model, test, tuple(sorted(map(int, users))), seed)
    values: dict[str, float] = {}
    for name, measure in _chosen("model", hparams).items():
        values |= values_of(name, measure, probe)
    if isinstance(test, Split) and test.folder.name == WHOLE["test"]:
        values[WHOLE_TEST_USERS] = count
    return values


def _chosen(subject: Subject, hparams: EvaluationHParams) -> dict[str, Measure]:
    """Return the measures of canaries, or of the model, by name."""
    chosen = {measure.name: measure for measure in ALWAYS} | measures(hparams.also)
    return {name: measure for name, measure in chosen.items() if measure.subject == subject}


# The measures that `also` names, including custom measures, and their values.


def measures(also: Iterable[str]) -> dict[str, Measure]:
    """Return measures by the names that `also` lists, executing custom files; raise InputError if one is unfit."""
    taken = dict.fromkeys(TAKEN, "a table of results")
    taken |= {column: "flsim" for quantity in QUANTITIES.values() for column in names_of(quantity)}
    resolved = {}
    for name in also:
        resolved[name] = measure = resolve(name, ALSO, "measure")
        if is_custom(name):
            for quantity in _fit(measure, name).quantities:
                for column in names_of(quantity):
                    if column in taken:
                        raise InputError(
                            f"{name}: {taken[column]} has {column} already; rename the quantity {quantity.name}"
                        )
                taken |= dict.fromkeys(names_of(quantity), name)
    return resolved


def own_quantities(also: Iterable[str]) -> list[Quantity]:
    """Return the quantities of custom measures among these names."""
    chosen = measures(also)
    return [quantity for name, measure in chosen.items() if is_custom(name) for quantity in measure.quantities]


def refuse_own_of_model(also: Iterable[str]) -> None:
    """Raise InputError if a custom measure is of the model, which is measured only with test users."""
    for name, measure in measures(also).items():
        if measure.subject == "model":
            raise InputError(f"{name}: measures the model, which needs test users; name a --corpus with test users")


def values_of(name: str, measure: Measure, probe: Probe | ModelProbe) -> dict[str, float]:
    """Compute a measure's values by the names of its quantities.

    Raises RunFailed, with the file and line, if a custom measure failed, changed the model or the words that it read,
    or did not compute finite numbers; and Diverged if a built-in measure met a value that is not finite.
    """
    if not is_custom(name):
        computed = measure.compute(probe)
        if isinstance(computed, Mapping):
            return dict(computed)
        named = zip(measure.quantities, computed if isinstance(computed, tuple) else (computed,), strict=True)
        return {quantity.name: float(value) for quantity, value in named if value is not None}
    models, words = [probe.model], {}
    if isinstance(probe, Probe):
        models += probe.without
        words = {"prefix": probe.prefix, "continuation": probe.continuation, "references": probe.references}
    with refusing_changes(name, models, words), custom_code_errors():
        computed = measure.compute(probe)
    values = computed if isinstance(computed, Mapping) else {measure.quantities[0].name: computed}
    where = f"canary {probe.canary.id}" if isinstance(probe, Probe) else "the model"
    numbers = {str(key): _number(name, measure.quantity(key), key, value, where) for key, value in values.items()}
    missing = [
        quantity.name for quantity in measure.quantities if quantity.name not in numbers and not quantity.is_partial
    ]
    if missing:
        raise RunFailed(f"{name}: computed no {missing[0]} of {where}; compute it, or set is_partial for this quantity")
    return numbers


def _number(name: str, quantity: Quantity | None, key: object, value: object, where: str) -> float:
    """Return a value that a quantity can have; raise RunFailed for any other."""
    if quantity is None:
        raise RunFailed(
            f"{name}: computed {key!r:.60} of {where}, which is not one of its quantities; add it to the quantities"
        )
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")  # the number in a tensor or an array
    number = value.item() if is_scalar else value  # type: ignore[attr-defined]
    problem = ""
    if not isinstance(number, Real):
        problem = "not a number; return a number, or omit the value"
    elif not math.isfinite(number):
        problem = "not finite; return a finite number, or omit the value"
    elif quantity.is_flag and number not in (0, 1):
        problem = "not a flag; return 1 if the canary is memorized, otherwise 0"
    elif quantity.kind == "count" and number % 1:
        problem = "not a count; return an integer"
    elif quantity.is_log and number <= 0:
        problem = "not above 0, which a logarithmic axis requires"
    if problem:
        raise RunFailed(f"{name}: {quantity.name} of {where} is {number!r:.60}, which is {problem}")
    return float(number)  # type: ignore[arg-type]


def _fit(measure: object, name: str) -> Measure:
    """Return a custom measure; raise InputError if it is not a measure, or its quantities are invalid."""
    if not isinstance(measure, Measure):
        raise InputError(f"{name}: found a {type(measure).__name__}, not a flsim.measures.Measure; use a Measure")
    if not callable(measure.compute) or not isinstance(measure.quantities, tuple) or not measure.quantities:
        raise InputError(f"{name}: a Measure needs a function `compute` and a tuple of at least one Quantity")
    if measure.family is not None:
        raise InputError(f"{name}: `family` is for built-in measures only; list the quantities")
    for quantity in measure.quantities:
        if not isinstance(quantity, Quantity):
            raise InputError(f"{name}: quantities must be flsim.measures.Quantity, found a {type(quantity).__name__}")
        try:
            refuse_unfit(quantity)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    if len({quantity.subject for quantity in measure.quantities}) > 1:
        raise InputError(f"{name}: quantities of canaries and of the model need two measures; split this measure")
    return measure


# The trial of custom measures before training: a measure that always fails would cost a complete run.

FEW = 20  # references, samples and nodes of the trial


def refuse_failing(
    model: ModelHParams, canaries: Sequence[Canary], test: Users, hparams: EvaluationHParams, seed: int
) -> None:
    """Call each custom measure once, with an untrained model and one canary and test user; InputError if it fails."""
    measures(hparams.also)
    own = tuple(name for name in hparams.also if is_custom(name))
    if not own:
        return
    few = {name: min(getattr(hparams, name), FEW) for name in ("references", "samples", "nodes")}
    tiny = replace(hparams, also=own, test_users=1, **few)
    untrained = build(test.layout.vocabulary_size, model).initialize(seed)
    try:
        evaluate(untrained, canaries[:1], test, tiny, seed, "trial", 0)
    except RunFailed as error:
        raise InputError(f"evaluation.also: {error} (tried with an untrained model)") from error


# The token ids that Beam Search generates after the known words of canaries.


def write_on(
    model: TrainableModel, canaries: Sequence[Canary], layout: Layout, hparams: EvaluationHParams
) -> dict[str, tuple[int, ...]]:
    """Return, by canary, its known words and the most likely continuation that a beam search finds."""
    refuse_short(canaries, hparams)
    if hparams.weight_bits is not None:
        model = quantized(model, hparams.weight_bits)
    written = {}
    for canary in canaries:
        known = canary.tokens[: known_words(canary, hparams)]
        prefix = torch.tensor((layout.bos, *known), device=model.device)
        tokens, _ = beam_search(model, prefix, continuations(canary, len(known), layout), hparams.beam_width)
        written[canary.id] = (*known, *tokens[0].tolist())
    return written
