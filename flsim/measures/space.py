"""Exposure over the whole space of continuations, beyond log2 |R|.

It is exact where few sequences can be as likely as the canary, and by importance sampling elsewhere; see
`flsim.measures.memorization.enumeration` and `flsim.measures.memorization.importance_sampling`.
"""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity, interval_of
from flsim.measures.random_sampling import EXPOSURE

BITS = Quantity(
    name="space_exposure",
    description="By how many bits of guessing the model narrows down a canary among all continuations of its length.",
    unit="bits",
    better="lower",
    title="whole space",
    heading="Space",
    short="space",
    format="{:.1f}",
    places=("table",),
    beside=EXPOSURE.name,
    column="space",
    note="mean exposure over the whole space of phrases, extrapolated.",
    about="bits over the whole space, beyond |R|; intervals with --json",
)
LOW, HIGH = interval_of(BITS)

RANK = Quantity(
    name="space_rank",
    description="How many continuations are at least as likely as the canary, itself included; missing if estimated.",
    kind="count",
    is_partial=True,
    format="{:,.0f}",
    places=(),
)
NODES = Quantity(
    name="space_nodes",
    description="How many beginnings of sequences are at least as likely as the canary; missing if not counted.",
    kind="count",
    is_partial=True,
    format="{:,.0f}",
    places=(),
)


def space(probe: Probe) -> dict[str, float]:
    """Enumerate the sequences that can be as likely as the canary, or sample where they are too many."""
    from flsim.measures.memorization.enumeration import enumerate_space
    from flsim.measures.memorization.importance_sampling import ImportanceHParams, space_exposures

    exact = enumerate_space(probe.model, probe.prefix, probe.continuation, probe.template, probe.nodes)
    if exact:
        counts = {RANK.name: float(exact.rank), NODES.name: float(exact.nodes)}
        return dict.fromkeys((BITS.name, LOW.name, HIGH.name), exact.exposure) | counts
    hparams = ImportanceHParams(samples=probe.samples, pilot=probe.samples // 10)
    (sampled,) = space_exposures(
        probe.model, probe.prefix, probe.continuation[None], probe.template, hparams, probe.seed, probe.canary.id
    )
    exposure = sampled.exposure
    return {BITS.name: exposure.bits, LOW.name: exposure.low, HIGH.name: exposure.high}


SPACE = Measure("space", space, (BITS, LOW, HIGH, RANK, NODES), "exposure beyond log2 |R|", takes_any_secret=False)
