"""The number of samples of the model that are the canary; see `flsim.measures.memorization.generation`."""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity

HITS = Quantity(
    name="generation_hits",
    description="How many samples of the model were the canary.",
    better="lower",
    kind="count",
    short="hits",
    format="{:,.0f}",
    places=(),
    about="samples of the model that were the canary",
)


def generation(probe: Probe) -> dict[str, float]:
    """Sample continuations from the model, and count the canary's."""
    from flsim.base.rng import stream
    from flsim.measures.memorization.generation import GenerationHParams, generative_sampling

    rng = stream(probe.seed, "generation", probe.canary.id)
    hparams = GenerationHParams(samples=probe.samples)
    sampled = generative_sampling(probe.model, probe.prefix, probe.continuation, probe.template, hparams, rng)
    return {HITS.name: sampled.hits}


GENERATION = Measure("generation", generation, (HITS,), "samples of the model")
