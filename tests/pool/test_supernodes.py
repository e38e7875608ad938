"""The choice of SuperNodes for shards, on Flower's own grid with its state in memory."""

import threading
import time

import pytest
from flwr.app import Message, RecordDict
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from flsim.base.errors import Interrupted, RunFailed
from server.app import SuperNodes
from server.federated import rounds
from server.federated.rounds import wait_for_nodes
from server.stopping import Stop

RUN, TASK, FOREVER = 7, 8, 1e9


class Federation:
    """Flower's grid with its state in memory, as in its simulation, with nodes that join and leave."""

    def __init__(self) -> None:
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state, run = factory.state(), Run.create_empty(run_id=RUN)
        run.primary_task_id, run.federation_id = TASK, NOOP_FEDERATION_ID
        self.state.run_ids[RUN] = RunRecord(run=run)
        self.state.task_store[TASK] = Task(task_id=TASK, run_id=RUN)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, TASK
        self.grid = InMemoryGrid(state_factory=factory)
        self.grid.set_run(run)
        self.joined = 0

    def join(self) -> int:
        self.joined += 1
        node = self.state.create_node("", "", self.joined.to_bytes(32, "big"), 0)
        self.state.acknowledge_node_heartbeat(node, FOREVER)
        return int(node)

    def leave(self, node: int) -> None:
        self.state.deactivate_node(node)

    def asked(self, nodes: SuperNodes, shards: list[int], round_: int) -> list[int]:
        """Return the nodes to which the messages of shards are sent."""
        messages = [Message(RecordDict(), shard, "train", group_id=str(round_)) for shard in shards]
        assert len(nodes.push_messages(messages)) == len(shards)
        return [message.metadata.dst_node_id for message in messages]


def test_a_shard_keeps_its_supernode_while_supernodes_stay_the_same() -> None:
    federation = Federation()
    first, second = sorted([federation.join(), federation.join()])
    nodes = SuperNodes(federation.grid, 5, Stop())
    assert nodes.get_node_ids() == [0, 1, 2, 3, 4]  # more shards than SuperNodes
    for round_ in (1, 2):
        assert federation.asked(nodes, [0, 1, 2, 3, 4], round_) == [first, second, first, second, first]
        assert federation.asked(nodes, [3], round_ + 10) == [second]  # whichever other shards are in the round


def test_a_supernode_is_used_from_when_it_joins_until_it_leaves() -> None:
    federation = Federation()
    nodes = SuperNodes(federation.grid, 2, Stop())
    assert nodes.get_node_ids() == []
    first = federation.join()
    assert federation.asked(nodes, [0, 1], 1) == [first, first]
    second = federation.join()
    assert sorted(federation.asked(nodes, [0, 1], 2)) == sorted([first, second])
    federation.leave(first)
    assert federation.asked(nodes, [0, 1], 3) == [second, second]


def test_a_shard_that_is_requested_again_moves_to_another_supernode_also_in_later_rounds() -> None:
    """Flower still lists a SuperNode for a minute after it was killed."""
    federation = Federation()
    federation.join(), federation.join()
    nodes = SuperNodes(federation.grid, 2, Stop())
    dead, alive = federation.asked(nodes, [0, 1], 1)
    assert federation.asked(nodes, [0], 1) == [alive]
    assert federation.asked(nodes, [0, 1], 2) == [alive, alive]
    assert federation.asked(nodes, [0], 2) == [dead]  # all have failed: the one whose failure is the oldest
    assert federation.asked(nodes, [0], 2) == [alive]


def test_an_attempt_reports_that_it_waits_for_clients_until_a_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = Federation()
    nodes = SuperNodes(federation.grid, 2, Stop())
    monkeypatch.setattr(rounds, "WORTH_SAYING", 0.05)
    with pytest.raises(RunFailed, match=r"no client was available for 0\.1 s; continue the run with --resume"):
        wait_for_nodes(nodes, 2, Stop(), 0.1)
    assert capsys.readouterr().err == "Waiting up to 0.1 s for the first client process to start.\n"
    federation.join()
    assert wait_for_nodes(nodes, 2, Stop(), 0.1) == [0, 1]


def test_without_any_supernode_a_round_waits_for_one_or_for_the_end_of_the_run() -> None:
    federation, stop, came = Federation(), Stop(), []
    nodes = SuperNodes(federation.grid, 1, stop)

    def join() -> None:
        time.sleep(0.5)
        came.append(federation.join())

    thread = threading.Thread(target=join)
    thread.start()
    assert federation.asked(nodes, [0], 1) == came
    thread.join()
    federation.leave(came[0])
    stop.set()
    with pytest.raises(Interrupted):
        federation.asked(nodes, [0], 2)
