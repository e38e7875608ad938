"""The grid within one process: one answer at a time, newer messages in place of older ones, errors as answers."""

from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from server.federated.launch import InProcessGrid

app = ClientApp()
served: list[int] = []
APP = f"{Path(__file__).stem}:app"


@app.train()
def reply_with_its_number(message: Message, context: Context) -> Message:
    number = message.content.config_records["asked"]["number"]
    served.append(number)
    if number < 0:
        raise ValueError(f"{number} is\nbelow 0")
    about = ConfigRecord({"number": number, "run": context.run_id, **context.node_config})
    return Message(RecordDict({"about": about}), reply_to=message)


def request(node: int, number: int) -> Message:
    return Message(RecordDict({"asked": ConfigRecord({"number": number})}), node, "train", group_id="1")


def about(reply: Message) -> tuple[int, int, int]:
    record = reply.content.config_records["about"]
    return record["partition-id"], record["num-partitions"], record["number"]


@pytest.fixture
def grid() -> InProcessGrid:
    served.clear()
    return InProcessGrid(APP, 3)


def test_each_pull_answers_one_message_in_the_order_of_pushing(grid: InProcessGrid) -> None:
    ids = grid.push_messages([request(2, 5), request(0, 6), request(1, 7)])
    assert served == []
    replies = [grid.pull_messages(ids) for _ in range(4)]
    assert [[about(reply) for reply in some] for some in replies] == [[(2, 3, 5)], [(0, 3, 6)], [(1, 3, 7)], []]
    assert [reply.metadata.reply_to_message_id for (reply,) in replies[:3]] == ids


def test_only_what_is_asked_for_is_answered(grid: InProcessGrid) -> None:
    first, second = grid.push_messages([request(0, 1), request(1, 2)])
    assert about(grid.pull_messages([second])[0]) == (1, 3, 2)
    assert grid.pull_messages([second]) == []
    assert about(grid.pull_messages([first])[0]) == (0, 3, 1)


def test_a_newer_message_to_a_node_replaces_an_unanswered_one(grid: InProcessGrid) -> None:
    old = grid.push_messages([request(0, 1), request(1, 2)])
    new = grid.push_messages([request(0, 3)])
    assert [about(reply) for _ in range(3) for reply in grid.pull_messages([*old, *new])] == [(1, 3, 2), (0, 3, 3)]
    assert served == [2, 3]


def test_an_error_is_an_answer_with_its_reason_in_a_line(grid: InProcessGrid) -> None:
    bad, good = grid.send_and_receive([request(0, -1), request(1, 1)])
    assert bad.has_error()
    assert bad.error.reason == "ValueError: -1 is below 0"
    assert about(good) == (1, 3, 1)


def test_each_grid_is_a_run_of_its_own_to_clients(grid: InProcessGrid) -> None:
    """So that a client that trained a run opens it anew for the next grid."""
    replies = [one.send_and_receive([request(0, 1)])[0] for one in (grid, InProcessGrid(APP, 1))]
    first, second = (reply.content.config_records["about"]["run"] for reply in replies)
    assert first != second
