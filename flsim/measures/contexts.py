"""Exposure to adversaries who know more or less of the text around the secret words.

Carlini et al. (2018), section 6.4; see `flsim.measures.memorization.context`.
"""

import re

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity

NAME = "exposure prefix={} suffix={}"
PARTS = re.compile(NAME.format(r"(\d+)", r"(\d+)"))


def context(name: str) -> Quantity | None:
    """Return the description of an exposure to adversaries with a given context; None for another name."""
    match = PARTS.fullmatch(name)
    if match is None:
        return None
    before, after = match.groups()
    words = "word" if before == "1" else "words"
    about = f"bits for those who know {before} {words} before the secret" + (" and its end" if int(after) else "")
    return Quantity(
        name=name,
        description=f"Exposure, in {about}.",
        unit="bits",
        better="lower",
        heading=f"{before}+{after}",
        format="{:.1f}",
        is_ranked=True,
        places=(),
        about=about,
    )


def contexts(probe: Probe) -> dict[str, float]:
    """Rank the canary among R for each of the adversaries."""
    from flsim.measures.memorization.context import Secret, context_sampling
    from flsim.measures.memorization.exposure import exposure

    words, known, template = probe.canary.tokens, len(probe.prefix) - 1, probe.canary.template
    record = (*words, probe.layout.eos) if probe.layout.ends_with_eos(len(words)) else words
    positions = template.holes if template else tuple(range(known, len(words)))
    references = probe.references[:, [position - known for position in positions]]
    ranked = context_sampling(probe.model, Secret(record, positions), references, probe.layout.bos)
    return {
        NAME.format(adversary.prefix, adversary.suffix): exposure(sampled.rank, sampled.references)
        for adversary, sampled in ranked.items()
    }


CONTEXTS = Measure("contexts", contexts, (), "exposure with prefix and suffix known or not", family=context)
