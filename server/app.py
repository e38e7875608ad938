"""The Flower ServerApp for `flwr run .`, which trains the new or existing run of the run config."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import ray
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from flsim.base.errors import InputError, Interrupted, RunFailed
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.runs import config
from flsim.runs.config import FederatedConfig
from flsim.runs.config.base import SHARDS
from flsim.runs.folder import Run
from server.cluster.internals import is_simulated
from server.cluster.start import cluster
from server.federated import rounds
from server.federated.rounds import with_shards
from server.stopping import Stop, stopping

# seconds without a SuperNode; a restarted SuperNode is accepted after Flower has noticed its absence, after 60 s
DEADLINE = 180.0
AVOIDED = 60.0  # seconds for which a failed SuperNode is used last; Flower notices its end within this time
POLL = 0.2  # seconds


class SuperNodes:
    """Flower nodes 0 to shards - 1, one for each shard.

    A shard keeps its SuperNode while the same ones are connected; a second request in a round goes to another one.
    """

    def __init__(self, grid: Grid, shards: int, stop: Stop) -> None:
        self._grid, self._shards, self._stop = grid, shards, stop
        self._asked: dict[int, tuple[str, int]] = {}  # last round and SuperNode of each shard
        self._failed: dict[int, float] = {}  # time of the last failure of each SuperNode

    def get_node_ids(self) -> list[int]:
        """Return all nodes if a SuperNode is connected, otherwise none."""
        return list(range(self._shards)) if self._grid.get_node_ids() else []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Give each message to a SuperNode, and wait until one is connected; RunFailed if none comes in time."""
        messages, connected = list(messages), self._wait()
        for message in messages:
            metadata = message.metadata
            metadata.dst_node_id = self._choose(connected, metadata.dst_node_id, metadata.group_id)
        with _asked_to_end():
            sent = list(self._grid.push_messages(messages))
        if len(sent) != len(messages) or not all(sent):
            raise RunFailed("Flower no longer accepts messages of this run; check whether the run was stopped")
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return replies that have arrived, without waiting; raise Interrupted if the run was stopped."""
        with _asked_to_end():
            return list(self._grid.pull_messages(message_ids))

    def _wait(self) -> list[int]:
        until = time.monotonic() + DEADLINE
        while not (connected := sorted(self._grid.get_node_ids())):
            if time.monotonic() > until:
                raise RunFailed(
                    f"no SuperNode was available for {DEADLINE:g} s; start a SuperNode, and continue the run with "
                    "resume=true"
                )
            self._stop.wait(POLL)
            self._stop.check()
        return connected

    def _choose(self, connected: Sequence[int], shard: int, round_: str) -> int:
        now, (before, whom) = time.monotonic(), self._asked.get(shard, ("", 0))
        again = before == round_
        if again:
            self._failed[whom] = now
        good = [node for node in connected if now - self._failed.get(node, -AVOIDED) >= AVOIDED]
        chosen = good[shard % len(good)] if good else min(connected, key=lambda node: self._failed[node])
        if again:
            log.info("shard asked of another SuperNode", extra={"round": int(round_), "shard": shard, "node": chosen})
        self._asked[shard] = round_, chosen
        return chosen


@contextmanager
def _asked_to_end() -> Iterator[None]:
    """Turn the refusal of this run's token, with which a SuperLink reports `flwr stop`, into Interrupted."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise Interrupted from error


RAY_DEADLINE = 120.0  # seconds until Flower has started Ray
RAY_POLL = 0.05  # seconds
HERE = Path(__file__).parents[1]  # the folder into which Flower has unpacked this app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the configuration that `flwr run . --run-config "config='...' out='...'"` names."""
    asked = context.run_config
    try:
        if is_simulated(grid):
            refuse_other_code(Path.cwd())
        run, stop = run_of(str(asked["config"]), str(asked["out"]), resume=bool(asked["resume"])), Stop()
        # SuperNodes connect one after another, so their current number would be random.
        run = with_shards(run, SHARDS)
        system = run.federated.system
        with ray_for_evaluators(grid), stopping(stop):
            nodes = SuperNodes(grid, system.known_shards, stop)
            rounds.train(nodes, run, stop, system.gpus_for_evaluation or 0.0)
    except (InputError, RunFailed) as error:
        say(f"flsim: {error}")
        raise error.with_traceback(None) from None  # Flower prints a complete traceback, but only the line matters


def run_of(config_path: str, out: str, resume: bool) -> Run:
    """Create a run, or reopen one to resume it; InputError also if a path is relative, or training is central."""
    for key, path in (("config", config_path), ("out", out)):
        if not Path(path).is_absolute():  # Flower runs this in the folder in which the SuperLink was started
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
        raise InputError(f"{out}: already exists; continue it with resume=true, or name another folder")
    return Run.create(settings, Path(out))


@contextmanager
def ray_for_evaluators(grid: Grid) -> Iterator[None]:
    """Provide Ray in this process until the block ends; RunFailed if Flower has not started it in time.

    Flower's simulation starts Ray in another thread; a call into Ray before would start a second Ray, and both end.
    """
    if not is_simulated(grid):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.chdir(HERE)  # Ray's processes search code in the working directory first
        with cluster():
            yield
        return
    until = time.monotonic() + RAY_DEADLINE
    while not ray.is_initialized():
        if time.monotonic() > until:
            raise RunFailed(f"Flower has not started Ray within {RAY_DEADLINE:g} s; read the log of Flower")
        time.sleep(RAY_POLL)
    yield


def refuse_other_code(folder: Path) -> None:
    """Raise InputError if simulated clients would run the code in a folder, instead of the code of this app."""
    if _code(folder) not in ({}, _code(HERE)):
        raise InputError(
            f"{folder}: clients would run the code in this folder, which differs from the submitted code; "
            "start Flower's SuperLink in another folder"
        )


def _code(root: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(root): path.read_bytes()
        for name in ("flsim", "clients", "server")
        for path in (root / name).rglob("*.py")
    }
