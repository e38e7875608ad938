"""A run on two machines with a slow, lossy or temporarily cut network has the result of one machine."""

import json
import os
import time

import pytest
from faulty import OPTIONS, SETTINGS, assert_equal_runs, events, go_on, sick_client, wait_for
from helpers import Experiment, Trained, start, wait_for_round
from network_emulation import HOSTS, joined_machines
from raynodes import started
from waiting import wait_until

DELAY, LOSS = 0.1, 0.05  # seconds each way; share of the packets
SHARDS = ("system.shards=2", "training.cohort=12")  # both shards have users in most rounds
PLACE = f"{HOSTS[0]}:6379"


@pytest.mark.skipif("CHAOS_KILLS" not in os.environ, reason="minutes: of `make chaos`")
@pytest.mark.parametrize("seconds", [0, 20, 60])
def test_a_network_that_is_slow_or_cut_changes_nothing(experiment: Experiment, trained: Trained, seconds: int) -> None:
    alone = trained(*SETTINGS, *SHARDS)
    sick_client(experiment, most=0)
    options = (*OPTIONS, *(part for text in SHARDS for part in ("--set", text)))
    run = experiment.folder / "apart"
    with joined_machines(experiment.folder, DELAY, LOSS) as line:
        here, there = line.within
        process = start(experiment, "--out", "apart", *options, "--head", PLACE, "--cpus", "1", within=here)
        wait_for(experiment.folder / "said", "other machines join with: ray start --address")
        with started("--address", PLACE, "--num-cpus=1", within=there):
            wait_until(lambda: events(run).count("client process started") == 2)
            go_on(experiment)
            wait_for_round(run, 8)
            if seconds:
                line.cut.touch()
                time.sleep(seconds)
                line.cut.unlink()
            assert process.wait(timeout=600) == 0, (experiment.folder / "said").read_text()
    assert_equal_runs(run, alone)
    machines = [
        {worker.split("/")[0] for worker in json.loads(line)["workers"]}
        for line in (run / "rounds.jsonl").read_text().splitlines()
    ]
    assert len(set.union(*machines[:8])) == 2
