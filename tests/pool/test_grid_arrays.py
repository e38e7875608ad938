"""Arrays of messages on a real, local Ray: sent once, held by their process, added in order, requested again."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from raynodes import replies_of
from waiting import wait_until

from flsim.algorithms.summation import BranchReply, Reply, RoundRequest, ShardReply, TreeSum
from flsim.algorithms.wire import Address, decode_reply, decode_request, encode_reply, encode_requests
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.training.update import Counts, UpdateSum
from server.cluster.start import Nodes
from server.federated.rounds import Deadline, Exchange
from server.pool.grid import PULLED, ClientShare, Job, RayGrid, ray_grid, sum_request
from server.stopping import Stop

pytestmark = pytest.mark.usefixtures("local_ray")
VALUES = (1.0, 2.0**53, 3.0, -(2.0**53), 5.0, 7.0)  # of shards; ((1 + 2^53) + 3) - 2^53 = 4: large floats are even
SIZE = 30_000  # 240 kB, which Ray does not send with a reply
PARAMS = {"weight": torch.zeros(SIZE)}
app = ClientApp()


@app.train()
def reply_with_value(message: Message, context: Context) -> Message:
    """Reply with the shard's value plus the parameters, and log the call; raise once if a file asks for it."""
    request, address = decode_request(message.content)
    folder = Path(address.run)
    with (folder / "calls").open("a") as calls:
        calls.write(f"{request.shard}\n")
    if (fails := folder / f"fail{request.shard}").exists():
        fails.unlink()
        raise KeyError("told to fail")
    delta = {"weight": torch.full((SIZE,), VALUES[request.shard]).double() + request.params["weight"]}
    request.params["weight"].fill_(9.0)  # the client's own copy
    update = UpdateSum(delta, Counts(VALUES[request.shard], 1, 0.5, 2))
    return Message(encode_reply(ShardReply(request.round, request.shard, update, str(os.getpid()))), reply_to=message)


@pytest.fixture(scope="module")
def six_nodes(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayGrid]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.toml").write_text("seed = 0\n")
    corpus = make_synthetic(folder / "corpus", SyntheticHParams(users=2, test_users=1, heldout_users=0), 0)
    machines = Nodes(folder, corpus.path, is_local=True)
    with ray_grid(f"{Path(__file__).stem}:app", len(VALUES), ClientShare(1), machines) as grid:
        wait_until(lambda: len(grid.get_node_ids()) == len(VALUES))
        yield grid


@pytest.fixture
def grid(request: pytest.FixtureRequest, six_nodes: RayGrid) -> RayGrid:
    """Return a grid that holds arrays or does not; the driver decides this for each job."""
    six_nodes._holds = request.param
    return six_nodes


plain = pytest.mark.parametrize("grid", [False], indirect=True)
holding = pytest.mark.parametrize("grid", [True], indirect=True)


def requests(*shards: int, folder: Path, params: dict[str, torch.Tensor] = PARAMS) -> list[Message]:
    sent = {"control": params}
    asked = [RoundRequest(0, shard, np.array([shard]), params, sent=sent) for shard in shards]
    contents = encode_requests(asked, Address(str(folder), "digest"))
    return [Message(content, shard, "train", group_id="1") for shard, content in zip(shards, contents, strict=True)]


@plain
def test_parameters_are_stored_once_and_each_client_gets_its_own_copy(grid: RayGrid, tmp_path: Path) -> None:
    messages = requests(*range(6), folder=tmp_path, params={"weight": torch.full((SIZE,), 0.25)})
    stored: dict[int, ray.ObjectRef] = {}
    jobs = [grid._job(message, stored) for message in messages]
    for name in ("params", "sent"):
        assert len({job.arrays[name] for job in jobs}) == 1
    assert len(stored) == 2
    assert all(not job.message.content.array_records for job in jobs)
    replies = [decode_reply(reply.content) for reply in replies_of(grid, messages)]
    assert {reply.shard: reply.update.delta["weight"][0].item() for reply in replies} == {
        shard: value + 0.25 for shard, value in enumerate(VALUES)
    }


@plain
def test_few_replies_with_arrays_are_fetched_at_a_time(grid: RayGrid, tmp_path: Path) -> None:
    ids = grid.push_messages(requests(*range(6), folder=tmp_path))

    def have_all_come() -> bool:
        grid._advance()
        return len(grid._replies) == 6

    wait_until(have_all_come)
    assert [len(grid.pull_messages(ids)) for _ in range(3)] == [PULLED, 6 - PULLED, 0]


@plain
def test_nothing_of_a_round_is_kept_once_its_replies_are_taken(grid: RayGrid, tmp_path: Path) -> None:
    """Ray forgets parameters and sums when the last reference to them is gone, and jobs hold these references."""
    before = jobs_in_memory()
    for _ in range(3):
        assert len(replies_of(grid, requests(*range(6), folder=tmp_path))) == 6
    assert jobs_in_memory() == before


def jobs_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is Job for thing in gc.get_objects())


def exchanged(grid: RayGrid, folder: Path, branch: int, *shards: int) -> list[Reply]:
    """Return the replies of a round, in the order of their arrival."""
    exchange = Exchange(grid, len(VALUES), branch, Address(str(folder), "digest"), Deadline(None), 2, Stop())
    return [*exchange.send([RoundRequest(0, shard, np.array([shard]), PARAMS) for shard in shards])]


@pytest.mark.parametrize("grid", [False, True], indirect=True)
def test_a_shard_that_fails_is_requested_again_and_held_sums_are_kept(grid: RayGrid, tmp_path: Path) -> None:
    """In this round, shard 1 fails once, and shard 4 has no users."""
    shards = (0, 1, 2, 3, 5)
    (tmp_path / "fail1").touch()
    replies = exchanged(grid, tmp_path, 2, *shards)
    assert sorted(map(int, (tmp_path / "calls").read_text().split())) == [0, 1, 1, 2, 3, 5]
    tree = TreeSum(shards, 2)
    for reply in replies:
        tree.add(reply)
    assert tree.total is not None
    expected = ((VALUES[0] + VALUES[1]) + (VALUES[2] + VALUES[3])) + VALUES[5]
    assert expected != sum(VALUES[shard] for shard in shards)
    assert tree.total.counts.weight == tree.total.delta["weight"][0].item() == expected
    assert (tree.total.counts.users, tree.total.counts.tokens) == (5, 10)
    assert [work.shard for work in tree.work] == [*shards]
    if grid._holds:
        assert {type(reply) for reply in replies} == {BranchReply}
        first, *_, last = replies
        assert (first.work[0].shard in (2, 5), last.work[0].shard) == (True, 0)  # complete branches do not wait
    assert not grid._held


@holding
def test_held_sums_are_added_in_the_requested_order(grid: RayGrid, tmp_path: Path) -> None:
    """A newer message to a node deletes the sum that the node holds."""

    def summed(*shards: int) -> float:
        replies = replies_of(grid, requests(*shards, folder=tmp_path))
        assert [[*reply.content.array_records] for reply in replies] == [[]] * len(shards)
        assert {decode_reply(reply.content).update.counts.weight for reply in replies} == {
            VALUES[shard] for shard in shards
        }
        assert set(grid._held) == set(shards)
        (reply,) = replies_of(grid, [sum_request([*shards], "1")])
        assert not grid._held
        values = reply.content.array_records["delta"]["weight"].numpy()
        assert len(set(values.tolist())) == 1
        return float(values[0])

    assert summed(0, 1, 2, 3) == 4.0
    assert summed(0, 2, 1, 3) == 4.0  # ((1 + 3) + 2^53) - 2^53
    assert summed(1, 0, 3, 2) == 3.0  # ((2^53 + 1) - 2^53) + 3
    assert summed(5) == 7.0
    replies_of(grid, requests(0, 1, folder=tmp_path))
    assert set(grid._held) == {0, 1}
    ids = grid.push_messages(requests(1, folder=tmp_path))
    assert set(grid._held) == {0}
    wait_until(lambda: bool(grid.pull_messages(ids)))
