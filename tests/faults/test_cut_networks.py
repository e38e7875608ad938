"""Two machines whose network is slow, loses packets, or is cut for a while: the result is that of one machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faulty import OPTIONS, SETTINGS, assert_equal_runs, events, go_on, sick_client, wait_for
from helpers import Experiment, Trained, start, wait_for_round
from network_emulation import HOSTS, joined_machines
from raynodes import started
from waiting import wait_until

DELAY, LOSS = 0.1, 0.05  # seconds each way; share of the packets
PACKETS = 200
SHARDS = ("system.shards=2", "training.cohort=12")  # so that both have users in most rounds
PLACE = f"{HOSTS[0]}:6379"


SEND = f"""
import socket, time
sender = socket.socket(type=socket.SOCK_DGRAM)
for _ in range({PACKETS}):
    sender.sendto(str(time.monotonic()).encode(), ({HOSTS[1]!r}, 9))
    time.sleep(0.005)
"""
RECEIVE = f"""
import socket, time
receiver = socket.socket(type=socket.SOCK_DGRAM)
receiver.bind(({HOSTS[1]!r}, 9))
print("up", flush=True)
while (packet := receiver.recv(100)) != b"over":
    print(time.monotonic() - float(packet), flush=True)
"""
OVER = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'over', ({HOSTS[1]!r}, 9))"


def test_the_line_delays_loses_and_is_cut(tmp_path: Path) -> None:
    def arrived() -> list[float]:
        """Seconds that packets from one to the other took."""
        command = [*line.within[1], sys.executable, "-c", RECEIVE]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "up\n"
            subprocess.run([*line.within[0], sys.executable, "-c", SEND], check=True)
            time.sleep(2 * DELAY)
            subprocess.run([*line.within[1], sys.executable, "-c", OVER], check=True)
            return [float(seconds) for seconds in receiver.stdout]

    with joined_machines(tmp_path, DELAY, loss=0.3) as line:
        seconds = arrived()
        assert 0.5 * PACKETS < len(seconds) < 0.9 * PACKETS
        assert min(seconds) >= DELAY
        line.cut.touch()
        assert arrived() == []


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
        wait_for(experiment.folder / "said", "another machine joins with: ray start --address")
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
