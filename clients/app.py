"""The Flower ClientApp: any process can serve any shard, from a memory-mapped corpus, and stores only caches."""

import os
import socket
import time
from functools import lru_cache
from pathlib import Path

import ray
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.rounds import Engine, FederatedTraining
from flsim.algorithms.summation import ShardReply
from flsim.algorithms.user_states import FOLDER, UserStates
from flsim.algorithms.wire import Address, decode_request, encode_reply
from flsim.base.errors import InputError
from flsim.base.extensions import custom_code_errors
from flsim.runs.folder import Run

app = ClientApp()


@app.train()
@custom_code_errors()
def train(message: Message, context: Context) -> Message:
    """Train this round's users of one shard, and reply with the sum of their updates."""
    request, address = decode_request(message.content)
    run, training, engine = _open(address, context.run_id)
    torch.set_num_threads(run.config.system.training_threads)
    began = time.perf_counter()
    try:
        update = training.update(engine, request)
    finally:
        run.verify()  # a file that changed in the meantime can cause any failure, and makes all results wrong
    reply = ShardReply(request.round, request.shard, update, _worker(), time.perf_counter() - began)
    return Message(encode_reply(reply), reply_to=message)


@lru_cache(maxsize=4)
def _open(address: Address, flower_run: int) -> tuple[Run, FederatedTraining, Engine]:  # noqa: ARG001 (see below)
    """Return the run and an engine on the device that Ray gave, opened once per process and Flower run."""
    run = Run.open(Path(address.run))
    if run.config.digest != address.config:
        raise InputError(f"{address.run}: its config.toml differs from that of the server")
    gpus = _gpus(run.federated.system.gpus_per_client)
    states, sizes = UserStates(run.path / FOLDER), MicroCohorts(run.path)
    training = run.federated.training_of(run.users, run.rounds, "cuda" if gpus else "cpu", states, sizes)
    return run, training, training.engine_here(min(1.0, gpus or 1.0))


def _gpus(asked: float | None) -> float:
    """Return the share of a GPU that Ray gave to this process; outside Ray the requested share or 1; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    if not ray.is_initialized():
        return 1.0 if asked is None else asked
    return float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))


def _worker() -> str:
    """Return a name of this process: the Ray node (outside Ray the host) and the process id."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()
    return f"{node}/{os.getpid()}"
