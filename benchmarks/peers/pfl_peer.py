"""Training with pfl-research: its FederatedAveraging over its simulated backend and PyTorch model.

The code follows its own benchmarks. Several processes, started by torch's launcher, share a cohort, as its
documentation describes for several GPUs.
"""

import time
from itertools import pairwise
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.model import model_type
from benchmarks.peers.work import Result, Work
from flsim.models.language_model import Params


def trainable(params: Params) -> nn.Module:
    """Return the model that pfl trains by its `loss`, with `metrics`, which pfl calls in its first round."""
    model_class = model_type(params)

    class Model(model_class):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
            total, count = self.total_loss(inputs, targets)
            return {"loss": Weighted(total.item(), count)}

    model: nn.Module = Model.from_params(params)
    return model


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Callback that records the time after each round."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        self.times.append(time.perf_counter())
        return False, Metrics()


def run(path: Path, cores: int) -> Result | None:  # noqa: ARG001 (torch's launcher has started a process for each)
    """Train all rounds of the work; the first process returns the result, the others None."""
    work = Work.load(path)
    users = len(work.rounds[0])
    # A sampler that goes through the users of all rounds in order gives each round its own.
    names = [f"{round_}/{user}" for round_ in range(len(work.rounds)) for user in range(users)]
    sampler = get_user_sampler("minimize_reuse", names)

    def dataset(name: str) -> PyTorchTensorDataset:
        round_, user = map(int, name.split("/"))
        return PyTorchTensorDataset(work.rounds[round_][user], user_id=name)

    module = trainable(work.start)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(dataset, sampler)
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(work.rounds),
            evaluation_frequency=len(work.rounds),
            train_cohort_size=users,
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=work.batch_size, local_num_epochs=1, local_learning_rate=work.learning_rate
        ),
        NNEvalHyperParams(local_batch_size=work.batch_size),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if pytorch_ops.distributed.global_rank:
        return None
    params = {name: value.detach() for name, value in module.named_parameters()}
    return Result(params, [after - before for before, after in pairwise(clock.times)])
