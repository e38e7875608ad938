"""Extraction by shortest path, which finds the most likely sequence of a template's space with a proof.

Carlini et al. (2018), "The Secret Sharer", section 5.4: partial sequences form a tree whose edges cost -log Pr, and
Dijkstra's algorithm expands the cheapest first. Their search expands many at once, which gives up the guarantee, and
then searches twice as long. This search keeps the guarantee: an answer is proven only when it costs no more than all
other nodes.
"""

import heapq
from dataclasses import dataclass
from itertools import groupby
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.measures.memorization.beam_search import beam_searches
from flsim.measures.memorization.score import nats, rows_at_once
from flsim.measures.memorization.template import Template, cheapest
from flsim.models.language_model import LanguageModel

Path = tuple[int, ...]
CHILDREN = 32  # children of a node in one fetch; further children need another evaluation of the node
BEAMS = 5  # width of the beam search for the first answer
NODES = 1_000_000
FRONTIER = 1_000_000  # nodes kept in memory, 1.2 KB each; beyond this number the more expensive half is dropped


@dataclass(frozen=True)
class Extraction:
    """The result of the search."""

    tokens: Path  # the best sequence so far, of equal ones the first in lexicographic order
    score: float
    bound: float  # no sequence of the space has a lower log-perplexity
    nodes: int  # number of evaluations of the model at partial sequences, repetitions included, without the beam search

    @property
    def complete(self) -> bool:
        """Return whether no other sequence can cost less; otherwise a limit ended the search."""
        return self.score <= self.bound


def shortest_path(model: LanguageModel, prefix: Tensor, template: Template, nodes: int = NODES) -> Extraction:
    """Return the most likely sequence of a template after a prefix.

    Nodes are expanded in batches of the cheapest, which grow with the search, so at most about twice as many nodes are
    expanded as with single nodes. This is at most exp(P) of each length, where P is the log-perplexity of the answer,
    because there cannot be more beginnings with this probability. States are not stored: the model reads the tokens of
    a node again, which is cheaper than the next log-probs, and a state needs several KB. A beam search is run first,
    because nodes that cost more than its answer can be dropped. Sequences whose scores are closer than the model's
    rounding, which depends on the sizes of batches, can change places. Raises Diverged if a log-probability is not
    finite.
    """
    return _Search(model, prefix, template, nodes).run()


class _Node:
    """A partial sequence, and its next children, cheapest first."""

    __slots__ = ("bound", "costs", "fetched", "more", "path", "score", "used")

    def __init__(self, path: Path, score: float) -> None:
        self.path, self.score = path, score
        self.bound = score  # of children that were not fetched
        self.fetched = np.zeros(0, np.int32)  # children so far, as indices of the allowed ids
        self.costs = np.zeros(0)  # of the children of the last fetch
        self.used = 0  # number of these

    def fetch(self, children: NDArray[np.int64], costs: NDArray[np.float64], more: bool) -> None:
        """Add the next cheapest children; rounding in another batch can order one before the children already used."""
        self.fetched = np.concatenate([self.fetched, children.astype(np.int32)])
        self.costs, self.used, self.more = np.maximum(costs, self.bound), 0, more
        self.bound = float(self.costs[-1]) if len(costs) else self.bound

    def next(self, ids: Path) -> "tuple[float, Path, _Node] | None":
        """Return the frontier's entry for the rest of this node; None if nothing remains."""
        if self.used == len(self.costs):
            return (self.bound, self.path, self) if self.more else None
        child = self.fetched[self.used - len(self.costs)]
        self.used += 1
        return float(self.costs[self.used - 1]), (*self.path, ids[child]), self


class _Search:
    """A search, whose frontier has an entry (bound, path, node) for each expanded node: its cheapest unused child.

    If the path is that of the node, its next children must be fetched, none of which costs less than the bound.
    Therefore the smallest bound of the frontier and of dropped nodes bounds all sequences that were not visited.
    """

    def __init__(self, model: LanguageModel, prefix: Tensor, template: Template, most: int) -> None:
        self.model, self.prefix, self.template, self.most = model, prefix, template, most
        self.ids = template.on(prefix.device)
        state, log_probs = model.start(prefix[None])
        self.rows = rows_at_once(log_probs, state)
        self.frontier: list[tuple[float, Path, _Node]] = [(0.0, (), _Node((), 0.0))]
        self.given_up = inf
        self.nodes = 0
        tokens, scores = beam_searches(model, prefix[None], template, BEAMS)
        self.best: tuple[float, Path] = min(zip(scores[0].tolist(), map(tuple, tokens[0].tolist()), strict=True))

    def run(self) -> Extraction:
        while nodes := self._take():
            self.nodes += len(nodes)
            nodes.sort(key=lambda node: len(node.path))
            for length, group in groupby(nodes, key=lambda node: len(node.path)):
                self._expand(list(group), length)
            if len(self.frontier) > FRONTIER:
                self.frontier.sort()
                most = max(1, FRONTIER // 2)
                self.given_up = min(self.given_up, self.frontier[most][0])
                del self.frontier[most:]
        score, tokens = self.best
        bound = min(self.given_up, self.frontier[0][0] if self.frontier else inf, score)
        return Extraction(tokens, score, bound, self.nodes)

    def _take(self) -> list[_Node]:
        """Return the cheapest nodes of the frontier that could still lead to an answer, to expand them together."""
        size = min(self.rows, max(1, self.nodes), self.most - self.nodes)
        taken: list[_Node] = []
        while len(taken) < size and self.frontier and self.frontier[0][:2] <= self.best:
            bound, path, node = heapq.heappop(self.frontier)
            if len(path) > len(node.path):
                self._push(node)
                node = _Node(path, bound)
            taken.append(node)
        return taken

    def _push(self, node: _Node) -> None:
        if entry := node.next(self.template.allowed[len(node.path)]):
            heapq.heappush(self.frontier, entry)

    def _expand(self, nodes: list[_Node], length: int) -> None:
        """Fetch the cheapest children of nodes of one length: answers if complete, otherwise for the frontier."""
        ids, allowed = self.ids[length], self.template.allowed[length]
        paths = self.prefix.new_tensor([node.path for node in nodes]).view(len(nodes), length)
        _, log_probs = self.model.start(torch.cat([self.prefix.expand(len(nodes), -1), paths], dim=1))
        costs = nats(log_probs[:, ids])
        costs += costs.new_tensor([node.score for node in nodes])[:, None]
        whole = length + 1 == self.template.length
        for row, node in enumerate(nodes):
            if len(node.fetched):
                costs[row, torch.from_numpy(node.fetched).to(ids)] = inf
        best, index = (part.cpu().numpy() for part in cheapest(costs, 1 if whole else CHILDREN))
        if whole:
            sequences = ((*node.path, allowed[column]) for node, column in zip(nodes, index[:, 0], strict=True))
            self.best = min(self.best, *zip(best[:, 0].tolist(), sequences, strict=True))
            return
        for node, children, child_costs in zip(nodes, index, best, strict=True):
            left = len(allowed) - len(node.fetched)
            affordable = int(np.searchsorted(child_costs[:left], self.best[0], side="right"))
            node.fetch(children[:affordable], child_costs[:affordable], more=affordable == len(child_costs) < left)
            self._push(node)
