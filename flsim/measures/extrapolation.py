"""Exposure by a skew-normal distribution that is fitted to scores of R; see `flsim.memorization.extrapolation`."""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity

FITTED = 2_000  # references in the sample of a fit, evenly spread over R
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
LOW, HIGH = (
    Quantity(
        name=f"{BITS.name}_{end}",
        description=f"The {where} end of the 95% interval of {BITS.name}.",
        unit="bits",
        format="{:.1f}",
        places=(),
    )
    for end, where in (("low", "lower"), ("high", "upper"))
)
P = Quantity(
    name="extrapolation_p",
    description="How well the skew-normal distribution fits: the p-value of a test that it does.",
    better="higher",
    short="p",
    format="{:.2f}",
    places=(),
    about="of that fit; below 0.01 it is poor, and its bits mean nothing",
)


def extrapolation(probe: Probe) -> dict[str, float]:
    """Fit the distribution, and extrapolate the exposure of the canary's score."""
    from flsim.memorization.extrapolation import ExtrapolationHParams, extrapolate
    from flsim.memorization.score import log_perplexity

    fitted = probe.references[:: max(1, len(probe.references) // FITTED)]
    scores = log_perplexity(probe.model, probe.prefix, fitted)
    fit = extrapolate({probe.canary.id: probe.score}, scores, ExtrapolationHParams(resamples=100), probe.seed)
    exposure = fit.exposures[probe.canary.id]
    return {BITS.name: exposure.bits, LOW.name: exposure.low, HIGH.name: exposure.high, P.name: fit.p_value}


EXTRAPOLATION = Measure("extrapolation", extrapolation, (BITS, LOW, HIGH, P), "exposure by a skew-normal fit")
