"""Extraction by a shortest-path search, which proves its answers; see `flsim.memorization.shortest_path`."""

from flsim.measures.measure import Measure, Probe
from flsim.measures.quantity import Quantity

PROVEN = Quantity(
    name="path",
    description="Whether the canary is proven to be the likeliest continuation; missing where the search ended early.",
    better="lower",
    kind="flag",
    title="Shortest path",
    short="path",
    is_partial=True,
    places=(),
    about="proven to be the likeliest continuation, by shortest-path search; - if open",
)
NODES = Quantity(
    name="path_nodes",
    description="How many beginnings of sequences the shortest-path search read.",
    kind="count",
    format="{:,.0f}",
    places=(),
)


def path(probe: Probe) -> dict[str, float]:
    """Search until the likeliest continuation is proven, or until the limit of nodes."""
    from flsim.memorization.shortest_path import ShortestPathHParams, shortest_path

    extraction = shortest_path(probe.model, probe.prefix, probe.template, ShortestPathHParams(nodes=probe.nodes))
    is_likeliest = extraction.tokens[0] == tuple(probe.continuation.tolist())
    if is_likeliest and not extraction.complete:
        return {NODES.name: extraction.nodes}
    return {PROVEN.name: float(is_likeliest), NODES.name: extraction.nodes}


PATH = Measure("path", path, (PROVEN, NODES), "extraction by shortest-path search")
