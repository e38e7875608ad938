"""The choice of the engine that trains a task on its device."""

from flsim.base.extensions import configured
from flsim.base.progress import say
from flsim.training.central.autograd import AutogradEngine
from flsim.training.central.packed import PackedEngine
from flsim.training.central.task import CentralTask, Engine, refuse_precision
from flsim.training.optimizers import optimizer_named
from flsim.training.state import State


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
    if not _has_kernels(training):
        return AutogradEngine(training, state)
    from flsim.training.central.stacked import StackedEngine

    return StackedEngine(training, state)


def _has_kernels(training: CentralTask) -> bool:
    """Return whether there are kernels for the model and the optimizer; says where only the optimizer has none."""
    if not training.capabilities.stacked:
        return False
    if optimizer_named(configured(training.hparams, "optimizer")).direction is None:
        say(f'optimizer "{training.hparams.optimizer}" has no kernel; engine "autograd" trains in its place')
        return False
    return True
