"""Ray nodes on this machine, started as a user starts them, for tests of clusters."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import ray
from flwr.app import Message
from waiting import wait_until

from server.pool.grid import RayGrid

# Ray assigns ports from 10002 on to workers and drivers without a check that the ports are free. This ends a process of
# another cluster that a test runs at the same time. With 0, the kernel chooses free ports.
WORKERS_PORTS = ("--min-worker-port=0", "--max-worker-port=0")
PORTS = iter(range(20_000 + os.getpid() * 101 % 10_000, 32_768))  # below the ports that Linux assigns


def free_port() -> int:
    """Return a free port, a different one for each call."""
    for port in PORTS:
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise AssertionError("no port is free")


def free_place() -> str:
    """Return an address of this machine that other machines can reach, with a free port."""
    return f"{ray.util.get_node_ip_address()}:{free_port()}"


@contextmanager
def started(
    *options: str, folder: Path | None = None, within: Sequence[str] = (), **environment: str
) -> Iterator[psutil.Process]:
    """Start a node with more environment variables, and yield its `ray start`; for `within`, see `helpers.start`."""
    process = subprocess.Popen(
        [*within, str(Path(sys.executable).with_name("ray")), "start", "--block", *WORKERS_PORTS, *options],
        cwd=folder,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any("Ray runtime started" in line for line in process.stdout)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def joined(address: str, folder: Path | None = None, **environment: str) -> AbstractContextManager[psutil.Process]:
    """Start a node with one CPU that joins the cluster at an address."""
    return started("--address", address, "--num-cpus=1", folder=folder, **environment)


def older_release(folder: Path, library: str) -> str:
    """Return a folder whose metadata gives a library version 0.1; the first such folder on the path determines it."""
    metadata = folder / f"{library}-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: 0.1\n")
    return str(folder)


def listening(processes: Sequence[psutil.Process]) -> set[str]:
    """Return the addresses on which these processes accept connections from a network."""
    found = set()
    for process in processes:
        try:
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue
    return found


def replies_of(grid: RayGrid, messages: list[Message]) -> list[Message]:
    """Return all replies, in the order of their arrival."""
    ids, replies = grid.push_messages(messages), list[Message]()

    def have_come() -> bool:
        replies.extend(grid.pull_messages(ids))
        return len(replies) == len(ids)

    wait_until(have_come)
    return replies


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def named(processes: Iterable[psutil.Process], name: str) -> psutil.Process:
    """Return a process with a name, or raise AssertionError; other processes may end meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.name() == name:
                return process
    raise AssertionError(f"no process is called {name}")


def without_agents(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes without Ray's two agents, which look for their cluster for a minute before they end."""
    return [process for process in processes if not _is_agent(process)]


def _is_agent(process: psutil.Process) -> bool:
    """Return whether a process is an agent, by its title or, before it sets its title, by the file that it runs."""
    try:
        return any(part.endswith(("Agent", "agent.py", "agent/main.py")) for part in map(str.strip, process.cmdline()))
    except psutil.NoSuchProcess:
        return False
