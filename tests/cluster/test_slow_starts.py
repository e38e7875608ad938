"""A local Ray starts on a machine that is too busy for Ray's agents and workers, which are Python processes."""

import os
import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import ray

from server.cluster.start import cluster


def start_with_a_stopped_agent() -> None:
    """In a process of its own: stop the agent as soon as it is there, so that it never says which ports it has."""
    stopped, over = list[int](), threading.Event()

    def stop() -> None:
        while not over.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    is_agent = process.name().startswith("python") or "Agent" in process.name()
                    if is_agent and "dashboard/agent.py" in " ".join(process.cmdline()) and process.pid not in stopped:
                        process.suspend()
                        stopped.append(process.pid)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with cluster(None, 1):
            assert ray.get(ray.remote(lambda: 5).remote()) == 5
            while not stopped:
                over.wait(0.02)
            assert psutil.Process(stopped[0]).status() == psutil.STATUS_STOPPED
    finally:
        over.set()
        thread.join()


def start_without_workers() -> None:
    """In a process of its own, whose Ray gives every worker up as soon as it begins."""
    with cluster(None, 2):
        assert ray.cluster_resources()["CPU"] == 2


def in_a_process(function: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import test_slow_starts; test_slow_starts.{function}()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_ray_starts_though_its_agent_does_not() -> None:
    """The raylet would wait for the agent's ports, and abort after 15 seconds."""
    done = in_a_process("start_with_a_stopped_agent")
    assert done.returncode == 0, done.stderr


def test_ray_starts_though_its_workers_do_not() -> None:
    """The raylet would wait for the first workers, and for ever for one that it gave up."""
    done = in_a_process("start_without_workers", RAY_worker_register_timeout_seconds="0")
    assert done.returncode == 0, done.stderr
