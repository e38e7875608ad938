"""The number of training records, and of users, whose text contains a string.

Neel and Chang, "Privacy Issues in Large Language Models: A Survey" (2023), definition 2, after Carlini et al. (2021): a
string is k-eidetic memorized where it can be extracted and at most k training examples contain it.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.records import Records

Ints = NDArray[np.int64]
RECORDS = 2**16  # that are searched at once


class NGrams:
    """An index of strings, which finds all of them in a text at once, whatever their lengths.

    It is a trie: a node for each beginning of a string, and from node to node an edge for each word, whose key is
    node x `WIDTH` + word. So nothing is hashed, and counts are exact.
    """

    WIDTH = 2**24  # the largest vocabulary (`flsim.data.vocabulary.MOST_TOKENS`)

    def __init__(self, strings: Records) -> None:
        edges, ends = dict[int, int](), dict[int, int]()
        self.group = np.empty(len(strings), np.int64)  # equal strings share their counts
        for index, string in enumerate(strings):
            node = 0
            for word in string.tolist():
                node = edges.setdefault(node * self.WIDTH + word, len(edges) + 1)
            self.group[index] = ends.setdefault(node, len(ends))
        self.groups = len(ends)
        self._keys = np.array(sorted(edges), np.int64)
        self._nodes = np.array([edges[key] for key in self._keys.tolist()], np.int64)
        self._ends = np.full(len(edges) + 1, -1)
        self._ends[list(ends)] = list(ends.values())

    def find(self, records: Records) -> tuple[Ints, Ints]:
        """Return the group of strings and the record of each occurrence inside a record, int64 [n] each."""
        lengths: Ints = np.diff(records.offsets)
        record = np.repeat(np.arange(len(records)), lengths)
        left = np.repeat(records.offsets[1:], lengths) - np.arange(records.words)  # words up to the record's end
        tokens = records.tokens.astype(np.int64)
        start, node = np.arange(records.words), np.zeros(records.words, np.int64)
        groups, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        read = 0
        while len(start) and len(self._keys):
            is_inside = left[start] > read
            start, node = start[is_inside], node[is_inside]
            keys = node * self.WIDTH + tokens[start + read]
            at = self._keys.searchsorted(keys).clip(max=len(self._keys) - 1)
            is_known = self._keys[at] == keys
            start, node = start[is_known], self._nodes[at[is_known]]
            is_end = self._ends[node] >= 0
            groups.append(self._ends[node[is_end]])
            places.append(record[start[is_end]])
            read += 1
        return np.concatenate(groups), np.concatenate(places)


def occurrences(users: Population, strings: Records) -> tuple[Ints, Ints]:
    """Return how many records, and how many users, have text that contains each string, int64 [N] each.

    All records are read once, a piece at a time. A string that occurs twice in a record counts once.

    Args:
        users: the training users; see `in_place`.
        strings: N strings of at least one word.
    """
    index = NGrams(strings)
    offsets = np.concatenate([np.asarray(users.user_offsets), users.records + users.extra.offsets[1:]])
    in_records, in_users = np.zeros(index.groups, np.int64), np.zeros(index.groups, np.int64)
    last_user = np.full(index.groups, -1)  # that a group occurred with; a user's records may lie in two pieces
    for first in range(0, int(offsets[-1]), RECORDS):
        positions = np.arange(first, min(first + RECORDS, int(offsets[-1])))
        group, record = np.unique(np.stack(index.find(users.records_at(positions))), axis=1)
        in_records += np.bincount(group, minlength=index.groups)
        user = offsets.searchsorted(positions[record], side="right") - 1
        group, user = np.unique(np.stack([group, user]), axis=1)
        in_users += np.bincount(group[user != last_user[group]], minlength=index.groups)
        np.maximum.at(last_user, group, user)
    return in_records[index.group], in_users[index.group]


def in_place(users: Population, canaries: tuple[Canary, ...], rounds: int) -> Population:
    """Return training users with every canary in place that was planted in one of the first rounds.

    Args:
        users: the users of a run.
        canaries: its canaries.
        rounds: number of completed rounds.
    """
    placed = tuple(
        replace(canary, is_planted=_is_planted(canary, rounds), first_round=None, last_round=None)
        for canary in canaries
    )
    is_placed = np.array([canary.is_planted for canary in placed], np.bool_)[users.overlay.canaries]
    overlay = Overlay(users.overlay.records[is_placed], users.overlay.canaries[is_placed])
    return Population.with_canaries(users.split, placed, overlay, users.twin)


def copies_in(users: Population, canaries: int) -> Ints:
    """Return the number of records that each canary is, int64 [canaries]."""
    return np.bincount(users.overlay.canaries, minlength=canaries) + np.bincount(users.injected, minlength=canaries)


def _is_planted(canary: Canary, rounds: int) -> bool:
    last = rounds if canary.last_round is None else min(rounds, canary.last_round)
    return canary.is_planted and (canary.first_round or 1) <= last
