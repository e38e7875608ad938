"""The built-in measures: what each computes, and how its numbers are described and shown.

Results are shown without torch. Therefore functions import the mathematics, in `flsim.measures.memorization` and
`flsim.measures.prediction`, when they are called.
"""

import re
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from flsim.measures.quantity import EVERYWHERE, Measure, ModelProbe, Probe, Quantity, Values, interval_of

if TYPE_CHECKING:
    from torch import Tensor

of_bits = partial(Quantity, unit="bits", better="lower", format="{:.1f}")
of_count = partial(Quantity, kind="count", format="{:,.0f}")
of_flag = partial(Quantity, kind="flag", better="lower")
number_of_model = partial(Quantity, subject="model")

# Random Sampling (RS), Thakkar et al. (2020), section 4.1, and exposure, Carlini et al. (2018), section 4.2.

LOG_PERPLEXITY = Quantity(
    name="log_perplexity",
    description="Negative log-likelihood of a canary's unknown words after its known words.",
    unit="nats",
    title="Log-perplexity",
    heading="Nats",
    short="nats",
    format="{:.2f}",
    is_standard=True,
    places=("canaries",),
)
RANK = of_count(
    name="rank",
    description="1 plus the number of random continuations that are at least as likely as the canary's.",
    title="Rank",
    short="rank",
    is_ranked=True,
    is_standard=True,
    places=("canaries",),
)
EXPOSURE = of_bits(
    name="exposure",
    description="Number of bits by which the model reduces the work of guessing a canary among random continuations.",
    title="Exposure",
    heading="Bits",
    short="bits",
    caption="Mean exposure",
    is_ranked=True,
    is_standard=True,
    is_primary=True,
    places=(*EVERYWHERE, "screen"),
    note="mean exposure of the planted canaries.",
)
MEMORIZED = of_flag(
    name="rs",
    description="Whether no random continuation is as likely as the canary's.",
    title="Random Sampling",
    heading="RS",
    is_ranked=True,
    is_standard=True,
    places=(*EVERYWHERE, "screen"),
)


def random_sampling(probe: Probe) -> Values:
    """Rank a canary among R; with `decide`, compute only whether it has rank 1, at a fraction of the cost."""
    from flsim.measures.memorization.exposure import exposure

    if probe.decide:
        return probe.score, None, None, probe.sampler.decide(probe.prefix, probe.continuation)
    sampled = probe.sampler.rank(probe.prefix, probe.continuation)
    bits = exposure(sampled.rank, sampled.references)
    return sampled.log_perplexity, sampled.rank, bits, sampled.memorized


RANDOM_SAMPLING = Measure(
    "random sampling", random_sampling, (LOG_PERPLEXITY, RANK, EXPOSURE, MEMORIZED), "a canary's rank among |R|"
)


# Beam Search (BS): Thakkar et al. (2020), section 4.1.

EXTRACTED = of_flag(
    name="bs",
    description="Whether a beam search from the canary's known words ends in its unknown words.",
    title="Beam Search",
    heading="BS",
    outcome="extracted",
    finds="extracts",
    is_standard=True,
    places=(*EVERYWHERE, "screen"),
)


def search(probe: Probe) -> float:
    import torch

    from flsim.measures.memorization.search import beam_search

    tokens, _ = beam_search(probe.model, probe.prefix, probe.template, probe.beam_width)
    return float(torch.equal(tokens[0], probe.continuation))


BEAM_SEARCH = Measure("beam search", search, (EXTRACTED,), "extraction by beam search")


# The utility of the model on test text.

ACCURACY = number_of_model(
    name="accuracy",
    description="Recall@1 on test text: share of words that are the first choice of the model.",
    better="higher",
    title="Accuracy",
    heading="Acc.",
    format="{:.1f}",
    is_percentage=True,
    is_standard=True,
    places=("table", "compare", "report"),
    caption="Accuracy on test text",
    axis="Recall@1",
)
ACCURACY_ALL_TOKENS = number_of_model(
    name="accuracy_all_tokens",
    description="Recall@1 on test text over all tokens, including ends of records and unknown words.",
    better="higher",
    is_percentage=True,
    places=(),
)
PERPLEXITY = number_of_model(
    name="perplexity",
    description="Perplexity on test text.",
    better="lower",
    title="Perplexity",
    heading="Perp.",
    format="{:.1f}",
    is_log=True,
    is_standard=True,
    places=("table", "plot", "compare", "report"),
    caption="Perplexity on test text",
    axis="perplexity",
)


def utility(probe: ModelProbe) -> Values:
    from flsim.measures.prediction import utility as predicted

    sums = predicted(probe.model, probe.test, probe.chosen)
    return sums.accuracy, sums.accuracy_all_tokens, sums.perplexity


UTILITY = Measure("utility", utility, (ACCURACY, ACCURACY_ALL_TOKENS, PERPLEXITY), "accuracy and perplexity")


# Exposure over the complete space of continuations, beyond log2 |R|: exact if few sequences can be as likely as the
# canary, and otherwise with importance sampling.

SPACE_BITS = of_bits(
    name="space_exposure",
    description="Number of bits by which the model reduces the work of guessing a canary "
    "among all continuations of its length.",
    title="whole space",
    heading="Space",
    short="space",
    places=("table",),
    beside=EXPOSURE.name,
    column="space",
    note="mean exposure over the complete space of phrases, extrapolated.",
    about="bits over the complete space, beyond |R|; intervals with --json",
)
SPACE_LOW, SPACE_HIGH = interval_of(SPACE_BITS)

SPACE_RANK = of_count(
    name="space_rank",
    description="Number of continuations that are at least as likely as the canary, including the canary; missing if "
    "estimated.",
    is_partial=True,
    places=(),
)
SPACE_NODES = of_count(
    name="space_nodes",
    description="Number of beginnings of sequences that are at least as likely as the canary; missing if not counted.",
    is_partial=True,
    places=(),
)


def space(probe: Probe) -> Values:
    """Enumerate the sequences that can be as likely as the canary, or sample if there are too many."""
    from flsim.measures.memorization.exposure import space_exposure
    from flsim.measures.memorization.search import enumerate_space

    exact = enumerate_space(probe.model, probe.prefix, probe.continuation, probe.template, probe.nodes)
    if exact:
        return exact.exposure, exact.exposure, exact.exposure, exact.rank, exact.nodes
    exposure = space_exposure(
        probe.model, probe.prefix, probe.continuation, probe.template, probe.samples, probe.seed, probe.canary.id
    )
    return exposure.bits, exposure.low, exposure.high, None, None


SPACE = Measure(
    "space",
    space,
    (SPACE_BITS, SPACE_LOW, SPACE_HIGH, SPACE_RANK, SPACE_NODES),
    "exposure beyond log2 |R|",
    takes_any_secret=False,
)


# Exposure by a skew-normal distribution.

# Most references in the sample of a fit. Scoring dominates the time: with the paper's model, 100,000 references take 52
# s per canary on one core. Carlini et al. (2018) fit to 10^6. On spaces that can be enumerated, the sampling error of
# exposure at 14 bits is 0.5 bits with 2,000 references, 0.14 with 20,000 and 0.04 with 200,000; the error of the
# assumed distribution, up to 3 bits, remains.
MOST_ON_CPU = 100_000
MOST = 1_000_000
FIT_BITS = of_bits(
    name="extrapolated_exposure",
    description="Exposure by a skew-normal distribution that is fitted to scores of R.",
    short="fit",
    places=(),
    about="bits by a skew-normal fit to scores of R",
)
FIT_LOW, FIT_HIGH = interval_of(FIT_BITS)
FIT_P = Quantity(
    name="extrapolation_p",
    description="Goodness of fit of the skew-normal distribution: the p-value of a test that it fits.",
    better="higher",
    short="p",
    format="{:.2f}",
    places=(),
    about="of that fit; below 0.01 the fit is rejected, and its bits must not be used",
)
FIT_REFERENCES = of_count(
    name="extrapolation_references",
    description="Number of references that the skew-normal distribution was fitted to.",
    unit="references",
    short="fitted",
    places=(),
    about="references of that fit",
)


def extrapolation(probe: Probe) -> Values:
    from flsim.measures.memorization.exposure import extrapolate
    from flsim.measures.memorization.score import log_perplexity

    fitted = sample_of(probe.references)
    scores = log_perplexity(probe.model, probe.prefix, fitted)
    fit = extrapolate(probe.score, scores, probe.seed)
    return fit.exposure.bits, fit.exposure.low, fit.exposure.high, fit.p_value, len(fitted)


def sample_of(references: "Tensor") -> "Tensor":
    """Return all of R [|R|, n], or an evenly spread part of R if it has more references than a fit uses."""
    most = MOST_ON_CPU if references.device.type == "cpu" else MOST
    return references[:: max(1, ceil(len(references) / most))]


EXTRAPOLATION = Measure(
    "extrapolation",
    extrapolation,
    (FIT_BITS, FIT_LOW, FIT_HIGH, FIT_P, FIT_REFERENCES),
    "exposure by a skew-normal fit",
)


# Extraction by a shortest-path search, which proves its answers.

PATH_PROVEN = of_flag(
    name="path",
    description="Whether the canary is the most likely continuation, 1 or 0, if proven; missing if unknown.",
    title="Shortest path",
    short="path",
    is_partial=True,
    places=(),
    about="whether it is the most likely continuation, proven by shortest-path search; - if unknown",
)
PATH_NODES = of_count(
    name="path_nodes", description="Number of beginnings of sequences that the shortest-path search read.", places=()
)


def path(probe: Probe) -> Values:
    """Return 1 if no continuation is more likely than the canary, 0 if another is as likely, None if unknown.

    The search ends when the most likely continuation is proven, or at the limit of nodes. A more likely answer proves
    that the canary is not the most likely, even if the search ended early. Proofs hold up to rounding.
    """
    from flsim.measures.memorization.search import shortest_path

    extraction = shortest_path(probe.model, probe.prefix, probe.template, probe.nodes)
    if extraction.tokens == tuple(probe.continuation.tolist()):
        return 1.0 if extraction.complete else None, extraction.nodes
    return 0.0 if extraction.score <= probe.score else None, extraction.nodes


PATH = Measure("path", path, (PATH_PROVEN, PATH_NODES), "extraction by shortest-path search")


# Samples of the model: Carlini et al. (2018), section 5.2.

GENERATION_HITS = of_count(
    name="generation_hits",
    description="Number of samples of the model that were the canary.",
    better="lower",
    short="hits",
    places=(),
    about="samples of the model that were the canary",
)


def generation(probe: Probe) -> float:
    from flsim.base.rng import stream
    from flsim.measures.memorization.exposure import draw

    rng = stream(probe.seed, "generation", probe.canary.id)
    sampled = draw(probe.model, probe.prefix, probe.template, {1.0: 1.0}, probe.samples, rng).words[: probe.samples]
    return int((sampled == probe.continuation).all(1).sum())


GENERATION = Measure("generation", generation, (GENERATION_HITS,), "samples of the model")


# Exposure to adversaries who know more or less of the text around the secret words: Carlini et al. (2018), section 6.4.

CONTEXT = "exposure prefix={} suffix={}"
CONTEXT_PARTS = re.compile(CONTEXT.format(r"(\d+)", r"(\d+)"))


def context(name: str) -> Quantity | None:
    """Return the description of an exposure to adversaries with a given context; None for another name."""
    match = CONTEXT_PARTS.fullmatch(name)
    if match is None:
        return None
    before, after = match.groups()
    words = "word" if before == "1" else "words"
    description = f"bits for an attacker who knows {before} {words} before the secret" + (
        " and its end" if int(after) else ""
    )
    return of_bits(
        name=name,
        description=f"Exposure, in {description}.",
        heading=f"{before}+{after}",
        is_ranked=True,
        places=(),
        about=description,
    )


def contexts(probe: Probe) -> dict[str, float]:
    """Rank the canary among R for each of the adversaries."""
    from flsim.measures.memorization.exposure import exposure
    from flsim.measures.memorization.score import context_sampling

    words, known, template = probe.canary.tokens, len(probe.prefix) - 1, probe.canary.template
    record = (*words, probe.layout.eos) if probe.layout.ends_with_eos(len(words)) else words
    positions = template.holes if template else tuple(range(known, len(words)))
    references = probe.references[:, [position - known for position in positions]]
    ranked = context_sampling(probe.model, record, positions, references, probe.layout.bos)
    return {CONTEXT.format(*context): exposure(sampled.rank, sampled.references) for context, sampled in ranked.items()}


CONTEXTS = Measure("contexts", contexts, (), "exposure with known or unknown prefix and suffix", family=context)


# Exposure after subtracting the scores of models that were not trained on the canary.

CALIBRATED_SCORE = Quantity(
    name="calibrated_score",
    description="Log-perplexity of the canary minus its mean over models that were not trained on it.",
    unit="nats",
    format="{:.2f}",
    places=(),
)
CALIBRATED_RANK = of_count(
    name="calibrated_rank",
    description="1 plus the number of random continuations whose calibrated score is at most the canary's.",
    is_ranked=True,
    places=(),
)
CALIBRATED_BITS = of_bits(
    name="calibrated_exposure",
    description="Exposure by calibrated scores.",
    short="calib.",
    is_ranked=True,
    places=(),
    about="bits after the scores of models without the canary are subtracted",
)


def calibrated(probe: Probe) -> Values:
    """Rank the canary by calibrated scores."""
    from flsim.measures.memorization.exposure import calibrated_rank, exposure, mean_scores

    canary_mean = mean_scores(probe.without, probe.prefix, probe.continuation[None])
    means = mean_scores(probe.without, probe.prefix, probe.references)
    canary = probe.prefix, probe.continuation
    score, rank = calibrated_rank(probe.model, *canary, probe.references, float(canary_mean), means)
    return score, rank, exposure(rank, len(probe.references))


CALIBRATED = Measure(
    "calibrated", calibrated, (CALIBRATED_SCORE, CALIBRATED_RANK, CALIBRATED_BITS), "exposure by calibrated scores"
)

ALWAYS = (RANDOM_SAMPLING, BEAM_SEARCH, UTILITY)
ALSO = {measure.name: measure for measure in (SPACE, EXTRAPOLATION, PATH, GENERATION, CONTEXTS)}
OF_BASE_MODELS = (SPACE.name,)  # by default of Hugging Face models: they read slowly, and it reads few phrases
WITH_OTHER_MODELS = (CALIBRATED,)  # for evaluations that have models without the canaries
MEASURES = (*ALWAYS, *ALSO.values(), *WITH_OTHER_MODELS)
QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for measure in MEASURES for quantity in measure.quantities}
PRIMARY = next(quantity for quantity in QUANTITIES.values() if quantity.is_primary)


def described(name: str) -> Quantity | None:
    """Return the description of a built-in measure's value; None for another name."""
    return next((quantity for measure in MEASURES if (quantity := measure.quantity(name))), None)
