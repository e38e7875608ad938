"""The requests and replies of a round, and the order of sums: the shards of a branch in order, then the branches.

The last bits of float64 sums therefore depend only on the number of shards, and of shards in a branch.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flsim.models.language_model import Params
from flsim.training.update import Moments, UpdateSum

TREE_FROM = 64  # smallest number of shards for which a run has branches by default


@dataclass(frozen=True)
class RoundRequest:
    """What the server asks of a shard in a round: to train these users from these parameters."""

    round: int  # the round, from 0, in which the users began; in asynchronous training, it can be an earlier round
    shard: int
    users: NDArray[np.int64]  # int64 [n], this round's cohort within the shard
    params: Params
    clip: float | None = None  # bound on the norm of a user's update in this round; None for no clip
    sent: Moments = field(default_factory=dict)  # the tensors of the algorithm: slot -> parameter -> tensor
    oldest_resumable_round: int = 0  # from 0; states of users that only older rounds need are removed


@dataclass(frozen=True)
class ShardWork:
    """The work on a shard in a round: the name of the process, and its time in seconds, without messages."""

    shard: int
    worker: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class ShardReply:
    """The reply of a shard to a request, with the sum over the request's users; see `ShardWork`."""

    round: int
    shard: int
    update: UpdateSum
    worker: str = ""
    seconds: float = 0.0

    @property
    def work(self) -> tuple[ShardWork, ...]:
        return (ShardWork(self.shard, self.worker, self.seconds),)


@dataclass(frozen=True)
class BranchReply:
    """The sum over the shards of a branch, added in their order by a client process, and the work on each."""

    branch: int
    update: UpdateSum
    work: tuple[ShardWork, ...]


Reply = ShardReply | BranchReply


def root_branch(shards: int) -> int:
    """Return b = sqrt(k), rounded up, of k shards, where the time b + k / b of a branch and of the server is least."""
    return math.isqrt(shards - 1) + 1


def default_branch(shards: int) -> int:
    """Return the number of shards in a branch for runs that do not set it; 0 if the server adds all shards."""
    return root_branch(shards) if shards >= TREE_FROM else 0


def branches(shards: Iterable[int], branch: int) -> dict[int, list[int]]:
    """Return given shards by branch, ascending; a branch has `branch` consecutive numbers, or all if it is 0."""
    members: dict[int, list[int]] = {}
    for shard in shards:
        members.setdefault(shard // branch if branch else 0, []).append(shard)
    return members


class TreeSum:
    """The sum of a round's replies, which can arrive in any order; each is added and freed as early as possible."""

    def __init__(self, shards: Iterable[int], branch: int) -> None:
        """Prepare the sum of these shards, in ascending order; see `branches` for `branch`."""
        self._branch, members = branch, branches(shards, branch)
        self._branches = {number: _Fold(within) for number, within in members.items()}
        self._total = _Fold([*members])
        self._work: dict[int, ShardWork] = {}

    @classmethod
    def of_replies(cls, replies: Iterable[Reply], requests: Sequence[RoundRequest], branch: int) -> "TreeSum":
        tree = cls((request.shard for request in requests), branch)
        for reply in replies:
            tree.add(reply)
        return tree

    def add(self, reply: Reply) -> None:
        """Add the reply of a shard or of a complete branch; raise ValueError for a reply that is not expected."""
        self._work |= {work.shard: work for work in reply.work}
        if isinstance(reply, BranchReply):
            self._total.add(reply.branch, reply.update)
            return
        number = reply.shard // self._branch if self._branch else 0
        branch = self._branches[number]
        branch.add(reply.shard, reply.update)
        if not branch.missing and branch.total is not None:
            self._total.add(number, branch.total)
            branch.total = None

    @property
    def total(self) -> UpdateSum | None:
        """Return the complete sum, None if there is no shard; raise ValueError while replies are missing."""
        if self._total.missing:
            missing = [shard for number in self._total.missing for shard in self._branches[number].missing]
            raise ValueError(f"replies are missing from the sum: shards {missing}")
        return self._total.total

    @property
    def work(self) -> Sequence[ShardWork]:
        return [self._work[shard] for shard in sorted(self._work)]


class _Fold:
    """A sum of parts in a fixed order, independent of the order of arrival."""

    def __init__(self, keys: Sequence[int]) -> None:
        self._missing = deque(keys)
        self._early: dict[int, UpdateSum] = {}  # parts that arrived before their predecessors
        self.total: UpdateSum | None = None
        self._is_own = False  # whether `total` has separate memory from all parts

    @property
    def missing(self) -> list[int]:
        return [key for key in self._missing if key not in self._early]

    def add(self, key: int, part: UpdateSum) -> None:
        if key not in self._missing or key in self._early:
            raise ValueError(f"part {key} is already in the sum, or does not belong to it")
        self._early[key] = part
        while self._missing and self._missing[0] in self._early:
            following = self._early.pop(self._missing.popleft())
            if self.total is None:
                self.total = following
            else:
                self.total, self._is_own = self.total.merge(following, in_place=self._is_own), True
