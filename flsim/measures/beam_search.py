"""Beam Search (BS), which tells whether the likeliest continuation of a beam search is the canary's.

Thakkar et al. (2020), section 4.1; see `flsim.measures.memorization.beam_search`.
"""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import EVERYWHERE, Quantity

EXTRACTED = Quantity(
    name="bs",
    description="Whether a beam search from the canary's known words ends in its unknown ones.",
    better="lower",
    kind="flag",
    title="Beam Search",
    heading="BS",
    outcome="extracted",
    finds="extracts",
    is_standard=True,
    places=(*EVERYWHERE, "screen"),
)


def search(probe: Probe) -> dict[str, float]:
    """Search for the likeliest continuation, and compare it with the canary's."""
    import torch

    from flsim.measures.memorization.beam_search import beam_search

    tokens, _ = beam_search(probe.model, probe.prefix, probe.template, probe.beam_width)
    return {EXTRACTED.name: float(torch.equal(tokens[0], probe.continuation))}


BEAM_SEARCH = Measure("beam search", search, (EXTRACTED,), "extraction by beam search")
