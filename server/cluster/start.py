"""A Ray cluster for the time of a run; no other file starts Ray or joins a cluster."""

import ctypes
import importlib.util
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from pathlib import Path

import ray

from flsim.base.errors import InputError, Interrupted, first_line
from flsim.base.progress import say
from flsim.base.versions import PACKAGES
from server.cluster import internals
from server.cluster.ray_start import refuse_without_room, starting
from server.cluster.watch import watched
from server.stopping import no_signal_lost

START_DEADLINE = 60.0  # seconds until a head answers, or until it has ended
NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame of HTTP/2: length, type, flags, stream
LOOK = 0.1  # seconds between two checks of a head that starts
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
        raise InputError("--address joins a cluster and --head starts one; give one of them")
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
    ray_is = f"a local one, {size}" if is_local else f"at {address}, {machines}, {size}"
    say(f"writes to {run}; Ray: {ray_is}")


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
        raise InputError(f"--address {address}: this process joins clusters and is no client of them; name a HOST:PORT")
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
    """Raise OSError or ValueError where nothing at the address answers in HTTP/2, on which gRPC is built.

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
    """Return host and port on which a head can listen; raise InputError where it cannot, or where nobody could join."""
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
        raise InputError(f"--head {text}: no other machine reaches this address; name one like {reachable}:{number}")
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
