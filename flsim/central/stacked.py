"""The `fused` engine on a GPU."""

from flsim.central.engines import Engine
from flsim.central.state import CentralState
from flsim.central.training import CentralTraining


def StackedEngine(training: CentralTraining, state: CentralState) -> Engine:  # noqa: N802
    from flsim.central.autograd import AutogradEngine

    return AutogradEngine(training, state)
