"""Exposure after the scores of models that never saw the canary are subtracted.

See `flsim.measures.memorization.calibrated`.
"""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity

SCORE = Quantity(
    name="calibrated_score",
    description="Log-perplexity of the canary less its mean over models that never saw it.",
    unit="nats",
    format="{:.2f}",
    places=(),
)
RANK = Quantity(
    name="calibrated_rank",
    description="1 plus the number of random continuations whose calibrated score is at most the canary's.",
    kind="count",
    format="{:,.0f}",
    is_ranked=True,
    places=(),
)
BITS = Quantity(
    name="calibrated_exposure",
    description="Exposure by calibrated scores.",
    unit="bits",
    better="lower",
    short="calib.",
    format="{:.1f}",
    is_ranked=True,
    places=(),
    about="bits after the scores of models without the canary are subtracted",
)


def calibrated(probe: Probe) -> dict[str, float]:
    """Rank the canary by calibrated scores; return nothing where there is no model without it."""
    from flsim.measures.memorization.calibrated import calibrated_rank, mean_scores

    if not probe.without:
        return {}
    own = mean_scores(probe.without, probe.prefix, probe.continuation[None])
    means = mean_scores(probe.without, probe.prefix, probe.references)
    ranked = calibrated_rank(probe.model, probe.prefix, probe.continuation, probe.references, float(own), means)
    return {SCORE.name: ranked.score, RANK.name: ranked.rank, BITS.name: ranked.exposure}


CALIBRATED = Measure("calibrated", calibrated, (SCORE, RANK, BITS), "exposure by calibrated scores")
