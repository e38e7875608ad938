"""The Flower ServerApp for `flwr run .`, which trains the run of the run config, a new one or an existing one."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flsim.base.errors import InputError, RunFailed
from flsim.base.progress import say
from flsim.runs import config
from flsim.runs.config import FederatedConfig
from flsim.runs.config.federated import SHARDS
from flsim.runs.folder import Run
from server.cluster.internals import is_simulated
from server.cluster.start import cluster
from server.federated import rounds
from server.federated.rounds import with_shards
from server.pool.supernodes import SuperNodes
from server.stopping import Stop, stopping

RAY_DEADLINE = 120.0  # seconds until Flower has started Ray
POLL = 0.05  # seconds
HERE = Path(__file__).parents[1]  # where Flower has unpacked this app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the configuration that `flwr run . --run-config "config='...' out='...'"` names."""
    asked = context.run_config
    try:
        if is_simulated(grid):
            refuse_other_code(Path.cwd())
        run, stop = run_of(str(asked["config"]), str(asked["out"]), resume=bool(asked["resume"])), Stop()
        # SuperNodes connect one after another, so that their number now would be a matter of chance.
        run = with_shards(run, SHARDS)
        system = run.federated.system
        with ray_for_evaluators(grid), stopping(stop):
            grid = SuperNodes(grid, system.known_shards, stop)
            rounds.train(grid, run, stop, system.gpus_for_evaluation or 0.0)
    except (InputError, RunFailed) as error:
        say(f"flsim: {error}")
        raise error.with_traceback(None) from None  # Flower prints a whole traceback, and only the line matters


def run_of(config_path: str, out: str, resume: bool) -> Run:
    """Create a run, or reopen one to resume it.

    Raises:
        InputError: see `Run.create` and `Run.reopen`; or a path is relative, or training is central.
    """
    for key, path in (("config", config_path), ("out", out)):
        if not Path(path).is_absolute():  # Flower runs this in the folder in which its SuperLink was started
            raise InputError(
                f"run config: {key} must be an absolute path, found {path!r}; "
                f"flwr run . --run-config \"config='/data/one.toml' out='/data/runs/one'\""
            )
    settings = config.load(Path(config_path))
    if not isinstance(settings, FederatedConfig):
        raise InputError(f"{config_path}: training is central, which has no clients; train it with `flsim run`")
    if resume:
        return Run.reopen(settings, Path(out))
    if Path(out).exists():
        raise InputError(f"{out}: exists already; continue it with resume=true, or name another folder")
    return Run.create(settings, Path(out))


@contextmanager
def ray_for_evaluators(grid: Grid) -> Iterator[None]:
    """Provide Ray in this process until the block ends.

    Flower's simulation starts Ray in another thread. A call into Ray before that is done would start a second Ray,
    which ends both. The grid of a simulation is in memory; with any other grid, this function starts Ray itself.

    Raises:
        RunFailed: Flower has not started Ray in time.
    """
    if not is_simulated(grid):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.chdir(HERE)  # Ray's processes look for code in the working directory first
        with cluster():
            yield
        return
    until = time.monotonic() + RAY_DEADLINE
    while not ray.is_initialized():
        if time.monotonic() > until:
            raise RunFailed(f"Flower has not started Ray within {RAY_DEADLINE:g} s; its log says why")
        time.sleep(POLL)
    yield


def refuse_other_code(folder: Path) -> None:
    """Raise InputError where simulated clients would run the code in a folder, and not this app's."""
    if _code(folder) not in ({}, _code(HERE)):
        raise InputError(
            f"{folder}: clients would run the code there, which is not the one submitted; start Flower's SuperLink in "
            f"another folder"
        )


def _code(root: Path) -> dict[Path, bytes]:
    """Return flsim's source files in a folder, by path."""
    return {
        path.relative_to(root): path.read_bytes()
        for name in ("flsim", "clients", "server")
        for path in (root / name).rglob("*.py")
    }
