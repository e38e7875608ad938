"""A Ray cluster for the duration of a run; no other file starts Ray or joins a cluster.

The processes of Ray on this machine are watched: if one is killed, calls of Ray can wait forever. A thread then ends
this process as SIGKILL would, which is the best-tested end of a run.
"""

import ctypes
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import NodeDiedError, RayError, RayTaskError, RuntimeEnvSetupError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flsim.base.errors import InputError, Interrupted, RunFailed, first_line, in_one_line, last_line
from flsim.base.logs import log
from flsim.base.machine import PACKAGES, cores, processor, versions
from flsim.base.progress import say
from flsim.data.corpus import Corpus
from flsim.data.stores import is_uri, located
from flsim.runs.config import load
from server.cluster import causes, internals
from server.cluster.causes import death
from server.stopping import no_signal_lost

START_DEADLINE = 60.0  # seconds until a head answers, or until it has ended
NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the header of an HTTP/2 frame: length, type, flags, stream
ROOM = 1 << 20  # bytes of free disk space: a short run writes a quarter of it, and Ray hangs on a full disk
THREADS = 300  # threads: a run of two clients and an evaluator has 250; with fewer, Ray can hang forever within a call
FILES = 100  # open files in one process: the raylet of a run of two clients and an evaluator has 70
MAKE_ROOM = "free space there, or set RAY_TMPDIR to another folder"
START_GRACE = 2.0  # seconds in which Ray can report the end of one of its processes during the start
GRACE = 5.0  # seconds before the exit: a signal to all processes requests a checkpoint of the last round
LOOK = 0.1  # seconds between two checks of Ray's processes
# Loaded at import, because in a child of a process with threads, a lock of the loader can be held forever.
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@contextmanager
def cluster(address: str | None = None, cpus: int | None = None, head: str | None = None) -> Iterator[None]:
    """Provide Ray, initialised in this thread, until the block ends: at an address ("auto" searches), or local.

    `cpus` are the cores of a local cluster, on loopback only, or of a head that other nodes can join at the "HOST:PORT"
    `head` of this machine; by default, all that this process may use. InputError without a cluster there, or if no head
    can start; Interrupted by the keyboard; RunFailed if no local cluster starts.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Task events are only useful for a dashboard, and the control store keeps 100,000: hundreds of MB in a long run.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # By default, Ray starts workers before it answers, and never answers if a worker takes over a minute, as on a busy
    # machine (https://github.com/ray-project/ray/issues/40131).
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if address is not None and head is not None:
        raise InputError("--address joins a cluster, and --head starts a cluster; use only one of these options")
    cpus = cores() if cpus is None else cpus  # Ray considers the quota of a container, but not affinity
    with ExitStack() as stack:
        if head is not None:
            address = stack.enter_context(_head(head, cpus))
        stack.callback(ray.shutdown)
        stack.enter_context(internals.no_handler_of_sigterm())
        with no_signal_lost():
            _connect(address, cpus)
        internals.take_sigterm_back()
        stack.enter_context(_in_thread(_watch, _processes()))
        try:
            with redirect_stdout(sys.stderr):  # of messages of Ray, because standard output is for results
                yield
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None


def nodes() -> list[dict[str, float]]:
    """Return the total resources of each living Ray node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def say_where(run: Path, is_local: bool) -> None:
    """Print the folder and the Ray cluster of a run in one line."""
    alive = nodes()
    cores, gpus = (sum(node.get(name, 0.0) for node in alive) for name in ("CPU", "GPU"))
    size = f"{cores:g} cores" + f" and {gpus:g} GPU{'s' * (gpus != 1)}" * (gpus > 0)
    address = ray.get_runtime_context().gcs_address
    machines = f"{len(alive)} machine{'s' * (len(alive) != 1)}"
    ray_is = f"a local cluster with {size}" if is_local else f"the cluster at {address} with {machines} and {size}"
    say(f"Writing to {run}. Ray uses {ray_is}.")


def ending_with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` with which Linux kills the child at any end of this process."""
    parent = os.getpid()

    def end_with_parent() -> None:
        if PRCTL is not None:
            PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # the parent ended before the call
                os._exit(1)

    return end_with_parent


def _connect(address: str | None, cpus: int) -> None:
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address and "://" in address:
        raise InputError(
            f"--address {address}: flsim joins a cluster as a node, not as a Ray client; use the form HOST:PORT"
        )
    if address is None:  # "local": without it Ray would join any cluster of this machine, even a cluster that is ending
        with starting(), internals.loopback(), internals.without_services(), internals.agents_not_waited_for():
            quiet = options | {"logging_level": logging.CRITICAL}  # the reason of a failed start is in flsim's message
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        logging.getLogger("ray").setLevel(options["logging_level"])
        return
    try:
        _refuse_silence(address)
    except Exception as error:  # Ray also raises plain exceptions
        raise InputError(
            f"--address {address}: no Ray cluster answers there; start one with `ray start --head`"
        ) from error
    try:
        with chdir("/"):  # Ray's workers import from this folder before the shipped code
            ray.init(address=address, runtime_env=_this_code(), **options)
    except Exception as error:
        raise InputError(
            f"--address {address}: cannot join the Ray cluster at this address: {first_line(error)}"
        ) from error


def _refuse_silence(address: str) -> None:
    """Raise OSError or ValueError without an HTTP/2 server (the basis of gRPC) there; Ray would try for minutes."""
    host, _, port = internals.address_of_control_store(address).rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + NO_SETTINGS)  # RFC 9113, section 3.4
            if connection.recv(len(NO_SETTINGS), socket.MSG_WAITALL)[3:4] != NO_SETTINGS[3:4]:
                raise ConnectionError


def _this_code() -> dict[str, list[str]]:
    """Return a Ray runtime environment in which all nodes run the packages of this process."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    folders = [str(Path(spec.origin).parent) for spec in specs if spec and spec.origin]
    return {"py_modules": folders, "excludes": ["**/__pycache__/**"]}


@contextmanager
def _head(place: str, cpus: int) -> Iterator[str]:
    """Start a head node whose processes end with this process, as after `ray start --block`; yield its address.

    A token is only required if the environment sets RAY_AUTH_MODE, because users would have to copy one of flsim.
    """
    host, port = _place(place)
    refuse_without_room(internals.temporary_folder())
    address = f"{host}:{port}"
    command = [sys.executable, "-c", internals.RAY_WITHOUT_CLIENTS, "start", "--head", "--block"]
    command += [f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false", f"--num-cpus={cpus}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # only this process receives Ctrl-C, because it may have to write a checkpoint first
            start_new_session=True,
            preexec_fn=ending_with_this_process(),
        )
        try:
            _wait_for(process, host, port)
            if process.poll() is not None:
                output.seek(0)
                why = " ".join(next((line for line in reversed(output.readlines()) if line.strip()), "").split())
                raise InputError(f"--head {place}: Ray does not start at this address ({why})")
            say(f"Ray head at {address}; other machines join with: ray start --address {address}")
            if os.environ.get("RAY_AUTH_MODE") != "token":
                say(f"every machine that reaches {host} can run code there; set RAY_AUTH_MODE=token to require a token")
            yield address
        finally:
            process.terminate()
            try:
                process.wait(START_DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _place(text: str) -> tuple[str, int]:
    """Return host and port of a head; InputError for others, as loopback, on which Ray would listen everywhere."""
    host, _, port = text.rpartition(":")
    try:
        host, number = socket.gethostbyname(host or " "), int(port)
        for where in ((host, 0), ("", number)):  # Ray listens on all of the machine's addresses
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(where)
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--head {text}: cannot listen at this address ({error}); name an address of this machine and a "
            f"free port, such as {ray.util.get_node_ip_address()}:6379"
        ) from error
    reachable = internals.address_for_others(host)
    if reachable != host:
        raise InputError(
            f"--head {text}: other machines cannot reach this address; name an address such as {reachable}:{number}"
        )
    return host, number


def _wait_for(process: "subprocess.Popen[bytes]", host: str, port: int) -> None:
    """Wait until a process listens at the address, or until the started process has ended."""
    until = time.monotonic() + START_DEADLINE
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(LOOK)
        else:
            return


@contextmanager
def starting() -> Iterator[None]:
    """Watch a start of Ray within the block; RunFailed, with the reason and the remedy, if Ray does not start.

    If a process of Ray ends, Ray waits half a minute in a call that cannot be interrupted, so a thread ends this one.
    """
    folder = internals.temporary_folder()
    refuse_without_room(folder)
    _refuse_without_files()
    _refuse_without_threads()
    with _in_thread(_watch_start, folder):
        try:
            yield
        except Exception as error:  # Ray also raises plain exceptions
            raise RunFailed(_failure(folder, first_line(error))) from error


@contextmanager
def _in_thread(watch: Callable[[Any, threading.Event], None], what: Any) -> Iterator[None]:
    """Watch something in a thread, until the event is set at the end of the block."""
    over = threading.Event()
    thread = threading.Thread(target=watch, args=(what, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def refuse_without_room(folder: Path) -> None:
    """Raise RunFailed if Ray's temporary folder cannot be created, or its filesystem is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RunFailed(
            f"{folder}: Ray cannot use this folder ({error.strerror}); set RAY_TMPDIR to another folder"
        ) from error
    if free < ROOM:
        raise RunFailed(f"{folder}: Ray needs {ROOM:,} bytes in this folder, and only {free:,} are free; {MAKE_ROOM}")


def _refuse_without_files() -> None:
    """Raise RunFailed if processes of Ray cannot open their files, because its raylet would end during the start."""
    if 0 <= (most := causes.most_files()) < FILES:  # -1 means no limit
        raise RunFailed(
            f"Ray's processes need {FILES} open files each, and `ulimit -n` is {most}: which is too low; raise "
            "the limit (`ulimit -n 1024`), or run without Ray (--in-process)"
        )


def _refuse_without_threads() -> None:
    """Raise RunFailed if Ray cannot start its threads; a trial covers all kinds of limits."""
    over, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise RunFailed(
            f"a run needs about {THREADS} threads on this machine, but cannot start them ({causes.limits()}); "
            "raise the limit"
        ) from error
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _failure(folder: Path, reason: str) -> str:
    """Return the message for a start that failed: the cause in logs of Ray, or the reason in its error."""
    if "AF_UNIX path length" in reason:
        reason = f"the path {folder} is too long for its sockets; set RAY_TMPDIR to a shorter path, such as /tmp"
    else:
        logs = [path for session in folder.glob(f"session_*_{os.getpid()}") for path in (session / "logs").glob("*.*")]
        reason = causes.named_in(reason, *logs) or causes.memory_that_ran_out() or reason
    return f"Ray does not start on this machine: {reason}"


def _watch_start(folder: Path, over: threading.Event) -> None:
    while not over.wait(LOOK):
        of_ray = (child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet"))
        ended = next((process for process in of_ray if not is_alive(process)), None)
        if ended is not None:
            if over.wait(START_GRACE):
                return
            say(f"flsim: {_failure(folder, f'its {ended.name()} has ended')}")
            os._exit(1)


def _processes() -> list[psutil.Process]:
    """Return the raylet of this machine, and the control store if it is on this machine, without hidden processes."""
    arguments = internals.arguments_of_own_processes()
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] in ("raylet", "gcs_server") and arguments.intersection(process.info["cmdline"] or ())
    ]


def _watch(processes: list[psutil.Process], over: threading.Event) -> None:
    """End this process with exit code 1 if one of Ray's processes ends on this machine; `--resume` continues the run.

    Without a raylet, no results arrive and no call fails; without the control store, any thread can be in a call of Ray
    for a minute. Therefore threads are not asked to stop.
    """
    while not over.wait(LOOK):
        ended = next((process for process in processes if not is_alive(process)), None)
        if ended is not None:
            try:  # print immediately, because Ray can end this process silently within the grace period
                name, folder = ended.info["name"], internals.logs_folder()
                cause = causes.named_in(*folder.glob(f"{name}.*")) if folder else None
                reason = f"Ray's {name} on this machine has ended" + (f": {cause}" if cause else "")
                log.error("failed", extra={"reason": reason})
                say(f"flsim: {reason}; repeat the command, `flsim run` with --resume, to continue")
            finally:  # without memory, the message can fail, but the process must still end
                if not over.wait(GRACE):
                    os._exit(1)
            return


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process lives, if it can be determined; True if memory or descriptors are insufficient."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (MemoryError, OSError, psutil.Error):
        return True


# The Ray nodes that a run can use: those with the same code, whatever was shipped, and the same files.
#
# Any different version is an error, because it is unknown which change results; a different processor is only reported.


# seconds in which all nodes must answer at the start of a run; a cold node imports from a shared filesystem
DEADLINE = 300.0
SHARE = "move it to a filesystem that all nodes share, under the same path"
REACH = "give the node access to the store, and credentials in the environment of its Ray"

Node = dict[str, Any]


@dataclass(frozen=True)
class Environment:
    versions: dict[str, str]
    processor: str
    # digest of the run's settings, as far as results depend on them, and of its custom code; None if the node cannot
    # read the folder
    run: str | None
    corpus: str | None  # digest of the corpus's manifest; None if the node cannot open the corpus
    trouble: str = ""  # the reason why it cannot open the corpus


def environment_of(run: Path, corpus: Path | str) -> Environment:
    """Return the code, files and processor of this node; a corpus in an object store is fetched."""
    try:
        settings = load(run / "config.toml").digest  # not of the file, which is replaced at the start of a run
    except (InputError, OSError):
        settings = None
    try:
        return Environment(versions(), processor(), settings, Corpus.open(corpus).digest)
    except InputError as error:
        return Environment(versions(), processor(), settings, None, in_one_line(error))


class Nodes:
    """The nodes of the connected cluster, checked for a run; for Ray, a node that returns is another node."""

    def __init__(self, run: Path, corpus: Path | str, is_local: bool = False) -> None:
        """Prepare the checks of nodes, which must read run and corpus (a folder or URI); a local cluster needs none."""
        self._paths = run.resolve(), located(corpus)
        self._local = environment_of(*self._paths)
        self._asked: dict[ray.ObjectRef, str] = {}  # node by its future reply
        self._known = {node: str(what["NodeManagerAddress"]) for node, what in _alive().items() if is_local}
        self._good = {*self._known}
        self._lost: set[str] = set()  # nodes whose process died before it could answer

    def check(self) -> None:
        """Ask all nodes and wait; InputError names those that differ or are silent, RunFailed if Ray lost an answer."""
        self._ask_new(_alive())
        _, silent = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=DEADLINE) if self._asked else ((), ())
        )
        refused = [f"{self._name(self._asked[reply])} does not answer within {DEADLINE:g} s" for reply in silent]
        refused += [f"{self._name(node)} {why}" for node, why in self._answers() if why]
        if refused:
            only_lost = len(refused) == len(self._lost)
            raise (RunFailed if only_lost else InputError)("; ".join(sorted(refused)))

    def usable(self) -> list[Node]:
        """Return the nodes that are alive and equal to this process, as `ray.nodes` does; new nodes are asked."""
        alive = _alive()
        for node in self._good - alive.keys():
            self._good.remove(node)
            say(f"{self._name(node)} left the cluster")
        self._ask_new(alive)
        for node, why in self._answers():
            if node in alive:
                cpus, gpus = (alive[node]["Resources"].get(kind, 0) for kind in ("CPU", "GPU"))
                use = f", but is not used, because it {why}" if why else f": {cpus:g} CPUs, {gpus:g} GPUs"
                say(f"{self._name(node)} joined{use}")
        return [alive[node] for node in alive if node in self._good]

    def _ask_new(self, alive: dict[str, Node]) -> None:
        for node in alive.keys() - self._known.keys():
            self._known[node] = alive[node]["NodeManagerAddress"]
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(environment_of).options(num_cpus=0, scheduling_strategy=on_node)
            self._asked[task.remote(*self._paths)] = node

    def _answers(self) -> list[tuple[str, str]]:
        """Return nodes with new answers, with the reason why each is not usable, or ""; without nodes that left."""
        answers = []
        for reply in ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else ():
            node = self._asked.pop(reply)
            try:
                why = self._differs(node, ray.get(reply))
            except (NodeDiedError, TaskUnschedulableError):
                continue
            except (RayTaskError, RuntimeEnvSetupError) as error:
                why = f"cannot run this code ({last_line(error)})"
            except RayError as error:
                why = f"does not answer: {death(error)}"
                self._lost.add(node)
            if not why:
                self._good.add(node)
            answers.append((node, why))
        return answers

    def _differs(self, node: str, remote: Environment) -> str:
        """Return the differences of a node, for a sentence that begins with the node; empty if there are none."""
        local, (run, corpus) = self._local, self._paths
        both = {*local.versions, *remote.versions}
        names = sorted(name for name in both if local.versions.get(name) != remote.versions.get(name))
        if names:
            return "has " + ", ".join(
                f"{name} {_short(remote, name)} but this process has {_short(local, name)}" for name in names
            )
        if remote.corpus is None and is_uri(corpus):
            return f"cannot read the corpus {corpus} ({remote.trouble}); {REACH}"
        for seen, expected, what, path in (
            (remote.run, local.run, "run folder", run),
            (remote.corpus, local.corpus, "corpus", corpus),
        ):
            if seen is None:
                return f"cannot read the {what} {path}; {SHARE}"
            if seen != expected:
                return f"has another {what} at {path}; {SHARE}"
        if remote.processor != local.processor:
            say(
                f"{self._name(node)} has a different processor ({remote.processor}) from this machine "
                f"({local.processor}); the last bits of results can differ from a run on equal machines"
            )
        return ""

    def _name(self, node: str) -> str:
        return f"node {self._known[node]}"


def _alive() -> dict[str, Node]:
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _short(environment: Environment, name: str) -> str:
    version = environment.versions.get(name, "nothing")
    return version[:12] if name == "flsim" else version
