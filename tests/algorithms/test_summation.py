"""The additions of a round have the order of a written-out oracle, in whatever order replies arrive."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from flsim.algorithms.summation import BranchReply, Reply, ShardReply, ShardWork, TreeSum, branches, default_branch
from flsim.training.update import Counts, UpdateSum

SIZES = st.floats(1e-3, 1e12)  # so different that another order of additions gives other bits

Drawn = tuple[list[ShardReply], int, Sequence[int]]


@st.composite
def rounds(draw: DrawFn) -> Drawn:
    """Draw replies of some shards, ascending; the number of shards in a branch; and an order of arrival."""
    shards = sorted(draw(st.sets(st.integers(0, 40), max_size=12)))
    replies = [ShardReply(5, shard, update_of(*draw(st.tuples(SIZES, SIZES))), f"w{shard}", 1.5) for shard in shards]
    return replies, draw(st.integers(0, 13)), draw(st.permutations(range(len(replies))))


def update_of(value: float, loss: float) -> UpdateSum:
    delta = {"a": torch.tensor([value, -value, 1 / value], dtype=torch.float64), "b": torch.full((2, 1), loss).double()}
    return UpdateSum(delta, Counts(value, 3, loss, 7, value / 3, 1, 0, 11, 2))


def oracle(replies: Sequence[ShardReply], branch: int) -> dict[str, list[float]]:
    """Return every number of the sum by additions of Python's floats: first within branches, then of branches."""

    def numbers(update: UpdateSum) -> dict[str, list[float]]:
        counts = {name: [value] for name, value in vars(update.counts).items()}
        return counts | {name: value.flatten().tolist() for name, value in update.delta.items()}

    def added(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
        total = parts[0]
        for part in parts[1:]:
            total = {name: [x + y for x, y in zip(total[name], part[name], strict=True)] for name in total}
        return total

    of_branches = []
    for first in range(0, 41, branch or 41):
        members = [numbers(r.update) for r in replies if first <= r.shard < first + (branch or 41)]
        of_branches += [added(members)] if members else []
    return added(of_branches)


def summed(shards: Sequence[int], branch: int, replies: Sequence[Reply]) -> TreeSum:
    tree = TreeSum(shards, branch)
    for reply in replies:
        tree.add(reply)
    return tree


def assert_is(total: UpdateSum | None, expected: dict[str, list[float]]) -> None:
    assert total is not None
    for name, values in expected.items():
        actual = total.delta[name].flatten().tolist() if name in total.delta else [getattr(total.counts, name)]
        assert actual == values, name


@given(rounds())
def test_every_order_of_replies_gives_the_bits_of_the_oracle(drawn: Drawn) -> None:
    replies, branch, order = drawn
    shards = [reply.shard for reply in replies]
    before = [reply.update.delta["a"].clone() for reply in replies]
    tree = summed(shards, branch, [replies[place] for place in order])
    if not replies:
        assert tree.total is None
        return
    assert_is(tree.total, oracle(replies, branch))
    assert list(tree.work) == [ShardWork(shard, f"w{shard}", 1.5) for shard in shards]
    assert all(torch.equal(reply.update.delta["a"], value) for reply, value in zip(replies, before, strict=True))


@given(rounds())
def test_branches_that_clients_have_added_give_the_same_bits(drawn: Drawn) -> None:
    """Every other branch arrives as one reply, and the remaining branches arrive shard by shard."""
    replies, branch, order = drawn
    by_shard = {reply.shard: reply for reply in replies}
    arrivals: dict[int, list[Reply]] = {}
    for number, (index, shards) in zip(count(), branches(by_shard, branch).items(), strict=False):
        members = [by_shard[shard] for shard in shards]
        if number % 2:
            arrivals[index] = [*members]
        else:
            total = summed(shards, 0, members).total
            assert total is not None
            arrivals[index] = [BranchReply(index, total, tuple(work for reply in members for work in reply.work))]
    flat = [
        reply for index in sorted(arrivals, key=lambda index: order[index % len(order)]) for reply in arrivals[index]
    ]
    tree = summed([*by_shard], branch, flat)
    if replies:
        assert_is(tree.total, oracle(replies, branch))
    assert [work.shard for work in tree.work] == [*by_shard]


def test_replies_that_are_missing_or_not_asked_for_are_refused() -> None:
    reply = ShardReply(0, 1, update_of(1.0, 2.0))
    tree = TreeSum([1, 2], 1)
    with pytest.raises(ValueError, match=r"replies are missing from the sum: shards \[1, 2\]"):
        _ = tree.total
    tree.add(reply)
    with pytest.raises(ValueError, match="part 1 is already in the sum"):
        tree.add(reply)
    with pytest.raises(ValueError, match="part 3 is already in the sum, or does not belong to it"):
        TreeSum([1], 0).add(replace(reply, shard=3))


def test_replies_are_dropped_once_they_are_added() -> None:
    """A thousand replies arrive in order; the tree has only the sums of the branch and of the branches before it."""
    tree = TreeSum(range(1_000), 10)
    for shard in range(1_000):
        tree.add(ShardReply(0, shard, update_of(1.0, 2.0)))
        kept = [fold.total for fold in (*tree._branches.values(), tree._total) if fold.total is not None]
        assert len(kept) <= 2
        assert not any(fold._early for fold in (*tree._branches.values(), tree._total))
    assert tree.total is not None
    assert tree.total.counts.users == 3_000


@given(st.integers(64, 100_000))
def test_the_default_branch_is_the_square_root_rounded_up(shards: int) -> None:
    branch = default_branch(shards)
    assert (branch - 1) ** 2 < shards <= branch**2
