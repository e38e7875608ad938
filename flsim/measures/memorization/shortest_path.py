"""Extraction by shortest path, which finds the most likely sequences of a template's space with a proof that they are.

Carlini et al. (2018), "The Secret Sharer", section 5.4: partial sequences form a tree whose edges cost -log Pr, and
Dijkstra's algorithm expands the cheapest first. Their search expands many at once, which gives up the guarantee, and
then searches twice as long. This search keeps it: an answer is final only when it costs no more than the rest.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.base.settings import Count, settings
from flsim.measures.memorization.beam_search import beam_searches
from flsim.measures.memorization.score import nats, rows_at_once
from flsim.measures.memorization.template import Template, cheapest
from flsim.models.language_model import LanguageModel

Path = tuple[int, ...]
CHILDREN = 32  # of a node in one fetch; more of them cost another evaluation of the node
BEAMS = 5  # least width of the beam search for the first answers


@settings
class ShortestPathHParams:
    """Limits of the search.

    Attributes:
        count: k, how many of the most likely sequences to search for.
        nodes: the most partial sequences that the model reads.
        frontier: the most nodes kept in memory, 1.2 KB each; beyond it the costlier half is given up.
    """

    count: Count = 1
    nodes: Count = 1_000_000
    frontier: Count = 1_000_000


@dataclass(frozen=True)
class Extraction:
    """The result of the search.

    Attributes:
        tokens: the best sequences so far, best first, ties in lexicographic order; k, or all of a smaller space.
        scores: their log-perplexities, nats.
        bound: every other sequence of the space has at least this log-perplexity; infinity where there is no other.
        nodes: number of evaluations of the model at partial sequences, repetitions included, without the beam search.
    """

    tokens: tuple[Path, ...]
    scores: tuple[float, ...]
    bound: float
    nodes: int

    @property
    def final(self) -> int:
        """Return how many of `tokens`, from the first, are proven to be the most likely: no other can cost less."""
        return sum(score <= self.bound for score in self.scores)

    @property
    def complete(self) -> bool:
        """Return whether all of `tokens` are final; otherwise a limit ended the search with the best so far."""
        return self.final == len(self.tokens)


def shortest_path(
    model: LanguageModel, prefix: Tensor, template: Template, hparams: ShortestPathHParams | None = None
) -> Extraction:
    """Return the k most likely sequences of a template after a prefix.

    Nodes are expanded in batches of the cheapest, which grow with the search, so that at most about twice as many are
    expanded as by one at a time. That is at most exp(P) of each length, where P is the k-th answer's log-perplexity: no
    more beginnings can be that likely. States are not kept: the model reads a node's tokens anew, which takes less than
    the log-probs of the next one, whereas a state takes several KB. A beam search comes first, since nodes that cost
    more than its answers need not be kept.

    Scores are exact up to the model's rounding, which depends on the sizes of batches: sequences whose scores are
    closer than that may change places.

    Args:
        model: the model.
        prefix: int64 [L], BOS first.
        template: the space.
        hparams: limits; the defaults where None.

    Raises:
        Diverged: a log-probability is not finite.
    """
    return _Search(model, prefix, template, hparams or ShortestPathHParams()).run()


class _Node:
    """A partial sequence, and its next children, cheapest first."""

    __slots__ = ("bound", "costs", "fetched", "more", "path", "score", "used")

    def __init__(self, path: Path, score: float) -> None:
        self.path, self.score = path, score
        self.bound = score  # of children that were not fetched
        self.fetched = np.zeros(0, np.int32)  # children so far, as indices of the allowed ids
        self.costs = np.zeros(0)  # of the children of the last fetch
        self.used = 0  # number of these
        self.more = True  # whether there are children that were not fetched

    def fetch(self, children: NDArray[np.int64], costs: NDArray[np.float64], more: bool) -> None:
        """Add the next cheapest children; rounding in another batch could put one before those already taken."""
        self.fetched = np.concatenate([self.fetched, children.astype(np.int32)])
        self.costs, self.used, self.more = np.maximum(costs, self.bound), 0, more
        self.bound = float(self.costs[-1]) if len(costs) else self.bound

    def next(self, ids: Path) -> "tuple[float, Path, _Node] | None":
        """Return the frontier's entry for the rest of this node; None where nothing is left."""
        if self.used == len(self.costs):
            return (self.bound, self.path, self) if self.more else None
        child = self.fetched[self.used - len(self.costs)]
        self.used += 1
        return float(self.costs[self.used - 1]), (*self.path, ids[child]), self


class _Search:
    """A search, whose frontier has an entry (bound, path, node) for each expanded node: its cheapest child not taken.

    Where the path is the node's own, its next children have to be fetched, none of which costs less than the bound. So
    the least bound, of the frontier and of what was given up, bounds everything that was not visited.
    """

    def __init__(self, model: LanguageModel, prefix: Tensor, template: Template, hparams: ShortestPathHParams) -> None:
        self.model, self.prefix, self.template, self.hparams = model, prefix, template, hparams
        self.ids = template.on(prefix.device)
        self.rows = rows_at_once(model.start(prefix[None])[1])
        self.frontier: list[tuple[float, Path, _Node]] = [(0.0, (), _Node((), 0.0))]
        self.given_up = inf
        self.nodes = 0
        self.answers: dict[Path, float] = {}
        tokens, scores = beam_searches(model, prefix[None], template, max(BEAMS, hparams.count))
        self._answer(zip(map(tuple, tokens[0].tolist()), scores[0].tolist(), strict=True))

    def run(self) -> Extraction:
        while nodes := self._take():
            self.nodes += len(nodes)
            nodes.sort(key=lambda node: len(node.path))
            for length, group in groupby(nodes, key=lambda node: len(node.path)):
                self._expand(list(group), length)
            if len(self.frontier) > self.hparams.frontier:
                self.frontier.sort()
                kept = max(1, self.hparams.frontier // 2)
                self.given_up = min(self.given_up, self.frontier[kept][0])
                del self.frontier[kept:]
        bound = min(self.given_up, self.frontier[0][0] if self.frontier else inf, self.worst[0])
        return Extraction(tuple(self.answers), tuple(self.answers.values()), bound, self.nodes)

    def _take(self) -> list[_Node]:
        """Return the cheapest nodes of the frontier that could still lead to an answer, to expand them at once."""
        size = min(self.rows, max(1, self.nodes), self.hparams.nodes - self.nodes)
        taken: list[_Node] = []
        while len(taken) < size and self.frontier and self.frontier[0][:2] <= self.worst:
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
        """Fetch the cheapest children of nodes of one length: answers where they are whole, else for the frontier."""
        ids, allowed = self.ids[length], self.template.allowed[length]
        paths = self.prefix.new_tensor([node.path for node in nodes]).view(len(nodes), length)
        _, log_probs = self.model.start(torch.cat([self.prefix.expand(len(nodes), -1), paths], dim=1))
        costs = nats(log_probs[:, ids])
        costs += costs.new_tensor([node.score for node in nodes])[:, None]
        whole = length + 1 == self.template.length
        for row, node in enumerate(nodes):
            if len(node.fetched):
                costs[row, torch.from_numpy(node.fetched).to(ids)] = inf
        best, index = (part.cpu().numpy() for part in cheapest(costs, self.hparams.count if whole else CHILDREN))
        if whole:
            rows, columns = (best <= self.worst[0]).nonzero()
            sequences = (
                (*nodes[row].path, allowed[index[row, column]]) for row, column in zip(rows, columns, strict=True)
            )
            self._answer(zip(sequences, best[rows, columns].tolist(), strict=True))
            return
        for node, children, child_costs in zip(nodes, index, best, strict=True):
            left = len(allowed) - len(node.fetched)
            affordable = int(np.searchsorted(child_costs[:left], self.worst[0], side="right"))
            node.fetch(children[:affordable], child_costs[:affordable], more=affordable == len(child_costs) < left)
            self._push(node)

    def _answer(self, answers: Iterable[tuple[Path, float]]) -> None:
        """Keep the k best answers; `worst` is the last of them, which others have to beat."""
        for path, score in answers:
            self.answers[path] = min(score, self.answers.get(path, inf))
        ranked = heapq.nsmallest(self.hparams.count, ((score, path) for path, score in self.answers.items()))
        self.answers = {path: score for score, path in ranked}
        self.worst: tuple[float, Path] = ranked[-1] if len(ranked) == self.hparams.count else (inf, ())
