"""The private parts of Ray and Flower that flsim needs, each with the missing public interface; no other file does."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import Message, Metadata
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from ray._common.utils import get_default_ray_temp_dir
from ray._private import node, ray_constants, services, utils, worker

from flsim.base.errors import RunFailed

# The command `ray`. Its heads would open port 10001 for remote clients if grpcio is installed, and `ray start` has no
# option against this: --ray-client-server-port only chooses another port.
RAY_WITHOUT_CLIENTS = (
    "from ray.scripts import scripts; scripts.get_ray_client_dependency_error = ImportError; scripts.main()"
)
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
FIRST_PORT, BLOCKS = 20_000, 3_000  # between the ports of Ray's workers and those that systems assign to connections
SERVICES = ("start_api_server", "start_monitor", "start_log_monitor")  # methods of Ray's `Node`


def temporary_folder() -> Path:
    """Return the folder of Ray's sessions, which the public `RuntimeContext.get_temp_dir` knows only afterwards."""
    return Path(get_default_ray_temp_dir())


def logs_folder() -> Path | None:
    """Return the folder of the logs of Ray's processes here, not available publicly; None if Ray is not connected."""
    this = worker.global_worker.node
    return Path(this.get_logs_dir_path()) if this else None


def arguments_of_own_processes() -> set[str]:
    """Return command-line arguments that only this process's raylet and control store have; no public name for them."""
    this = worker.global_worker.node
    return {f"--raylet_socket_name={this.raylet_socket_name}", f"--session-name={this.session_name}"}


def no_handler_of_sigterm() -> AbstractContextManager[Any]:
    """Keep Ray from setting its handler of SIGTERM, which ends the process at once; `ray.init` has no such option."""
    return patch.object(utils, "set_sigterm_handler", lambda _: None)


def take_sigterm_back() -> None:
    """Set Python's handler of SIGTERM again, over that of Ray's C++ library, which prints a stack trace; no option."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def without_services() -> AbstractContextManager[Any]:
    """Keep Ray from starting a dashboard, an autoscaler and a reader of logs, which cost a tenth of a short run.

    `ray.init(include_dashboard=False)` still starts a process, and has no option against the other two.
    """
    nothing: dict[str, Any] = dict.fromkeys(SERVICES, lambda *_, **__: None)
    patched: AbstractContextManager[Any] = patch.multiple(node.Node, **nothing)
    return patched


def agents_not_waited_for() -> AbstractContextManager[Any]:
    """Choose the ports of the agents of a node that is started in the block, because `ray.init` has no such options.

    A raylet aborts if agents have not written ports that they chose after 15 seconds, as on a busy machine. It does not
    wait for given ports, except for one, which it reads from a file.
    """
    start = node.Node.start_raylet

    def start_raylet(this: Any, *args: Any, **named: Any) -> Any:
        for name, port in zip(AGENT_PORTS, _free_ports(), strict=True):
            setattr(this._ray_params, name, port)
        file = Path(this.get_session_dir_path()) / f"{AGENT_PORTS[-1]}_{this.node_id}"
        file.write_text(str(getattr(this._ray_params, AGENT_PORTS[-1])))
        return start(this, *args, **named)

    return patch.object(node.Node, "start_raylet", start_raylet)


def _free_ports() -> list[int]:
    """Return a free port for each agent, by the process number: processes that start together have different ones."""
    size = len(AGENT_PORTS)
    for attempt in range(BLOCKS):
        first = FIRST_PORT + size * ((os.getpid() + attempt) % BLOCKS)
        ports = list(range(first, first + size))
        if all(map(_is_free, ports)):
            return ports
    raise RunFailed(f"Ray needs {size} free ports from {FIRST_PORT:,} to {FIRST_PORT + size * BLOCKS - 1:,}; free some")


def _is_free(port: int) -> bool:
    with socket.socket() as place, suppress(OSError):
        place.bind(("127.0.0.1", port))
        return True
    return False


@contextmanager
def loopback() -> Iterator[None]:
    """Make Ray's processes that start in the block listen on loopback.

    On Linux, Ray replaces 127.0.0.1 by another address of the machine, and `ray.init` has no option against this. This
    constant, and the variable for new processes, select the behaviour on systems without clusters, which keeps it.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    variable = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if variable is not None:
            os.environ[name] = variable


def address_of_control_store(address: str) -> str:
    """Return the "HOST:PORT" to which `ray.init(address=...)` would connect, which tries for minutes; empty if none."""
    services.find_gcs_addresses.cache_clear()  # "auto" searches for processes, and caches the result
    return services.canonicalize_bootstrap_address(address) or ""


def address_for_others(host: str) -> str:
    """Return this host's address in Ray for other nodes; `ray.util.get_node_ip_address` takes no host."""
    return str(services.resolve_ip_for_localhost(host))


def send_as(run: int, node: int) -> None:
    """Set the run and node of this process's messages, a private global that only Flower's own processes set."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 1


def numbered(message: Message, number: int) -> Message:
    """Return the message with a number for its id, like Flower's grids; `Message` has no public way to set it."""
    old = message.metadata
    new = Metadata(
        run_id=old.run_id,
        message_id=str(number),
        src_node_id=old.src_node_id,
        dst_node_id=old.dst_node_id,
        reply_to_message_id="",
        group_id=old.group_id,
        created_at=old.created_at,
        ttl=old.ttl,
        message_type=old.message_type,
    )
    new.delivered_at = ""
    return Message(content=message.content, metadata=new)


def is_simulated(grid: Grid) -> bool:
    """Return whether a grid is that of Flower's simulation, on Flower's Ray, which no public part of Flower reports."""
    from flwr.superlink.grid import InMemoryGrid  # which takes a second

    return isinstance(grid, InMemoryGrid)
