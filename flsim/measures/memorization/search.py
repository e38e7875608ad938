"""Searches of the space of secrets: all, the most likely by beams, and the most likely by shortest path."""

import heapq
from dataclasses import dataclass, field
from itertools import groupby
from math import inf, log2

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.measures.memorization.score import TIE, Template, cheapest, log_perplexity, nats, rows_at_once
from flsim.models.language_model import LanguageModel, State

MOST_READ = 2**20


@dataclass(frozen=True)
class Enumeration:
    """The rank of a canary in its space: the number of r with P(r|p) <= P(s|p), including the canary.

    `nodes` is the number of beginnings of sequences, the empty one included, that cost no more than the canary: as many
    as Dijkstra's algorithm (section 5.4) reads before it comes to the canary. It has no part in equality.
    """

    rank: int
    space: int
    nodes: int = field(default=0, compare=False)

    @property
    def exposure(self) -> float:
        """Return the exposure in bits, from 0 to log2 of the space."""
        return log2(self.space) - log2(self.rank)


def enumerate_space(
    model: LanguageModel, prefix: Tensor, continuation: Tensor, template: Template, most_read: int = MOST_READ
) -> Enumeration | None:
    """Rank a canary's continuation s among all of a template's space, exactly; None if `most_read` did not suffice.

    Beginnings that cost more than the canary's complete score are not continued, because no word costs less than 0. At
    most exp(P(s|p)) sequences of each length remain, because their probabilities sum to at most 1. Therefore a
    memorized canary is ranked quickly even in a very large space. Ties are as in `RandomSampler`: the canary counts by
    identity, and scores within the model's rounding of its own count. Raises Diverged if a required score is not
    finite.
    """
    state, log_probs = model.start(prefix[None])
    limit = float(log_perplexity(model, prefix, continuation[None])) * (1 + TIE * torch.finfo(log_probs.dtype).eps)
    allowed, nodes = template.on(prefix.device), 1

    def count(state: State, log_probs: Tensor, spent: Tensor, is_canary: Tensor, read: int) -> int:
        """Return the number of continuations within the limit, except the canary, of N sequences of `read` words.

        The sequences have these states, log-probs, scores [N], and equality with the canary's beginning [N].
        """
        nonlocal nodes
        words = allowed[read]
        spent = (spent[:, None] + nats(log_probs[:, words])).flatten()
        is_canary = (is_canary[:, None] & (words == continuation[read])).flatten()
        if read + 1 == len(continuation):
            return int(((spent <= limit) & ~is_canary).sum())
        open_ = (spent <= limit).nonzero().flatten()
        nodes += len(open_)
        counted = 0
        for part in torch.split(open_, rows_at_once(log_probs, state)):
            if nodes > most_read + 1:
                break
            row, word = part // len(words), words[part % len(words)]
            stepped = model.step(tuple(piece[row] for piece in state), word)
            counted += count(*stepped, spent[part], is_canary[part], read + 1)
        return counted

    nothing = log_probs.new_zeros(1, dtype=torch.float64)
    rank = 1 + count(state, log_probs, nothing, nothing == 0, 0)
    return Enumeration(rank, template.space, nodes) if nodes <= most_read + 1 else None


# Beam Search (BS), which tests whether the model completes a prefix to the canary.
#
# Thakkar et al. (2020), section 4.1, "Evaluation Methods"; Carlini et al. (2018), "The Secret Sharer", section 5.3,
# with a template that gives the allowed words at each position.


def beam_search(model: LanguageModel, prefix: Tensor, template: Template, width: int) -> tuple[Tensor, Tensor]:
    """Return the result of `beam_searches` for one prefix: continuations [W, n] and log-perplexities [W]."""
    tokens, scores = beam_searches(model, prefix[None], template, width)
    return tokens[0], scores[0]


def beam_searches(model: LanguageModel, prefixes: Tensor, template: Template, width: int) -> tuple[Tensor, Tensor]:
    """Return the most likely continuations in a template's space that a beam of `width` finds after each prefix.

    Prefixes are int64 [P, L], BOS first. Results are continuations, int64 [P, W, n], best first, and their
    log-perplexities in nats, float64 [P, W], where W is `width`, or the size of the space if that is smaller. If the
    space has at most `width` sequences, it is enumerated. Only allowed tokens continue a beam: canaries have no PAD,
    OOV, BOS or EOS. The probability of other tokens still counts, so scores are the same log-perplexities as in other
    measures. Ties go to the beam that ranked higher one token before, then to the lower id.

    A batch has as many prefixes as fit in memory. If the beams of a single prefix exceed memory, they are read in
    parts. Neither changes the result, up to the model's rounding. Raises Diverged if a log-probability is not finite.
    """
    state, log_probs = model.start(prefixes[:1])
    rows = rows_at_once(log_probs, state)
    results = [
        _beam_searches(model, part, template, width, rows) for part in torch.split(prefixes, max(1, rows // width))
    ]
    return torch.cat([tokens for tokens, _ in results]), torch.cat([scores for _, scores in results])


def _beam_searches(
    model: LanguageModel, prefixes: Tensor, template: Template, width: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Search for prefixes whose beams form one batch of at most `rows` sequences, or for one prefix."""
    row = torch.arange(len(prefixes), device=prefixes.device)[:, None]
    state, log_probs = model.start(prefixes)
    beams, allowed = prefixes[:, None, :0], template.on(prefixes.device)
    scores, best = cheapest(nats(log_probs[:, allowed[0]]), width)
    for position, ids in enumerate(allowed):
        if position:
            scores, best, state = _extend(model, state, beams[:, :, -1], scores, ids, width, rows)
        parent, token = best // len(ids), ids[best % len(ids)]
        state = tuple(part[(row * beams.shape[1] + parent).flatten()] for part in state)
        beams = torch.cat([beams[row, parent], token[:, :, None]], dim=2)
    return beams, scores


def _extend(
    model: LanguageModel, state: State, read: Tensor, scores: Tensor, ids: Tensor, width: int, rows: int
) -> tuple[Tensor, Tensor, State]:
    """Read one token per beam [P, B]; return the best scores [P, W], their beam x ids + index, and new states."""
    step = max(1, rows // len(read))  # beams of each prefix; all of them if there are several prefixes
    best_scores, best, states = scores[:, :0], read[:, :0], []
    for first in range(0, read.shape[1], step):
        piece = tuple(part[first * len(read) : (first + step) * len(read)] for part in state)
        piece, log_probs = model.step(piece, read[:, first : first + step].flatten())
        states.append(piece)
        costs = scores[:, first : first + step, None] + nats(log_probs[:, ids]).view(len(read), -1, len(ids))
        costs, index = cheapest(costs.flatten(1), width)
        best_scores, order = cheapest(torch.cat([best_scores, costs], dim=1), width)
        best = torch.cat([best, index + first * len(ids)], dim=1).gather(1, order)
    return best_scores, best, tuple(map(torch.cat, zip(*states, strict=True)))


# Extraction by shortest path, which finds the most likely sequence of a template's space with a proof.
#
# Carlini et al. (2018), "The Secret Sharer", section 5.4: partial sequences form a tree whose edges cost -log Pr, and
# Dijkstra's algorithm expands the cheapest first. Their search expands many at once, which gives up the guarantee, and
# then searches twice as long. This search keeps the guarantee: an answer is proven only when it costs no more than all
# other nodes.

Path = tuple[int, ...]
CHILDREN = 32  # children of a node in one fetch; further children need another evaluation of the node
BEAMS = 5  # width of the beam search for the first answer
NODES = 1_000_000
FRONTIER = 1_000_000  # nodes kept in memory, 1.2 KB each; beyond this number the more expensive half is dropped


@dataclass(frozen=True)
class Searched:
    """The result of the search."""

    tokens: Path  # the best sequence so far, of equal ones the first in lexicographic order
    score: float
    bound: float  # no sequence of the space has a lower log-perplexity
    nodes: int  # number of evaluations of the model at partial sequences, repetitions included, without the beam search

    @property
    def complete(self) -> bool:
        """Return whether no other sequence can cost less; otherwise a limit ended the search."""
        return self.score <= self.bound


def shortest_path(model: LanguageModel, prefix: Tensor, template: Template, nodes: int = NODES) -> Searched:
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

    def run(self) -> Searched:
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
        return Searched(tokens, score, bound, self.nodes)

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
