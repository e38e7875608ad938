"""A Ray cluster for the time of a run; no other file starts Ray or joins a cluster.

A start is refused without room for Ray. Ray's processes on this machine are watched: if one is killed, Ray's calls wait
for long, or for ever. Ray does not report that its raylet is gone: a round would wait for all of `system.deadline`. So
a thread checks, and ends this process as SIGKILL would; of all ends of a run, tests cover that one best.
"""

import ctypes
import importlib.util
import io
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
from pathlib import Path

import psutil
import ray

from flsim.base.errors import InputError, Interrupted, RunFailed, first_line
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.base.versions import PACKAGES
from server.cluster import causes, internals
from server.stopping import no_signal_lost

START_DEADLINE = 60.0  # seconds until a head answers, or until it has ended
NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame of HTTP/2: length, type, flags, stream
ROOM = 1 << 20  # bytes: a short run writes a quarter of it, and without room Ray waits for itself
THREADS = 300  # a run of two clients and an evaluator has 250; with a few less Ray hangs within a call, for ever
FILES = 100  # open at once in one process: the raylet of a run of two clients and an evaluator has 70
MAKE_ROOM = "make room there, or set RAY_TMPDIR to another folder"
START_GRACE = 2.0  # seconds in which Ray may report that one of its processes has ended while it starts
GRACE = 5.0  # seconds before the exit: a signal to all processes asks for a checkpoint of the last round
LOOK = 0.1  # seconds between two checks of Ray's processes
# Loaded here: in a child of a process with threads a lock of the loader may be held for ever.
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@contextmanager
def cluster(address: str | None = None, cpus: int | None = None, head: str | None = None) -> Iterator[None]:
    """Provide Ray, initialised in this thread, until the block ends.

    A local cluster listens on loopback alone. Nodes of another cluster run the code of this process, which is shipped.

    Args:
        address: address of an existing cluster ("auto" searches for one); None starts a local one.
        cpus: cores of the local cluster, or of the head; None for all.
        head: "HOST:PORT" of this machine on which to start a head, for the time of the block, that other nodes can
            join; in place of `address`.

    Raises:
        InputError: there is no cluster at the address, or no head can be started there.
        Interrupted: the keyboard interrupted the start.
        RunFailed: no local cluster starts.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Task events are of use to a dashboard alone, and the control store keeps 100,000: hundreds of MB in a long run.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray would start workers before it answers, and never answer if one of them took over a minute, as on a machine
    # that is busy with something else (https://github.com/ray-project/ray/issues/40131).
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if address is not None and head is not None:
        raise InputError("--address joins a cluster, and --head starts a cluster; use only one of these options")
    with ExitStack() as stack:
        if head is not None:
            address = stack.enter_context(_head(head, cpus))
        stack.callback(ray.shutdown)
        stack.enter_context(internals.no_handler_of_sigterm())
        with no_signal_lost():
            _connect(address, cpus)
        internals.take_sigterm_back()
        stack.enter_context(watched())
        try:
            with redirect_stdout(_RayMessages()):
                yield
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None


def nodes() -> list[dict[str, float]]:
    """Return the total resources of each living Ray node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def say_where(run: Path, is_local: bool) -> None:
    """Say where a run is written, and on which Ray cluster it is trained, in one line."""
    alive = nodes()
    cores, gpus = (sum(node.get(name, 0.0) for node in alive) for name in ("CPU", "GPU"))
    size = f"{cores:g} cores" + f" and {gpus:g} GPU{'s' * (gpus != 1)}" * (gpus > 0)
    address = ray.get_runtime_context().gcs_address
    machines = f"{len(alive)} machine{'s' * (len(alive) != 1)}"
    ray_is = f"a local cluster with {size}" if is_local else f"the cluster at {address} with {machines} and {size}"
    say(f"Writing to {run}. Ray uses {ray_is}.")


def ending_with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` with which Linux kills the child when this process ends, however it ends."""
    parent = os.getpid()

    def end_with_parent() -> None:
        if PRCTL is not None:
            PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # which ended before the call
                os._exit(1)

    return end_with_parent


def _connect(address: str | None, cpus: int | None) -> None:
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address and "://" in address:
        raise InputError(
            f"--address {address}: flsim joins a cluster as a node, not as a Ray client; use the form HOST:PORT"
        )
    if address is None:  # "local": without it Ray would join any cluster of this machine, even one that is ending
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
        with chdir("/"):  # Ray's workers import from this folder first, before the shipped code
            ray.init(address=address, runtime_env=_this_code(), **options)
    except Exception as error:
        raise InputError(f"--address {address}: cannot join the Ray cluster there: {first_line(error)}") from error


def _refuse_silence(address: str) -> None:
    """Raise OSError or ValueError if nothing at the address answers in HTTP/2, on which gRPC is built.

    Ray itself would try for minutes where a cluster has ended or hangs, also at a stale address that "auto" finds.
    """
    host, _, port = internals.address_of_control_store(address).rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + NO_SETTINGS)  # RFC 9113, section 3.4
            if connection.recv(len(NO_SETTINGS), socket.MSG_WAITALL)[3:4] != NO_SETTINGS[3:4]:
                raise ConnectionError


def _this_code() -> dict[str, list[str]]:
    """Return a Ray runtime environment in which all nodes run this process's packages, whatever is installed there."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    folders = [str(Path(spec.origin).parent) for spec in specs if spec and spec.origin]
    return {"py_modules": folders, "excludes": ["**/__pycache__/**"]}


@contextmanager
def _head(place: str, cpus: int | None) -> Iterator[str]:
    """Start a head node in processes that end with this one; yield its address.

    Ray ends what `ray start --block` started when that is killed, so it is enough that the end of this process kills
    it.

    Loopback is refused: Ray would listen on all addresses, and no machine could join. No token is required unless the
    environment says so (RAY_AUTH_MODE): a token of flsim's own would have to be carried to each machine that joins.
    """
    host, port = _place(place)
    refuse_without_room(internals.temporary_folder())
    address = f"{host}:{port}"
    command = [sys.executable, "-c", internals.RAY_WITHOUT_CLIENTS, "start", "--head", "--block"]
    command += [f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    command += [] if cpus is None else [f"--num-cpus={cpus}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which may have something to write first
            preexec_fn=ending_with_this_process(),
        )
        try:
            _wait_for(process, host, port)
            if process.poll() is not None:
                output.seek(0)
                why = " ".join(next((line for line in reversed(output.readlines()) if line.strip()), "").split())
                raise InputError(f"--head {place}: Ray does not start there ({why})")
            say(f"Ray head at {address}; another machine joins with: ray start --address {address}")
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
    """Return host and port on which a head can listen; raise InputError if it cannot, or where nobody could join."""
    host, _, port = text.rpartition(":")
    try:
        host, number = socket.gethostbyname(host or " "), int(port)
        for where in ((host, 0), ("", number)):  # Ray listens on all of the machine's addresses
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(where)
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--head {text}: cannot listen there ({error}); name an address of this machine and a free port, "
            f"such as {ray.util.get_node_ip_address()}:6379"
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


class _RayMessages(io.TextIOBase):
    """A stream that sends Ray's messages to standard error, line by line, as standard output is for results."""

    def __init__(self) -> None:
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            say(line)
        return len(text)


@contextmanager
def starting() -> Iterator[None]:
    """Watch a start of Ray within the block.

    Ray would wait for half a minute for a process of its own that ends meanwhile, in a call that nothing interrupts. So
    a thread watches those processes, reports why one has ended, and ends this process with exit code 1.

    Raises:
        RunFailed: Ray does not start; the message says why, and what to do.
    """
    folder = internals.temporary_folder()
    refuse_without_room(folder)
    _refuse_without_files()
    _refuse_without_threads()
    over = threading.Event()
    thread = threading.Thread(target=_watch_start, args=(folder, over), daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:  # Ray raises bare ones, too
        raise RunFailed(_failure(folder, first_line(error))) from error
    finally:
        over.set()
        thread.join()


def refuse_without_room(folder: Path) -> None:
    """Raise RunFailed if Ray's temporary folder cannot be made, or its filesystem is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RunFailed(f"{folder}: Ray cannot use it ({error.strerror}); set RAY_TMPDIR to another folder") from error
    if free < ROOM:
        raise RunFailed(f"{folder}: Ray needs {ROOM:,} bytes in this folder, and only {free:,} are free; {MAKE_ROOM}")


def _refuse_without_files() -> None:
    """Raise RunFailed if Ray's processes could not open their files; its raylet would end while clients start."""
    if 0 <= (most := causes.most_files()) < FILES:  # no limit is -1
        raise RunFailed(
            f"Ray's processes need {FILES} open files each, and `ulimit -n` is {most}: there would "
            f"be too many open files; raise the limit (`ulimit -n 1024`), or run without Ray "
            f"(--in-process)"
        )


def _refuse_without_threads() -> None:
    """Raise RunFailed if Ray could not start its threads; they are tried, as limits are of many kinds."""
    over, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise RunFailed(
            f"a run needs some {THREADS} threads on this machine, and may not start them ({causes.limits()}); "
            f"raise the limit"
        ) from error
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _failure(folder: Path, reason: str) -> str:
    """Return the message for a start that failed: the cause in Ray's logs, or else the reason that Ray gave."""
    if "AF_UNIX path length" in reason:
        reason = f"{folder} is too long a path for its sockets; set RAY_TMPDIR to a shorter one, such as /tmp"
    else:
        logs = [path for session in folder.glob(f"session_*_{os.getpid()}") for path in (session / "logs").glob("*.*")]
        reason = causes.named_in(reason, *logs) or causes.memory_that_ran_out() or reason
    return f"Ray does not start on this machine: {reason}"


def _watch_start(folder: Path, over: threading.Event) -> None:
    while not over.wait(LOOK):
        ended = next((process for process in _of_ray() if not is_alive(process)), None)
        if ended is not None:
            if over.wait(START_GRACE):
                return
            say(f"flsim: {_failure(folder, f'its {ended.name()} has ended')}")
            os._exit(1)


def _of_ray() -> list[psutil.Process]:
    """Return the control store and the raylet that this process has started, even where they have ended."""
    return [child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet")]


@contextmanager
def watched() -> Iterator[None]:
    """End this process, with exit code 1, where Ray ends on this machine before the block does.

    Without a raylet no result comes, and no call fails; without the control store any thread may be inside a call of
    Ray for a minute. So no thread is asked to stop: the process ends as if it had been killed, and `--resume` continues
    the run. Ray ends it without a word where a thread calls the raylet before this one looks: with the same exit code.
    On other machines Ray may end: a run continues without those nodes.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(_processes(), over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _processes() -> list[psutil.Process]:
    """Return the raylet of this machine, and the control store where it is on this machine, without hidden ones."""
    arguments = internals.arguments_of_own_processes()
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] in ("raylet", "gcs_server") and arguments.intersection(process.info["cmdline"] or ())
    ]


def _watch(processes: list[psutil.Process], over: threading.Event) -> None:
    while not over.wait(LOOK):
        ended = next((process for process in processes if not is_alive(process)), None)
        if ended is not None:
            try:  # at once: Ray itself may end this process within the grace, without a word
                reason = f"Ray's {ended.info['name']} on this machine has ended{_cause(ended.info['name'])}"
                log.error("failed", extra={"reason": reason})
                say(f"flsim: {reason}; `flsim run --resume` continues from the newest checkpoint")
            finally:  # without memory the message may fail, and the process must end all the same
                if not over.wait(GRACE):
                    os._exit(1)
            return


def _cause(name: str) -> str:
    """Return the cause of the end of one of Ray's processes, from its logs, after a colon; empty if none is logged."""
    folder = internals.logs_folder()
    cause = causes.named_in(*folder.glob(f"{name}.*")) if folder else None
    return f": {cause}" if cause else ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process lives, as far as can be seen; True if memory or descriptors do not suffice to see."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (MemoryError, OSError, psutil.Error):
        return True
