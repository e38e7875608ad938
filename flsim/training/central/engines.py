"""Which engine trains a task on its device."""

from flsim.base.progress import say
from flsim.training.central.autograd import AutogradEngine
from flsim.training.central.packed import PackedEngine
from flsim.training.central.task import CentralTask, Engine, refuse_precision
from flsim.training.optimizers import optimizer_named
from flsim.training.state import State


def engine_of(training: CentralTask, state: State) -> Engine:
    """The engine that the training asks for, at that state.

    "autograd" is plain PyTorch with torch's optimizers, anywhere, and the oracle of the others. DP-SGD, which needs
    each record's gradient, always takes it, and so do models that do not declare more. "fused" is a gradient written
    out: on a CPU without padding, elsewhere with kernels and graphs of the cohort engine, as one user, which is also
    how bfloat16 is trained anywhere.

    Raises:
        InputError: the engine, or the device, has not the precision that is asked for.
    """
    refuse_precision(training)
    able, is_packed = training.capabilities, training.device == "cpu" and training.hparams.precision == "float32"
    if training.engine == "autograd" or training.privacy.mechanism != "none" or not able.written_out:
        return AutogradEngine(training, state)
    if is_packed:
        return PackedEngine(training, state)
    if not able.stacked:
        return AutogradEngine(training, state)
    if optimizer_named(training.hparams.optimizer).direction is None:
        say(f'optimizer "{training.hparams.optimizer}" has no kernel; engine "autograd" trains in its place')
        return AutogradEngine(training, state)
    from flsim.training.central.stacked import StackedEngine

    return StackedEngine(training, state)
