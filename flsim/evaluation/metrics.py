"""What can be measured of a canary beside its rank among R and beam search, by the names that `also` lists.

space: space_exposure, bits over the whole space, exact where few sequences can be as likely and by importance sampling
    elsewhere; and its interval, _low and _high.
extrapolation: extrapolated_exposure, bits by a skew-normal fit to scores of R, and its interval; extrapolation_p, how
    good the fit is.
path: path, 1 where the canary is proven to be the likeliest continuation and 0 where it is not, missing where the limit
    of nodes came first; path_nodes, how many were read.
generation: generation_hits, how many samples of the model were the canary.
contexts: exposure prefix=K suffix=J, what who knows K words before the secret, and EOS after it if J, finds among R.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flsim.base.rng import stream
from flsim.canaries.spec import Canary
from flsim.data.vocabulary import Layout
from flsim.memorization.calibrated import calibrated_rank, mean_scores
from flsim.memorization.context import Secret, context_sampling
from flsim.memorization.enumeration import enumerate_space
from flsim.memorization.exposure import Exposure, exposure
from flsim.memorization.extrapolation import ExtrapolationHParams, extrapolate
from flsim.memorization.generation import GenerationHParams, generative_sampling
from flsim.memorization.importance_sampling import ImportanceHParams, space_exposures
from flsim.memorization.score import log_perplexity
from flsim.memorization.shortest_path import ShortestPathHParams, shortest_path
from flsim.memorization.template import Template
from flsim.models.language_model import LanguageModel

Metric = Literal["space", "extrapolation", "path", "generation", "contexts"]
FITTED = 2_000  # references that a distribution is fitted to, evenly spread over R


@dataclass(frozen=True)
class Probe:
    """A canary before a model.

    Attributes:
        model: the model.
        canary: whose name keys what is drawn for it.
        prefix: int64 [L], BOS and the words that are known.
        continuation: int64 [n], the words that are not.
        references: R, int64 [|R|, n].
        layout: where the words are.
        samples: of the whole space, and of the model.
        nodes: limit of searches: how many beginnings of sequences they read.
        seed: the experiment's.
    """

    model: LanguageModel
    canary: Canary
    prefix: Tensor
    continuation: Tensor
    references: Tensor
    layout: Layout
    samples: int
    nodes: int
    seed: int

    @property
    def template(self) -> Template:
        return Template.words(self.layout, len(self.continuation))

    @property
    def score(self) -> float:
        """Log-perplexity, nats."""
        return float(log_perplexity(self.model, self.prefix, self.continuation[None]))


def space(probe: Probe) -> dict[str, float]:
    exact = enumerate_space(probe.model, probe.prefix, probe.continuation, probe.layout, probe.nodes)
    if exact:
        return _with_interval("space_exposure", Exposure(*[exact.exposure] * 3))
    hparams = ImportanceHParams(samples=probe.samples, pilot=probe.samples // 10)
    (found,) = space_exposures(
        probe.model, probe.prefix, probe.continuation[None], probe.layout, hparams, probe.seed, probe.canary.id
    )
    return _with_interval("space_exposure", found.exposure)


def extrapolation(probe: Probe) -> dict[str, float]:
    some = probe.references[:: max(1, len(probe.references) // FITTED)]
    scores = log_perplexity(probe.model, probe.prefix, some)
    found = extrapolate({probe.canary.id: probe.score}, scores, ExtrapolationHParams(resamples=100), probe.seed)
    bits = _with_interval("extrapolated_exposure", found.exposures[probe.canary.id])
    return bits | {"extrapolation_p": found.p_value}


def path(probe: Probe) -> dict[str, float]:
    found = shortest_path(probe.model, probe.prefix, probe.template, ShortestPathHParams(nodes=probe.nodes))
    likeliest = found.tokens[0] == tuple(probe.continuation.tolist())
    if likeliest and not found.complete:
        return {"path_nodes": found.nodes}
    return {"path": float(likeliest), "path_nodes": found.nodes}


def generation(probe: Probe) -> dict[str, float]:
    rng = stream(probe.seed, "generation", probe.canary.id)
    hparams = GenerationHParams(samples=probe.samples)
    return {
        "generation_hits": generative_sampling(
            probe.model, probe.prefix, probe.continuation, probe.template, hparams, rng
        ).hits
    }


def contexts(probe: Probe) -> dict[str, float]:
    words, known = probe.canary.tokens, len(probe.prefix) - 1
    record = (*words, probe.layout.eos) if probe.layout.ends_with_eos(len(words)) else words
    secret = Secret(record, tuple(range(known, len(words))))
    ranked = context_sampling(probe.model, secret, probe.references, probe.layout.bos)
    return {
        f"exposure prefix={context.prefix} suffix={context.suffix}": exposure(found.rank, found.references)
        for context, found in ranked.items()
    }


def calibrated(probe: Probe, without: Sequence[LanguageModel]) -> dict[str, float]:
    """By the mean scores of models that never saw the canary; rows calibrated_score (nats), _rank and _exposure."""
    own = mean_scores(without, probe.prefix, probe.continuation[None])
    means = mean_scores(without, probe.prefix, probe.references)
    found = calibrated_rank(probe.model, probe.prefix, probe.continuation, probe.references, float(own), means)
    return {"calibrated_score": found.score, "calibrated_rank": found.rank, "calibrated_exposure": found.exposure}


METRICS: dict[Metric, Callable[[Probe], dict[str, float]]] = {
    "space": space,
    "extrapolation": extrapolation,
    "path": path,
    "generation": generation,
    "contexts": contexts,
}


def _with_interval(name: str, found: Exposure) -> dict[str, float]:
    return {name: found.bits, f"{name}_low": found.low, f"{name}_high": found.high}
