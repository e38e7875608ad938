"""Flower ClientApp: decode, open the shard, train, reply. No mathematics, and nothing kept between messages but caches.

Any process may serve any shard: the corpus is memory-mapped, and a user's batches depend on the request alone.
"""

import os
import socket
import time
from functools import lru_cache
from pathlib import Path

import ray
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flsim.algorithms.checkpoint import model_of
from flsim.base.errors import InputError
from flsim.runs.folder import Run
from flsim.training.engines import Engine, engine_of
from flsim.wire import ShardReply, decode_request, encode_reply

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001 (Flower's signature)
    """Train this round's users of one shard."""
    request = decode_request(message.content)
    run, engine = _open(request.run, request.config)
    began = time.perf_counter()
    try:
        update = engine.train(
            request.params, run.users, request.users.tolist(), run.config.seed, request.round, request.clip
        )
    finally:
        run.verify()  # a file that changed meanwhile explains whatever came of it, and nothing wrong is passed on
    reply = ShardReply(request.round, request.shard, update, _worker(), time.perf_counter() - began)
    return Message(encode_reply(reply), reply_to=message)


@lru_cache(maxsize=4)
def _open(path: str, config: str) -> tuple[Run, Engine]:
    """The run folder and an engine on the device that Ray gave to this process, once per process."""
    run = Run.open(Path(path))
    if run.config.digest != config:
        raise InputError(f"{path}: its config.toml is not the one that the server trains with")
    system = run.federated.system
    torch.set_num_threads(system.cpus_per_client)
    gpus = _gpus() if torch.cuda.is_available() else 0.0
    model = model_of(run.provenance).to("cuda" if gpus else "cpu")
    share = min(1.0, gpus or 1.0)
    return run, engine_of(
        system.engine, model, run.corpus.layout, run.federated.local, system.micro_cohort, share, run.rounds
    )


def _gpus() -> float:
    """What this process may fill: the share that Ray gave it; outside Ray a whole one, as on a SuperNode."""
    if not ray.is_initialized():
        return 1.0
    return float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))


def _worker() -> str:
    """Where this is: the Ray node (the host, outside Ray) and the process."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()
    return f"{node}/{os.getpid()}"
