"""This language model has exact costs, therefore equal scores are ties in batches of any size."""

from itertools import product

import numpy as np
import torch
from torch import Tensor

from flsim.measures.memorization.score import Template
from flsim.models.language_model import State

CELLS, VOCABULARY = 7, 8
Phrase = tuple[int, ...]


class TableModel:
    """A model in which all tokens so far select a row of a table, the next token's costs: multiples of 1/4."""

    def __init__(self, seed: int, most: int) -> None:
        self.table = torch.from_numpy(np.random.default_rng(seed).integers(0, most + 1, (CELLS, VOCABULARY)) / 4)
        self.largest = 0  # the largest number of sequences that the model read at once

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        state: State = (torch.zeros(len(tokens), dtype=torch.int64),)
        for read in tokens.T:
            state, log_probs = self.step(state, read)
        return state, log_probs

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        self.largest = max(self.largest, len(tokens))
        cell = (3 * state[0] + 5 * tokens + 1) % CELLS
        return (cell,), -self.table[cell]

    def score(self, prefix: Phrase, phrase: Phrase) -> float:
        """Return the score by its definition, one token at a time."""
        cell, costs = 0, []
        for token in prefix + phrase:
            costs.append(float(self.table[cell, token]))
            cell = (3 * cell + 5 * token + 1) % CELLS
        return sum(costs[len(prefix) :])

    def ranking(self, prefix: Phrase, template: Template) -> list[tuple[float, Phrase]]:
        """Return the complete space, best first, with ties in lexicographic order."""
        return sorted((self.score(prefix, phrase), phrase) for phrase in product(*template.allowed))
