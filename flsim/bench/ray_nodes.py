"""Ray nodes on this machine, each in processes of its own, as a cluster of machines would have them."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from server.cluster.internals import RAY_WITHOUT_CLIENTS
from server.cluster.start import ending_with_this_process

HOST = "127.0.0.1"
STORE = 100_000_000  # bytes of shared memory of a node: messages of a round are tens of MB, and nodes are many
END = 60.0  # seconds in which a node ends


@contextmanager
def ray_nodes(count: int) -> Iterator[str]:
    """Start Ray nodes of one CPU each, the first of them as head, and end them with the block.

    Nodes of a cluster listen on all addresses of the machine, so a line says that others can reach them.

    Args:
        count: number of nodes.

    Yields:
        The address of the cluster, "HOST:PORT".

    Raises:
        RunFailed: a node does not start.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"
    say(f"{count} Ray node{'s' * (count != 1)} at {address}; every machine that reaches this one can run code there")
    with ExitStack() as stack:
        for index in range(count):
            head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
            stack.enter_context(_node(["--address", address] if index else head))
        yield address


@contextmanager
def _node(role: list[str]) -> Iterator[None]:
    """Start a node, wait until it is up, and end it with the block."""
    command = [sys.executable, "-c", RAY_WITHOUT_CLIENTS, "start", "--block", *role, f"--node-ip-address={HOST}"]
    command += ["--num-cpus=1", "--num-gpus=0", f"--object-store-memory={STORE}"]
    # Ray gives ports from 10002 on without looking whether they are taken; with 0 the kernel chooses.
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=ending_with_this_process(),
        )
        try:
            lines = process.stdout or iter(())
            if not any("Ray runtime started" in line for line in lines):
                errors.seek(0)
                why = " ".join((errors.read().strip().splitlines() or ["it said nothing"])[-1].split())
                raise RunFailed(f"a Ray node does not start on this machine ({why}); end other clusters here first")
            yield
        finally:
            process.terminate()
            try:
                process.communicate(timeout=END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
