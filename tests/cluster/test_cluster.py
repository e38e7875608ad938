"""Tests of clusters: private local clusters, heads that end with their process, shipped code, and wrong addresses."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from helpers import TINY, Experiment, MakeCorpus, finish, start, wait_for_round
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from raynodes import free_place, joined, listening, named, older_release, tree, without_agents
from waiting import wait_until

from flsim.base.errors import InputError, Interrupted, RunFailed
from flsim.base.machine import code_digest, versions
from server.cluster.start import Nodes, cluster, nodes


@pytest.mark.slow
def test_a_local_run_listens_only_on_loopback_and_sends_no_statistics(experiment: Experiment) -> None:
    run = start(
        experiment, "--out", "Läufe", "--cpus", "2", "--set", "training.rounds=5000", "--set", "evaluation.every=9"
    )
    try:
        wait_for_round(experiment.folder / "Läufe", 3)  # a name that is not ASCII, as the tags of Ray's metrics must be
        processes = tree(psutil.Process(run.pid))
        assert named(processes, "gcs_server")
        assert named(processes, "raylet").environ()["RAY_USAGE_STATS_ENABLED"] == "0"
        assert listening(processes)
        assert listening(processes) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        others = without_agents(processes)
    finally:
        run.kill()
        run.wait()
    assert not psutil.wait_procs(others, timeout=60)[1]


@pytest.mark.slow
def test_sigterm_while_ray_starts_ends_a_run_as_it_does_later(experiment: Experiment) -> None:
    """Ray's own handler would exit with code 15."""
    process = start(experiment, "--out", "run")

    def ray_starts() -> bool:
        return any(child.name() == "gcs_server" for child in psutil.Process(process.pid).children())

    wait_until(ray_starts)
    process.send_signal(signal.SIGTERM)
    code, printed = finish(experiment, process)
    assert code == 128 + signal.SIGTERM, printed
    assert printed.splitlines()[-1] in ("flsim: terminated", f"flsim: {Interrupted(signal.SIGTERM)}")


def test_sigterm_prints_no_stack_trace_while_ray_runs() -> None:
    program = """
import signal, sys, time
from server.cluster.start import cluster

signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
with cluster(cpus=1):
    print("up", file=sys.stderr, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    assert process.stderr.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_started_head_is_joined_ships_its_code_and_ends_with_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node has an older copy of the package, in its working folder and first on its path."""
    older = tmp_path / "flsim" / "__init__.py"
    older.parent.mkdir()
    older.write_text("")
    environment = {"PYTHONPATH": str(tmp_path)}
    there = [sys.executable, "-c", "import flsim; print(flsim.__file__)"]
    found = subprocess.run(there, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True)
    assert found.stdout.strip() == str(older)

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    place = free_place()
    others = set(psutil.Process().children(recursive=True))
    with cluster(cpus=1, head=place):
        printed = capsys.readouterr().err
        assert f"ray start --address {place}" in printed
        assert "every machine that reaches" in printed
        (first,) = ray.nodes()
        head = set(psutil.Process().children(recursive=True)) - others
        assert named(head, "gcs_server")
        assert named(head, "raylet")
        with joined(place, tmp_path, **environment):
            wait_until(lambda: len(nodes()) == 2)
            (second,) = (node for node in ray.nodes() if node["NodeID"] != first["NodeID"])
            pinned = NodeAffinitySchedulingStrategy(second["NodeID"], soft=False)
            assert ray.get(ray.remote(code_digest).options(scheduling_strategy=pinned).remote()) == code_digest()
    assert not psutil.wait_procs(list(head), timeout=60)[1]


@pytest.mark.nightly
def test_a_head_with_a_token_refuses_others_and_ends_with_its_process() -> None:
    place, token = free_place(), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "01" * 32}
    code = f"""
import sys, time
from server.cluster.start import cluster
with cluster(cpus=1, head={place!r}):
    print("up", flush=True, file=sys.__stdout__)
    time.sleep(600)
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **token}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        processes = without_agents(tree(psutil.Process(driver.pid)))
        assert named(processes, "gcs_server")
        assert named(processes, "raylet")
        stranger = f"from server.cluster.start import cluster\nwith cluster({place!r}): print('it was joined')"
        without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        turned = subprocess.run([sys.executable, "-c", stranger], env=without, capture_output=True, text=True)
        assert f"--address {place}: cannot join the Ray cluster at this address" in turned.stderr
        assert "it was joined" not in turned.stderr
    finally:
        driver.kill()
        driver.communicate()
    assert not psutil.wait_procs(processes, timeout=60)[1]


def test_addresses_without_a_ray_cluster_are_refused_in_seconds() -> None:
    """Ray itself tries for minutes. The third address listens and does not answer, like a cluster that hangs."""
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen()
        addresses = ["127.0.0.1:9", "auto", f"127.0.0.1:{silent.getsockname()[1]}", "nonsense"]
        code = f"""
from flsim.base.errors import InputError, Interrupted
from server.cluster.start import cluster
for address in {addresses}:
    try:
        with cluster(address):
            raise SystemExit("it was joined")
    except InputError as error:
        print(error)
"""
        environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:9"}  # what "auto" finds
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
    assert done.stdout.splitlines() == [
        f"--address {address}: no Ray cluster answers there; start one with `ray start --head`" for address in addresses
    ]


def test_a_head_is_started_only_if_others_can_reach_its_address() -> None:
    host = ray.util.get_node_ip_address()
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        places = [f"{host}:{taken.getsockname()[1]}", "192.0.2.1:6379", "6379", "host:port", f"{host}:70000"]
        for place in places:
            with pytest.raises(InputError, match=f"--head {place}: cannot listen at this address"), cluster(head=place):
                raise AssertionError("it was started")
    if host != "127.0.0.1":  # a machine without any network has only this address
        with pytest.raises(InputError, match="other machines cannot reach this address"), cluster(head="127.0.0.1:0"):
            raise AssertionError("it was started")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "auto", "head": "127.0.0.1:0"}, "use only one of these options"),
        ({"address": "ray://127.0.0.1:10001"}, "not as a Ray client"),
    ],
)
def test_wrong_options_of_clusters_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message), cluster(**options):  # type: ignore[arg-type]
        raise AssertionError("it was started")


@pytest.mark.nightly
def test_nodes_come_and_go_and_those_that_differ_are_not_used(
    tmp_path: Path, make_corpus: MakeCorpus, capsys: pytest.CaptureFixture[str]
) -> None:
    run, corpus = tmp_path / "run", make_corpus([[[1]]]).path
    run.mkdir()
    settings, manifest = run / "config.toml", corpus / "manifest.json"
    settings.write_text("seed = 0\n" + TINY)
    place, printed = free_place(), ""
    node = f"node {place.partition(':')[0]}"
    different = f"has flwr 0.1 but this process has {versions()['flwr']}"

    def ids(nodes: Nodes) -> set[str]:
        nonlocal printed
        found = {node["NodeID"] for node in nodes.usable()}
        printed += capsys.readouterr().err
        return found

    def refusal() -> str:
        """Return why a run would not begin."""
        with pytest.raises(InputError) as refused:
            asked.check()
        return str(refused.value)

    with cluster(cpus=0, head=place):
        nodes = Nodes(run, corpus)
        assert ids(nodes) == set()  # no node has answered yet
        nodes.check()
        (head,) = ids(nodes)  # the head has no CPU for training, but can evaluate
        with joined(place) as start:
            wait_until(lambda: len(ids(nodes)) == 2)
            assert printed.count(f"{node} joined: 1 CPUs, 0 GPUs") == 1
            with joined(place, PYTHONPATH=older_release(tmp_path / "old", "flwr")):
                wait_until(lambda: (ids(nodes), "is not used" in printed)[1])
                assert len(ids(nodes)) == 2
                assert printed.count(f"{node} joined, but is not used, because it {different}") == 1
                asked = Nodes(run, corpus)
                assert refusal() == f"{node} {different}"
            named(tree(start), "raylet").kill()
            wait_until(lambda: ids(nodes) == {head})
            assert printed.count(f"{node} left the cluster") == 1

        asked = Nodes(run, corpus)
        settings.rename(run / "hidden")
        assert f"{node} cannot read the run folder {run}; move it to a filesystem that all nodes share" in refusal()
        (run / "hidden").rename(settings)
        asked = Nodes(run, corpus)
        settings.write_text("seed = 1\n" + TINY)
        assert f"{node} has another run folder at {run}" in refusal()
        asked = Nodes(run, corpus)
        manifest.write_text(manifest.read_text() + "\n")
        assert f"{node} has another corpus at {corpus}" in refusal()
        asked = Nodes(run, corpus)
        (corpus / "vocabulary.tsv").unlink()
        assert f"{node} cannot read the corpus {corpus}" in refusal()


@pytest.mark.slow
def test_a_process_that_ray_loses_is_a_failure_and_not_bad_input(
    tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is RunFailed (exit code 1), because the command was right; its folder remains for another try."""
    run, corpus = tmp_path / "run", make_corpus([[[1]]]).path
    run.mkdir()
    (run / "config.toml").write_text("seed = 0\n")
    with cluster(cpus=1):
        nodes = Nodes(run, corpus)
        monkeypatch.setattr("server.cluster.start.environment_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RunFailed, match=r"node 127\.0\.0\.1 does not answer: its process died"):
            nodes.check()


def start_with_a_stopped_agent() -> None:
    """Start Ray in a separate process, and stop the agent as soon as it exists: it never reports its ports."""
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
    """Start Ray in a separate process, in which Ray gives up every worker as soon as the worker begins."""
    with cluster(None, 2):
        assert ray.cluster_resources()["CPU"] == 2


def in_a_process(function: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import test_cluster; test_cluster.{function}()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_ray_starts_although_its_agent_does_not() -> None:
    """By default, the raylet waits for the agent's ports, and aborts after 15 seconds."""
    done = in_a_process("start_with_a_stopped_agent")
    assert done.returncode == 0, done.stderr


def test_ray_starts_although_its_workers_do_not() -> None:
    """By default, the raylet waits for the first workers, and for ever for a worker that it gave up."""
    done = in_a_process("start_without_workers", RAY_worker_register_timeout_seconds="0")
    assert done.returncode == 0, done.stderr
