"""The choice of the engine that trains a task on its device."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flsim.base.progress import say
from flsim.training.central.autograd import AutogradEngine
from flsim.training.central.packed import PackedEngine
from flsim.training.central.task import CentralTask, Engine, refuse_precision
from flsim.training.optimizers import optimizer_named
from flsim.training.state import State

if TYPE_CHECKING:
    from flsim.training.central.distributed import DistributedEngine
    from flsim.training.central.distributed_stacked import DistributedStackedEngine


def engine_of(training: CentralTask, state: State) -> Engine:
    """Return the engine that the settings ask for, holding the state.

    Engine "autograd" is plain PyTorch with torch's optimizers, on any device, and the oracle of the others. It also
    trains DP-SGD, which needs each record's gradient, and models that declare no written-out gradient. Engine "fused"
    is the written-out gradient: on a CPU without padding, elsewhere as one user of the cohort engine, with
    its kernels and graphs.

    Raises:
        InputError: the engine, or the device, lacks the precision of the settings.
    """
    refuse_precision(training)
    able = training.capabilities
    if training.engine == "autograd" or training.privacy.mechanism != "none" or not able.written_out:
        return AutogradEngine(training, state)
    if training.device == "cpu":
        return PackedEngine(training, state)
    if not able.stacked:
        return AutogradEngine(training, state)
    if optimizer_named(training.hparams.optimizer).direction is None:
        say(f'optimizer "{training.hparams.optimizer}" has no kernel; engine "autograd" trains in its place')
        return AutogradEngine(training, state)
    from flsim.training.central.stacked import StackedEngine

    return StackedEngine(training, state)


def group_engine_of(
    training: CentralTask, state: State, is_asked: Callable[[], bool]
) -> "DistributedEngine | DistributedStackedEngine":
    """Return the engine of a process of torch's default group, holding the state.

    On GPUs it is the kernels' where `engine_of` would return theirs.

    Args:
        training, state: as for `engine_of`; the state is the same in all processes.
        is_asked: whether training shall end; only the first process of the group calls it.

    Raises:
        InputError: see `flsim.training.central.distributed.refuse_what_trains_alone`.
    """
    from flsim.training.central.distributed import DistributedEngine, refuse_what_trains_alone
    from flsim.training.central.distributed_stacked import DistributedStackedEngine

    refuse_what_trains_alone(training.privacy.mechanism, training.hparams.precision, training.architecture)
    has_kernels = training.capabilities.stacked and optimizer_named(training.hparams.optimizer).direction is not None
    if training.device != "cpu" and training.engine == "fused" and has_kernels:
        return DistributedStackedEngine(training, state, is_asked)
    return DistributedEngine(training, state, is_asked)
