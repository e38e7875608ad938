"""Random Sampling (RS): a canary's rank among random continuations, its exposure, and whether it comes first.

Thakkar et al. (2020), section 4.1, and Carlini et al. (2018), section 4.2; see
`flsim.measures.memorization.random_sampling`.
"""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import EVERYWHERE, Quantity

LOG_PERPLEXITY = Quantity(
    name="log_perplexity",
    description="Negative log-likelihood of a canary's unknown words after its known ones.",
    unit="nats",
    title="Log-perplexity",
    heading="Nats",
    short="nats",
    format="{:.2f}",
    is_standard=True,
    places=("canaries",),
)
RANK = Quantity(
    name="rank",
    description="1 plus the number of random continuations that are at least as likely as the canary's.",
    kind="count",
    title="Rank",
    short="rank",
    format="{:,.0f}",
    is_ranked=True,
    is_standard=True,
    places=("canaries",),
)
EXPOSURE = Quantity(
    name="exposure",
    description="By how many bits of guessing the model narrows down a canary among random continuations.",
    unit="bits",
    better="lower",
    title="Exposure",
    heading="Bits",
    short="bits",
    format="{:.1f}",
    caption="Mean exposure",
    is_ranked=True,
    is_standard=True,
    is_primary=True,
    places=(*EVERYWHERE, "screen"),
    note="mean exposure of the planted canaries.",
)
MEMORIZED = Quantity(
    name="rs",
    description="Whether no random continuation is as likely as the canary's.",
    better="lower",
    kind="flag",
    title="Random Sampling",
    heading="RS",
    is_ranked=True,
    is_standard=True,
    places=(*EVERYWHERE, "screen"),
)


def random_sampling(probe: Probe) -> dict[str, float]:
    """Rank a canary among R; with `decide` only tell whether it comes first, at a fraction of the cost."""
    from flsim.measures.memorization.exposure import exposure

    if probe.decide:
        memorized = probe.sampler.decide(probe.prefix, probe.continuation)
        return {LOG_PERPLEXITY.name: probe.score, MEMORIZED.name: float(memorized)}
    sampled = probe.sampler.rank(probe.prefix, probe.continuation)
    return {
        LOG_PERPLEXITY.name: sampled.log_perplexity,
        RANK.name: sampled.rank,
        EXPOSURE.name: exposure(sampled.rank, sampled.references),
        MEMORIZED.name: float(sampled.memorized),
    }


RANDOM_SAMPLING = Measure(
    "random sampling", random_sampling, (LOG_PERPLEXITY, RANK, EXPOSURE, MEMORIZED), "a canary's rank among |R|"
)
