"""Machines of a Ray cluster join, leave, and take with them what was on them: the result is that of one machine."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from faulty import OPTIONS, assert_equal_runs, ended, events, sick_client, wait_for
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers import Experiment, MakeCorpus, start, wait_for_round
from raynodes import free_place, joined, named, tree
from waiting import wait_until

from server.cluster.nodes import Nodes
from server.cluster.start import cluster
from server.pool.grid import ClientShare, ray_grid

HERE = Path()  # of the experiment, where the function below runs
SHARDS = ("--set", "system.shards=3", "--set", "training.cohort=18")  # so that all shards have users in most rounds
MILLION = np.arange(1_000_000)
app = ClientApp()


@app.train()
def reply_with_a_million(message: Message, context: Context) -> Message:
    """Too large for a message of Ray's: it lies in the memory of the machine that made it."""
    return Message(RecordDict({"much": ArrayRecord({"array": Array(MILLION)})}), reply_to=message)


def waits_while_held(users: list[int]) -> None:
    while (HERE / "hold").exists():
        time.sleep(0.05)


@pytest.mark.slow
def test_three_machines_train_what_one_does_and_one_that_dies_is_not_missed(experiment: Experiment) -> None:
    """The second and the third join while the first round waits for them; the third dies in the middle of another."""
    hold, three = experiment.folder / "hold", experiment.folder / "three"
    experiment.flsim("run", experiment.config, "--out", "one", *OPTIONS, *SHARDS)
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
        time.sleep(0.5)  # all three have their shard of a round now
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
def test_a_reply_that_is_lost_with_its_machine_is_made_again(
    tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is there, nobody has fetched it, and its machine dies: Ray calls the object lost."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("seed = 0\n")
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{folder.parent / 'support'}")  # of the clients, which import this file
    place = free_place()
    with cluster(cpus=0, head=place):
        machines = Nodes(run, make_corpus([[[1]]]).path)
        with ray_grid(f"{Path(__file__).stem}:app", 1, ClientShare(1), machines) as grid:
            with joined(place) as first:
                wait_until(lambda: grid.get_node_ids() == [0])
                sent = grid.push_messages([Message(RecordDict(), 0, "train")])
                job = grid._processes[0].job
                assert job is not None
                reply = job.replied  # the arrays; the rest of the reply is small, and comes by itself
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
