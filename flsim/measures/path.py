"""Extraction by a shortest-path search, which proves its answers; see `flsim.measures.memorization.shortest_path`."""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity

PROVEN = Quantity(
    name="path",
    description="Whether the canary is the likeliest continuation, 1 or 0, as far as proven; missing where unknown.",
    better="lower",
    kind="flag",
    title="Shortest path",
    short="path",
    is_partial=True,
    places=(),
    about="whether it is the likeliest continuation, proven by shortest-path search; - if unknown",
)
NODES = Quantity(
    name="path_nodes",
    description="How many beginnings of sequences the shortest-path search read.",
    kind="count",
    format="{:,.0f}",
    places=(),
)


def path(probe: Probe) -> dict[str, float]:
    """Return 1 where no continuation is likelier than the canary, 0 where another is as likely, none where unknown.

    The search ends when the likeliest continuation is proven, or at the limit of nodes. A likelier answer is a proof
    that the canary is not the likeliest, even if the search ended early. A less likely one proves nothing. Proofs are
    of the model as computed: two continuations whose log-perplexities differ by less than rounding may change places.
    """
    from flsim.measures.memorization.shortest_path import ShortestPathHParams, shortest_path

    extraction = shortest_path(probe.model, probe.prefix, probe.template, ShortestPathHParams(nodes=probe.nodes))
    nodes = {NODES.name: float(extraction.nodes)}
    if extraction.tokens[0] == tuple(probe.continuation.tolist()):
        return {PROVEN.name: 1.0, **nodes} if extraction.complete else nodes
    return {PROVEN.name: 0.0, **nodes} if extraction.scores[0] <= probe.score else nodes


PATH = Measure("path", path, (PROVEN, NODES), "extraction by shortest-path search")
