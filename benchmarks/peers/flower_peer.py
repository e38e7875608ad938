"""Training with Flower as in its quickstart for PyTorch: a virtual node per user, its FedAvg, its simulation on Ray."""

import time
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.model import model_type, train
from benchmarks.peers.work import Result, Work
from flsim.models.language_model import Params

load = lru_cache(maxsize=1)(Work.load)


client_app = ClientApp()


@client_app.train()
def train_one_user(message: Message, context: Context) -> Message:
    """Train the user of this node."""
    config = message.content.config_records["config"]
    work = load(Path(str(config["work"])))
    data = work.rounds[int(config["server-round"]) - 1][int(context.node_config["partition-id"])]
    params = message.content.array_records["arrays"].to_torch_state_dict()
    model = model_type(params).from_params(params)
    train(model, data, work)
    metrics = MetricRecord({"num-examples": len(data[0])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def run(path: Path, cores: int) -> Result:
    """Train all rounds of the work, with a client process on each core."""
    work = Work.load(path)
    users = len(work.rounds[0])
    times: list[float] = []
    final: Params = {}
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 (Flower's signature)
        def clock(round_: int, arrays: ArrayRecord) -> None:  # noqa: ARG001
            times.append(time.perf_counter())

        # Without a minimum the first round goes without the nodes that are not there yet.
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=users, min_available_nodes=users)
        result = strategy.start(
            grid,
            ArrayRecord(work.start),
            num_rounds=len(work.rounds),
            train_config=ConfigRecord({"work": str(path.resolve())}),
            evaluate_fn=clock,
        )
        final.update(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=users,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"address": "local", "num_cpus": cores, "include_dashboard": False},
        },
    )
    return Result(final, [after - before for before, after in pairwise(times)])
