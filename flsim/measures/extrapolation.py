"""Exposure by a skew-normal distribution that is fitted to scores of R.

See `flsim.measures.memorization.extrapolation`.
"""

from math import ceil
from typing import TYPE_CHECKING

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity, interval_of

if TYPE_CHECKING:
    from torch import Tensor

# Most references in the sample of a fit. Scoring takes the time: with the paper's model 100,000 take 52 s a canary on
# one core. Carlini et al. (2018) fit to 10^6. On spaces that can be enumerated, the sampling error of exposure at 14
# bits is 0.5 bits with 2,000 references, 0.14 with 20,000 and 0.04 with 200,000; the error of the assumed distribution,
# up to 3 bits, stays.
MOST_ON_CPU = 100_000
MOST = 1_000_000
BITS = Quantity(
    name="extrapolated_exposure",
    description="Exposure by a skew-normal distribution that is fitted to scores of R.",
    unit="bits",
    better="lower",
    short="fit",
    format="{:.1f}",
    places=(),
    about="bits by a skew-normal fit to scores of R",
)
LOW, HIGH = interval_of(BITS)
P = Quantity(
    name="extrapolation_p",
    description="How well the skew-normal distribution fits: the p-value of a test that it does.",
    better="higher",
    short="p",
    format="{:.2f}",
    places=(),
    about="of that fit; below 0.01 it is poor, and its bits mean nothing",
)
USED = Quantity(
    name="extrapolation_references",
    description="Number of references that the skew-normal distribution was fitted to.",
    kind="count",
    unit="references",
    short="fitted",
    format="{:,.0f}",
    places=(),
    about="references of that fit",
)


def extrapolation(probe: Probe) -> dict[str, float]:
    """Fit the distribution, and extrapolate the exposure of the canary's score."""
    from flsim.measures.memorization.extrapolation import ExtrapolationHParams, extrapolate
    from flsim.measures.memorization.score import log_perplexity

    fitted = sample_of(probe.references)
    scores = log_perplexity(probe.model, probe.prefix, fitted)
    fit = extrapolate({probe.canary.id: probe.score}, scores, ExtrapolationHParams(resamples=100), probe.seed)
    exposure = fit.exposures[probe.canary.id]
    values = {BITS.name: exposure.bits, LOW.name: exposure.low, HIGH.name: exposure.high, P.name: fit.p_value}
    return values | {USED.name: float(len(fitted))}


def sample_of(references: "Tensor") -> "Tensor":
    """Return all of R [|R|, n], or if it has more references than a fit takes, a part that is evenly spread over R."""
    most = MOST_ON_CPU if references.device.type == "cpu" else MOST
    return references[:: max(1, ceil(len(references) / most))]


EXTRAPOLATION = Measure("extrapolation", extrapolation, (BITS, LOW, HIGH, P, USED), "exposure by a skew-normal fit")
