"""The evaluation of a model that flsim or another system trained: attacks on every canary, and the model's utility."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flsim.base.errors import Diverged, InputError, RunFailed
from flsim.base.extensions import CustomName, custom_code_errors, is_custom, resolve
from flsim.base.machine import refuse_beyond_memory
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import Count, Flag, Whole, bounds, settings
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import Canary
from flsim.data.corpus import Split
from flsim.data.manifest import WHOLE
from flsim.data.records import SPECIAL_TOKENS, Layout, Users
from flsim.measures.built_in import ALSO, ALWAYS, QUANTITIES, WITH_OTHER_MODELS
from flsim.measures.memorization.exposure import refuse_too_many_samples
from flsim.measures.memorization.score import RandomSampler, references, refuse_too_many
from flsim.measures.memorization.search import beam_search
from flsim.measures.quantity import Measure, ModelProbe, Probe, Quantity, Subject, continuations, refuse_unfit
from flsim.models import language_model
from flsim.models.architectures import ModelHParams, build
from flsim.results.frames import TAKEN
from flsim.results.rows import REFERENCES, WHOLE_TEST_USERS, Row
from flsim.results.tables import names_of


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
    decide: Flag = False
    also: tuple[Annotated[str, CustomName("measure", ALSO)], ...] = ()
    samples: Count = 5_000
    nodes: Count = 20_000
    weight_bits: Annotated[Whole, bounds(ge=language_model.FEWEST, le=language_model.MOST)] | None = None
    utility_only: Flag = False

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
    model: language_model.TrainableModel,
    canaries: Sequence[Canary],
    test: Users,
    hparams: EvaluationHParams,
    seed: int,
    run: str,
    round: int,
    without: Sequence[language_model.LanguageModel] = (),
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
            model = language_model.quantized(model, hparams.weight_bits)
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
    model: language_model.TrainableModel,
    canaries: Sequence[Canary],
    layout: Layout,
    hparams: EvaluationHParams,
    seed: int,
    without: Sequence[language_model.LanguageModel] = (),
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


def measure_model(
    model: language_model.TrainableModel, test: Users, hparams: EvaluationHParams, seed: int
) -> dict[str, float]:
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
    with language_model.refusing_changes(name, models, words), custom_code_errors():
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
    if not isinstance(measure, Measure) or not callable(measure.compute) or measure.family is not None:
        raise InputError(
            f"{name}: found {measure!r:.60}; use a flsim.measures.Measure with a function `compute`, without `family`"
        )
    quantities = measure.quantities
    if not isinstance(quantities, tuple) or not quantities or not all(isinstance(one, Quantity) for one in quantities):
        raise InputError(f"{name}: found {quantities!r:.60}; use a tuple of at least one flsim.measures.Quantity")
    for quantity in quantities:
        try:
            refuse_unfit(quantity)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    if len({quantity.subject for quantity in quantities}) > 1:
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
    model: language_model.TrainableModel, canaries: Sequence[Canary], layout: Layout, hparams: EvaluationHParams
) -> dict[str, tuple[int, ...]]:
    """Return, by canary, its known words and the most likely continuation that a beam search finds."""
    refuse_short(canaries, hparams)
    if hparams.weight_bits is not None:
        model = language_model.quantized(model, hparams.weight_bits)
    written = {}
    for canary in canaries:
        known = canary.tokens[: known_words(canary, hparams)]
        prefix = torch.tensor((layout.bos, *known), device=model.device)
        tokens, _ = beam_search(model, prefix, continuations(canary, len(known), layout), hparams.beam_width)
        written[canary.id] = (*known, *tokens[0].tolist())
    return written


# The audit of models from other systems: any model with `start` and `step` of `LanguageModel`.
#
# All outputs of such a model are checked before they are used, because a model in training mode, or with logits instead
# of log-probs, gives plausible but wrong ranks.

CPU = torch.device("cpu")
SLACK = 1e-2  # nats tolerance of scores for other batch sizes, TF32 or other kernels
IMPOSSIBLE = torch.finfo(torch.float16).min  # nats, in every type
OTHERS, NEVER = -1, -2  # in place of an id that a module predicts
SUM_SLACK = 1e-3  # tolerance of the sum of probabilities for rounding


class ForwardModel(nn.Module):
    """A causal module as a `LanguageModel`; each step reads all tokens so far again.

    It is simple, and correct for any map from tokens to logits. A model with a cache is faster with custom `start` and
    `step`. A state is the tokens so far, at most `context` of them.

    Args:
        module: the module; if `ids` are given, it has its own ids.
        context: number of tokens that it reads.
        ids: int64 [2, V], the ids that the module reads for each token id, and those that it predicts: `OTHERS` for
            all ids that are not named, and `NEVER`; None if they are the same.
    """

    _ids: Tensor | None

    def __init__(self, module: nn.Module, context: int, ids: Tensor | None = None) -> None:
        super().__init__()
        self.module, self.context = module, context
        self.register_buffer("_ids", ids, persistent=False)

    def start(self, tokens: Tensor) -> tuple[language_model.State, Tensor]:
        tokens = tokens[:, -self.context :]
        output = self.module(tokens if self._ids is None else self._ids[0, tokens])
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
            raise InputError(
                f"forward must map tokens [B, T] to logits [B, T, V]; for {list(tokens.shape)}, it returned "
                f"{_shape(logits)}"
            )
        last = logits[:, -1]
        log_probs = last.to(torch.promote_types(last.dtype, torch.float32)).log_softmax(-1)
        return (tokens,), log_probs if self._ids is None else _renumbered(log_probs, self._ids[1])

    def step(self, state: language_model.State, tokens: Tensor) -> tuple[language_model.State, Tensor]:
        return self.start(torch.cat([state[0], tokens[:, None]], dim=1))


def _renumbered(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs [N, V] from those of a module's ids [N, W]; ids is int64 [V], see `ForwardModel`."""
    size = log_probs.shape[1]
    if int(ids.max()) >= size:
        raise InputError(f"words name the id {int(ids.max())}, but the module predicts {size} ids; correct the words")
    named = log_probs[:, ids.clamp(min=0)].masked_fill(ids == NEVER, -torch.inf)
    others = log_probs.index_fill(1, ids[ids >= 0], -torch.inf).logsumexp(1)
    return torch.where(ids == OTHERS, others[:, None], named)


def from_forward(
    module: nn.Module,
    context: int,
    words: Sequence[int] | None = None,
    bos: int | None = None,
    eos: int | None = None,
    layout: str = "tff",
) -> ForwardModel:
    """Return a `LanguageModel` of a module whose forward maps int64 [B, T] to logits [B, T, V].

    A module with other token ids, such as subwords, needs `words` and `bos`. All further ids of the module together are
    the unknown word, so the probabilities of words are those of the module.

    Args:
        module: causal module; logits at a position are of the next token. It may also return an object with `.logits`.
        context: number of tokens that it reads; for longer sequences, it reads the last tokens. BOS and the longest
            canary are enough for canaries; for utility BOS and a record (20 words).
        words: the module's id of each word of canaries, in the order of the vocabulary.
        bos: the module's id at the beginning of a sequence, with `words`.
        eos: the module's id at the end of a sequence, for utility.
        layout: name of the layout of token ids, with `words`.

    Raises:
        InputError: the context is below 1, or ids are negative or repeat.
    """
    if context < 1:
        raise InputError(f"context must be at least 1 token, found {context}")
    if words is None:
        return ForwardModel(module, context)
    known = [*words, *(() if eos is None else (eos,))]
    if bos is None or bos < 0 or min(known, default=-1) < 0 or len(set(known)) < len(known):
        raise InputError("words need different ids of the module, none below 0, and the id of bos")
    ours = Layout(len(words) + SPECIAL_TOKENS, name=layout)
    predicted = torch.full((ours.vocabulary_size,), NEVER)
    predicted[ours.first_word : ours.last_word + 1] = torch.tensor(list(words))
    predicted[ours.oov], predicted[ours.eos] = OTHERS, NEVER if eos is None else eos
    read = torch.where(predicted < 0, bos, predicted)
    return ForwardModel(module, context, torch.stack([read, predicted]))


class Checked(language_model.TrainableModel):
    """Any model with `start` and `step`, whose outputs are checked; it has no gradients. Failures raise InputError."""

    def __init__(
        self, model: language_model.LanguageModel, layout: Layout, name: str, device: torch.device = CPU
    ) -> None:
        for method in ("start", "step"):
            if not callable(getattr(model, method, None)):
                raise InputError(
                    f"{name}: returned a {type(model).__name__}, which has no method {method}; give it start "
                    "and step, or wrap a module with flsim.runs.evaluate.from_forward(module, context)"
                )
        super().__init__(layout.vocabulary_size, language_model.ModelSettings())
        self.model = model.to(device).eval() if isinstance(model, nn.Module) else model
        self.layout, self.name, self._device = layout, name, device

    @property
    def device(self) -> torch.device:
        return self._device

    def forward(self, tokens: Tensor) -> Tensor:
        """Return log-probs [B, T, V], token after token."""
        state, log_probs = self.start(tokens[:, :1])
        columns = [log_probs]
        for column in tokens[:, 1:].T:
            state, log_probs = self.step(state, column)
            columns.append(log_probs)
        return torch.stack(columns, 1)

    def start(self, tokens: Tensor) -> tuple[language_model.State, Tensor]:
        return self._ask("start", len(tokens), tokens)

    def step(self, state: language_model.State, tokens: Tensor) -> tuple[language_model.State, Tensor]:
        return self._ask("step", len(tokens), state, tokens)

    @torch.no_grad()
    def _ask(self, method: str, rows: int, *arguments: Any) -> tuple[language_model.State, Tensor]:
        try:
            answer = getattr(self.model, method)(*arguments)
        except Exception as error:
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(f"{self.name}: {method} failed with {reason}") from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._wrong(method, f"must return (state, log_probs), found {_shape(answer)}")
        state, log_probs = answer
        if not isinstance(state, tuple) or any(not isinstance(p, Tensor) or p.shape[:1] != (rows,) for p in state):
            raise self._wrong(method, f"must return a state that is a tuple of tensors with a row for each of {rows}")
        self._check(method, log_probs, rows)
        # Padding and BOS can have probability 0, because attacks do not score them; infinity is replaced, because it
        # would look like an overflow.
        return state, log_probs.masked_fill(log_probs.isneginf(), IMPOSSIBLE)

    def _check(self, method: str, log_probs: Any, rows: int) -> None:
        size, layout = self.layout.vocabulary_size, self.layout
        if not isinstance(log_probs, Tensor) or not log_probs.is_floating_point():
            raise self._wrong(method, f"must return log-probs, a tensor of floats, found {_shape(log_probs)}")
        if log_probs.shape != (rows, size):
            raise self._wrong(
                method, f"returned log-probs {_shape(log_probs)}, but the vocabulary requires [{rows}, {size}]"
            )
        if bool(log_probs.isnan().any()):
            raise self._wrong(method, "returned log-probs that are NaN")
        # The last bits of a half's log-probs are not precise enough for this sum.
        slack = max(SUM_SLACK, 8 * torch.finfo(log_probs.dtype).eps)
        sums = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)).logsumexp(1).exp()
        worst = float(sums[(sums - 1).abs().argmax()])
        if not abs(worst - 1) <= slack:
            raise self._wrong(
                method,
                f"returned log-probs whose probabilities sum to {worst:.6g}, not to 1; logits need a log_softmax",
            )
        if not bool(log_probs[:, layout.first_word : layout.last_word + 1].isfinite().all()):
            raise self._wrong(method, "gave a word the probability 0, so its log-perplexity is infinite")

    def _wrong(self, method: str, what: str) -> InputError:
        return InputError(f"{self.name}: {method} {what}")


def refuse_inconsistent(model: Checked) -> None:
    """Refuse a model whose answers differ between reading three tokens at once and one after another.

    The rows of the state are exchanged in between. The usual reasons are dropout, a state whose tensors have no row per
    sequence, or a mask that is not causal.
    """
    layout = model.layout
    bos, first, last = layout.bos, layout.first_word, layout.last_word
    whole = torch.tensor([[bos, first, last], [bos, last, first]], device=model.device)
    _, expected = model.start(whole)
    _, again = model.start(whole)
    if not _near(again, expected):
        raise InputError(
            f"{model.name}: the output differs between two calls with the same input; switch off dropout with "
            "model.eval()"
        )
    state, _ = model.start(whole[:1, :1])
    state, _ = model.step(tuple(part[[0, 0]] for part in state), whole[:, 1])
    _, stepped = model.step(tuple(part[[1, 0]] for part in state), whole[[1, 0], 2])
    if not _near(stepped, expected[[1, 0]]):
        raise InputError(
            f"{model.name}: step and start give different outputs for the same tokens; every tensor of a state "
            "needs a row per sequence, and no token may depend on later tokens"
        )


def audit(
    model: language_model.LanguageModel,
    canaries: Sequence[Canary],
    layout: Layout,
    hparams: EvaluationHParams,
    seed: int = 0,
    name: str = "model",
    device: torch.device = CPU,
    test: Users | None = None,
    run: str | None = None,
    round: int = 0,
) -> list[Row]:
    """Measure any model like `flsim.runs.evaluate.evaluate` measures a flsim model.

    Without test users there are no rows of utility. Errors have the `name`, and so have rows unless `run` is given.

    Raises:
        InputError: a parameter is not finite, the model breaks the protocol, or a canary is not longer than the prefix.
    """
    checked = Checked(model, layout, name, device)
    refuse_short(canaries, hparams)
    if isinstance(model, nn.Module):
        try:
            refuse_non_finite(model.module if isinstance(model, ForwardModel) else model)
        except Diverged as error:
            raise InputError(f"{name}: {error}; measure a checkpoint from before training diverged") from error
    refuse_inconsistent(checked)
    of_canaries = measure_canaries(checked, canaries, layout, hparams, seed)
    of_model = {}
    if test is None or not len(test):
        refuse_own_of_model(hparams.also)
    else:
        of_model = measure_model(checked, test, hparams, seed)
    return rows_of(run or name, round, of_canaries, of_model | {REFERENCES: count_references(canaries, hparams)})


def _near(one: Tensor, other: Tensor) -> bool:
    slack = max(SLACK, 8 * torch.finfo(other.dtype).eps)
    return torch.allclose(one, other, rtol=slack, atol=slack)


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
