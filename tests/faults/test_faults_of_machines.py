"""Runs have the result of one machine if machines of a cluster join, or leave and lose the data that they hold."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from faulty import OPTIONS, SETTINGS, assert_equal_runs, ended, events, kill, sick_client, wait_for
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers import TINY, Experiment, MakeCorpus, start, wait_for_round
from raynodes import free_place, joined, named, replies_of, tree
from waiting import wait_until

from server.cluster.start import Nodes, cluster
from server.pool.grid import ClientShare, RayGrid, ray_grid, sum_request

HERE = Path()  # replaced by the experiment's folder in the clients that run `waits_while_held`
SHARDS = ("--set", "system.shards=3", "--set", "training.cohort=18")  # all shards have users in most rounds
MILLION = np.arange(1_000_000.0)
APP = f"{Path(__file__).stem}:app"
app = ClientApp()


@app.train()
def reply_with_a_million(message: Message, context: Context) -> Message:
    """Return a reply too large for a message of Ray; it stays in the memory of the machine that made it."""
    record = ArrayRecord({"array": Array(MILLION * (1 + int(context.node_config["partition-id"])))})
    return Message(RecordDict({"much": record}), reply_to=message)


@pytest.fixture
def machines(tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a run folder and a corpus that nodes can read."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(TINY)
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{folder.parent / 'support'}")  # clients import this file
    return run, make_corpus([[[1]]]).path


def waits_while_held(users: list[int]) -> None:
    while (HERE / "hold").exists():
        time.sleep(0.05)


@pytest.mark.slow
def test_three_machines_of_which_one_dies_have_the_result_of_one_machine(experiment: Experiment) -> None:
    """The second and the third machine join while the first round waits; the third dies during a later round."""
    hold, three = experiment.folder / "hold", experiment.folder / "three"
    experiment.run("one", *SETTINGS, *SHARDS[1::2], options=["--in-process"])
    sick_client(experiment, waits_while_held)
    hold.touch()
    place = free_place()
    process = start(experiment, "--out", "three", *OPTIONS, *SHARDS, "--head", place, "--cpus", "1")
    wait_for(experiment.folder / "said", "other machines join with: ray start --address")
    with joined(place), joined(place) as third:
        wait_until(lambda: events(three).count("client process started") == 3)
        hold.unlink()
        wait_for_round(three, 5)
        hold.touch()
        time.sleep(0.5)  # now all three machines have their shard of a round
        named(tree(third), "raylet").kill()
        wait_for(three / "log.jsonl", "machine left|client failed|node .* left")
        hold.unlink()
        code, said = ended(experiment, process)
    assert code == 0, said
    assert_equal_runs(three, experiment.folder / "one")
    machines = [{worker.split("/")[0] for worker in line["workers"]} for line in lines(three)]
    assert len(set.union(*machines)) == 3
    assert len(set.union(*machines[-5:])) == 2


@pytest.mark.nightly
def test_a_reply_that_is_lost_with_its_machine_can_be_requested_again(machines: tuple[Path, Path]) -> None:
    """The machine dies after the reply is ready and before anybody fetches it: Ray reports the object as lost."""
    place = free_place()
    with cluster(cpus=0, head=place), ray_grid(APP, 1, ClientShare(1), Nodes(*machines)) as grid:
        with joined(place) as first:
            wait_until(lambda: grid.get_node_ids() == [0])
            sent = grid.push_messages([Message(RecordDict(), 0, "train")])
            job = grid._processes[0].job
            assert job is not None
            reply = job.replied  # the arrays; the rest of the reply is small and is sent separately
            assert ray.wait([reply], timeout=60, fetch_local=False)[0]
            named(tree(first), "raylet").kill()
            wait_until(lambda: len(ray.nodes()) - sum(node["Alive"] for node in ray.nodes()) == 1)
            with pytest.raises(ray.exceptions.RayError):
                ray.get(reply)
            del reply, job
        with joined(place):
            answers: list[Message] = []

            def is_answered() -> bool:
                nonlocal sent
                answers.extend(grid.pull_messages(sent))
                if answers and answers[-1].has_error():
                    lost = answers.pop()
                    assert re.search("died|lost", lost.error.reason or ""), lost.error.reason
                    sent = grid.push_messages([Message(RecordDict(), 0, "train")])
                return bool(answers)

            wait_until(is_answered)
    (answer,) = answers
    assert np.array_equal(answer.content.array_records["much"]["array"].numpy(), MILLION)


def lines(run: Path) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


# Client processes add sums of branches: a process is killed, or a machine leaves with the parts that it holds.


def answers(grid: RayGrid, messages: list[Message]) -> list[Message]:
    """Return all replies, in the order of the messages."""
    return sorted(replies_of(grid, messages), key=lambda reply: int(reply.metadata.reply_to_message_id))


def requests(*nodes: int) -> list[Message]:
    return [Message(RecordDict(), node, "train", group_id="1") for node in nodes]


@pytest.mark.nightly
def test_parts_of_a_sum_that_a_machine_loses_can_be_requested_again(machines: tuple[Path, Path]) -> None:
    """Two machines hold one part each, and one machine dies. Its part is lost, the sum fails, and both are repeated."""
    place = free_place()
    with (
        cluster(cpus=0, head=place),
        ray_grid(APP, 2, ClientShare(1), Nodes(*machines), holds=True) as grid,
        joined(place),
    ):
        with joined(place) as second:
            wait_until(lambda: len(grid.get_node_ids()) == 2 and len(grid._processes.idle()) == 2)
            held = answers(grid, requests(0, 1))
            assert [[*reply.content.array_records] for reply in held] == [[], []]
            assert len({part.machine for part in grid._held.values()}) == 2
            (whole,) = answers(grid, [sum_request([0, 1], "1")])
            assert np.array_equal(whole.content.array_records["much"]["array"].numpy(), 3 * MILLION)
            assert not grid._held
            answers(grid, requests(0, 1))
            assert len({part.machine for part in grid._held.values()}) == 2
            named(tree(second), "raylet").kill()
            wait_until(lambda: len(ray.nodes()) - sum(node["Alive"] for node in ray.nodes()) == 1)
            (lost,) = answers(grid, [sum_request([0, 1], "1")])
            assert lost.has_error()
            assert lost.error.reason == "data on another machine was lost when that machine left the cluster"
        answers(grid, requests(0, 1))
        (whole,) = answers(grid, [sum_request([0, 1], "1")])
        assert np.array_equal(whole.content.array_records["much"]["array"].numpy(), 3 * MILLION)


PATCH = """
import os, time
from pathlib import Path
from server.pool import grid

HERE, add = Path({folder!r}), grid.Client.sum

def waits(self, *arguments):
    if (HERE / "hold").exists():
        (HERE / "adds").write_text(str(os.getpid()))
    while (HERE / "hold").exists():
        time.sleep(0.05)
    return add(self, *arguments)

grid.Client.sum = waits
"""
TREE = ("--set", "system.shards=6", "--set", "system.branch=2", "--set", "training.cohort=18")


@pytest.fixture
def slow_sums(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make client processes wait before they add while the returned file exists, and write the waiting process's id."""
    folder = experiment.folder / "slow_sums"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH.format(folder=str(experiment.folder)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return experiment.folder / "hold"


@pytest.mark.nightly
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_hangs_while_it_adds_changes_nothing(
    experiment: Experiment, slow_sums: Path, by: signal.Signals
) -> None:
    """After three rounds, the sum of a branch waits in a client process, which is then killed or stopped."""
    whole = experiment.run("whole", *SETTINGS, *TREE[1::2], options=["--in-process"])
    process = start(experiment, "--out", "hurt", *OPTIONS, *TREE, "--set", "system.deadline=10")
    wait_for_round(experiment.folder / "hurt", 3)
    slow_sums.touch()
    wait_for(experiment.folder / "adds", r"\d+")
    kill(int((experiment.folder / "adds").read_text()), by)
    slow_sums.unlink()
    code, said = ended(experiment, process)
    assert code == 0, said
    assert_equal_runs(experiment.folder / "hurt", whole)
    log = (experiment.folder / "hurt" / "log.jsonl").read_text()
    reason = "its process died" if by == signal.SIGKILL else "no reply within 10 s"
    asked = re.findall(rf'"shard asked again".*"shard": (\d+), "reason": "the sum of its branch failed: {reason}', log)
    assert {int(shard) // 2 for shard in asked} == {int(asked[0]) // 2}
    assert set(events(experiment.folder / "hurt")) >= {"client process ended", "completed"}
