"""Sums of branches in client processes: a process that is killed, a machine that leaves with what it holds."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest
import ray
from faulty import OPTIONS, SETTINGS, assert_equal_runs, digests, ended, events, kill, resume, wait_for
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers import Experiment, MakeCorpus, start, wait_for_round
from raynodes import free_place, joined, named, tree
from waiting import wait_until

from server.cluster.nodes import Nodes
from server.cluster.start import cluster
from server.pool.client import sum_request
from server.pool.grid import ClientShare, RayGrid, ray_grid

MILLION = np.arange(1_000_000.0)
app = ClientApp()


@app.train()
def reply_with_a_million(message: Message, context: Context) -> Message:
    """Too large for a message of Ray's: it lies in the memory of the machine that made it."""
    record = ArrayRecord({"array": Array(MILLION * (1 + int(context.node_config["partition-id"])))})
    return Message(RecordDict({"much": record}), reply_to=message)


@pytest.fixture
def machines(tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run folder and a corpus for nodes to see."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("seed = 0\n")
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{folder.parent / 'support'}")  # of the clients, which import this file
    return run, make_corpus([[[1]]]).path


@contextmanager
def holding(machines: tuple[Path, Path], shards: int) -> Iterator[RayGrid]:
    with ray_grid(f"{Path(__file__).stem}:app", shards, ClientShare(1), Nodes(*machines), holds=True) as grid:
        yield grid


def answers(grid: RayGrid, messages: list[Message]) -> list[Message]:
    """All replies, in the order of the messages."""
    replies = grid.send_and_receive(messages, timeout=120)
    assert len(replies) == len(messages)
    return sorted(replies, key=lambda reply: int(reply.metadata.reply_to_message_id))


def requests(*nodes: int) -> list[Message]:
    return [Message(RecordDict(), node, "train", group_id="1") for node in nodes]


@pytest.mark.nightly
def test_sums_that_a_machine_takes_with_it_are_asked_for_again(machines: tuple[Path, Path]) -> None:
    """Two machines hold a part each; one dies. Its part is gone, the sum fails, and both are made again."""
    place = free_place()
    with cluster(cpus=0, head=place), holding(machines, 2) as grid, joined(place):
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
from server.pool import client

HERE, add = Path({folder!r}), client.Client.sum

def waits(self, *arguments):
    if (HERE / "hold").exists():
        (HERE / "adds").write_text(str(os.getpid()))
    while (HERE / "hold").exists():
        time.sleep(0.05)
    return add(self, *arguments)

client.Client.sum = waits
"""
TREE = ("--set", "system.shards=6", "--set", "system.branch=2", "--set", "training.cohort=18")


@pytest.fixture
def slow_sums(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands whose client processes add nothing while the returned file is there; they write who would add."""
    folder = experiment.folder / "slow_sums"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH.format(folder=str(experiment.folder)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return experiment.folder / "hold"


def during_a_sum(experiment: Experiment, hold: Path, *options: str) -> tuple["Popen[bytes]", int]:
    """A run whose sum of a branch waits, after some rounds, and the process that would add it."""
    process = start(experiment, "--out", "hurt", *OPTIONS, *TREE, *options)
    wait_for_round(experiment.folder / "hurt", 3)
    hold.touch()
    wait_for(experiment.folder / "adds", r"\d+")
    return process, int((experiment.folder / "adds").read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("by", [pytest.param(signal.SIGKILL, marks=pytest.mark.nightly), signal.SIGSTOP])
def test_a_process_that_ends_or_hangs_while_it_adds_changes_nothing(
    experiment: Experiment, slow_sums: Path, by: signal.Signals
) -> None:
    whole = experiment.run("whole", *SETTINGS, *TREE[1::2])
    process, adding = during_a_sum(experiment, slow_sums, "--set", "system.deadline=10")
    kill(adding, by)
    slow_sums.unlink()
    code, said = ended(experiment, process)
    assert code == 0, said
    assert_equal_runs(experiment.folder / "hurt", whole)
    log = (experiment.folder / "hurt" / "log.jsonl").read_text()
    reason = "its process died" if by == signal.SIGKILL else "no reply within 10 s"
    asked = re.findall(rf'"shard asked again".*"shard": (\d+), "reason": "the sum of its branch failed: {reason}', log)
    assert {int(shard) // 2 for shard in asked} == {int(asked[0]) // 2}
    assert set(events(experiment.folder / "hurt")) >= {"client process ended", "completed"}


@pytest.mark.nightly
def test_a_run_that_is_killed_while_a_branch_is_added_goes_on(experiment: Experiment, slow_sums: Path) -> None:
    whole = experiment.run("whole", *SETTINGS, *TREE[1::2])
    process, _ = during_a_sum(experiment, slow_sums)
    process.kill()
    process.wait()
    slow_sums.unlink()
    assert len(digests(experiment.folder / "hurt")) < 30
    resume(experiment, "hurt", *TREE)
    assert_equal_runs(experiment.folder / "hurt", whole)
