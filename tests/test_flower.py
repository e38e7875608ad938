"""Rounds on Flower and Ray equal the same rounds without them, for any number of shards; also messages of clients."""

import json
import os
import re
import signal
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import (
    PRIVATE,
    Experiment,
    Trained,
    assert_close,
    assert_same,
    final_params,
    final_state,
    finish,
    start,
    wait_for_round,
)
from power.resuming import without_ray

from flsim.algorithms import fedavg
from flsim.algorithms.checkpoint import model_of
from flsim.algorithms.rounds import engine_of
from flsim.algorithms.summation import RoundRequest, ShardReply
from flsim.algorithms.wire import Address, decode_reply, decode_request, encode_reply, encode_requests
from flsim.models.architectures import ModelHParams
from flsim.privacy.sampling import draw_cohort
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.training.update import Counts, State, UpdateSum


def train_without_flower(run: Run, rounds: int) -> State:
    """Return the state after rounds of the paper's algorithm, which runs here as a plain loop."""
    config, training, seed = run.federated, run.federated.training, run.config.seed
    state = fedavg.init(run.corpus.layout.vocabulary_size, config.model, seed, training, config.privacy)
    engine = engine_of(config.system.engine, model_of(run.provenance), run.corpus.layout, config.local)
    bounds = [len(run.users) * shard // config.system.known_shards for shard in range(config.system.known_shards + 1)]
    for round_ in range(rounds):
        cohort = draw_cohort(seed, round_, len(run.users), training.cohort, training.sampler).tolist()
        total = UpdateSum.zero(state.params)
        for first, last in pairwise(bounds):
            members = [user for user in cohort if first <= user < last]
            total = total.merge(engine.train(state.params, run.users, members, seed, round_, state.clip))
        size = run.corpus.layout.vocabulary_size
        state, _ = fedavg.step(
            state, total, training, config.privacy, seed=seed, population=len(run.users), vocabulary_size=size
        )
    return state


def test_results_depend_on_the_seed_and_not_on_shards_or_workers(experiment: Experiment, trained: Trained) -> None:
    first = trained()
    shards = Run.open(first).federated.system.known_shards
    assert_same(first, experiment.run("again", f"system.shards={shards}", options=["--in-process"]))
    assert_close(first, experiment.run("shards5", "system.shards=5", options=["--in-process"]))
    other = train_without_flower(Run.create(config.load(experiment.config, ["seed=1"]), experiment.folder / "other"), 4)
    assert not any(torch.equal(value, other.params[name]) for name, value in final_params(first).items())


@pytest.mark.slow
def test_a_private_run_equals_the_paper_s_loop_whatever_the_shards(experiment: Experiment) -> None:
    """With an expected cohort size of 1, about a third of rounds have no users, but add noise and cost epsilon."""
    settings = (*PRIVATE, "training.cohort=1", "privacy.count_noise=0.5", "training.rounds=8", "evaluation.every=8")
    path = experiment.run("run", *settings, "system.shards=2")
    expected = train_without_flower(Run.open(path), 8)
    state = final_state(path)
    assert all(torch.equal(value, expected.params[name]) for name, value in state.params.items())
    assert (state.clip, state.ledger) == (expected.clip, expected.ledger)
    users = [json.loads(line)["users"] for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert 0 in users
    assert max(users) > 1
    overrides = [part for text in (*settings, "system.shards=5", "privacy.delta=0.05") for part in ("--set", text)]
    done = experiment.call("run", experiment.config, "--out", "other", "--in-process", *overrides)
    messages = " ".join(done.stderr.split())
    assert "privacy.delta 0.05 is not below 1 / 24 users" in messages
    assert "other: user-level privacy after poisson sampling, delta 0.05: epsilon " in messages
    other = experiment.folder / "other"
    for name, value in final_params(path).items():
        torch.testing.assert_close(final_params(other)[name], value, rtol=1e-6, atol=1e-6)
    assert final_state(other).ledger == state.ledger
    assert final_state(other).clip == pytest.approx(state.clip, rel=1e-12)


def test_a_run_that_no_machine_can_train_leaves_no_folder(experiment: Experiment) -> None:
    options = ("--set", "system.cpus_per_client=4096")
    with without_ray():
        done = experiment.call("run", experiment.config, "--out", "new", *options, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "4096 CPUs" in done.stderr.splitlines()[-1]
    assert not (experiment.folder / "new").exists()


# A run that cannot continue reports the reason; here all clients fail. Other faults are in tests/faults.


@pytest.mark.nightly
def test_a_client_that_keeps_failing_fails_the_run(experiment: Experiment) -> None:
    """The run's settings change during training, so shards fail; the run ends instead of averaging without them."""
    process = start(experiment, "--out", "broken", "--set", "training.rounds=4000", "--set", "system.retries=1")
    workers = wait_for_round(experiment.folder / "broken", 3)
    config = experiment.folder / "broken" / "config.toml"
    config.write_text(config.read_text().replace("batch_size = 4", "batch_size = 5"))
    for worker in workers:  # their replacements read the settings again
        os.kill(int(worker.split("/")[1]), signal.SIGKILL)
    code, said = finish(experiment, process)
    assert code == 1
    assert re.search(r"^flsim: round \d+: shard [01] failed 2 times, last with: ", said, re.MULTILINE)
    about = json.loads((experiment.folder / "broken" / "run.json").read_text())
    assert about["status"] == "failed"
    assert "failed 2 times" in about["reason"]


PARAMS = fedavg.init(12, ModelHParams(3, 5), seed=0).params
ADDRESS = Address("/runs/a", "c0ffee")


@pytest.mark.parametrize(("users", "clip"), [([], None), ([0], 0.2), ([3, 392_000, 5], 1 / 3)])
def test_a_request_arrives_as_sent(users: list[int], clip: float | None) -> None:
    slots = {"control": {name: value + 1 for name, value in PARAMS.items()}} if users else {}
    sent = RoundRequest(8_000, 7, np.array(users, np.int64), PARAMS, clip, slots, 40)
    got, address = decode_request(encode_requests([sent], ADDRESS)[0])
    assert (got.clip, got.oldest_resumable_round, got.sent.keys()) == (clip, 40, slots.keys())
    for slot, of in slots.items():
        assert all(torch.equal(got.sent[slot][name], value) for name, value in of.items())
    assert (address, got.round, got.shard) == (ADDRESS, sent.round, sent.shard)
    assert got.users.tolist() == users
    assert all(torch.equal(got.params[name], value) for name, value in PARAMS.items())


def test_decoded_requests_share_no_memory() -> None:
    """A client may overwrite its parameters without effect on others; each request carries its own parameters."""
    other = {name: value + 1 for name, value in PARAMS.items()}
    sent = [RoundRequest(0, shard, np.array([shard]), params) for shard, params in enumerate((PARAMS, other, PARAMS))]
    got = [decode_request(content)[0] for content in encode_requests(sent, ADDRESS)]
    assert [request.shard for request in got] == [0, 1, 2]
    for value in got[0].params.values():
        value.fill_(7)
    for request, params in zip(got[1:], (other, PARAMS), strict=True):
        assert all(torch.equal(request.params[name], value) for name, value in params.items())
    assert encode_requests([], ADDRESS) == []


@pytest.mark.parametrize("loss", [1.5, 0.0, float("inf")])
def test_a_reply_arrives_as_sent_in_float64(loss: float) -> None:
    delta = {name: value.double() / 3 for name, value in PARAMS.items()}
    sent = ShardReply(2, 1, UpdateSum(delta, Counts(250.0, 3, loss, 1_999, 1 / 3, 2, 1, 251)), "node/17", 1 / 7)
    got = decode_reply(encode_reply(sent))
    assert (got.round, got.shard, got.worker, got.seconds) == (2, 1, "node/17", 1 / 7)
    assert replace(got.update, delta={}) == replace(sent.update, delta={})
    for count in ("users", "tokens", "clipped", "non_finite", "examples"):
        assert type(getattr(got.update.counts, count)) is int
    for name, value in delta.items():
        assert got.update.delta[name].dtype == torch.float64
        assert torch.equal(got.update.delta[name], value)
