"""An index that finds all of several strings in text at once."""

import numpy as np

from flsim.base.arrays import Ints
from flsim.data.records import Records


class NGrams:
    """A trie of strings, whose edges have keys node x `WIDTH` + next word; equal strings are one `group`, int64 [N]."""

    WIDTH = 2**24  # the largest vocabulary (`flsim.data.vocabulary.MOST_TOKENS`)

    def __init__(self, strings: Records) -> None:
        edges, ends = dict[int, int](), dict[int, int]()
        self.group = np.empty(len(strings), np.int64)
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
        self._is_first = np.zeros(self.WIDTH, np.bool_)  # most words quickly turn out to begin no string
        self._is_first[self._keys[self._keys < self.WIDTH]] = True

    def find(self, records: Records) -> tuple[Ints, Ints]:
        """Return the group of strings and the record of each occurrence within a record, int64 [n] each."""
        place = np.flatnonzero(self._is_first[records.tokens])
        record = records.offsets.searchsorted(place, side="right") - 1
        node = np.zeros(len(place), np.int64)
        groups, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while len(place):
            is_inside = place < records.offsets[record + 1]
            place, record, node = place[is_inside], record[is_inside], node[is_inside]
            keys = node * self.WIDTH + records.tokens[place]
            at = self._keys.searchsorted(keys).clip(max=len(self._keys) - 1)
            is_known = self._keys[at] == keys
            place, record, node = place[is_known] + 1, record[is_known], self._nodes[at[is_known]]
            is_end = self._ends[node] >= 0
            groups.append(self._ends[node[is_end]])
            found.append(record[is_end])
        return np.concatenate(groups), np.concatenate(found)
