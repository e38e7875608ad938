"""What trains: one contract, and which engine keeps it on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flsim.central.state import CentralState, Moments
from flsim.data.records import Records
from flsim.errors import InputError
from flsim.model.language_model import Params

if TYPE_CHECKING:
    from flsim.central.training import CentralTraining

EngineName = Literal["fused", "autograd"]


@dataclass(frozen=True)
class Chunk:
    """What consecutive steps read.

    Attributes:
        first: the first of them, from 0.
        records: of all of them, one step after another.
        counts: int64 [steps], records of each; of DP-SGD a lot may be empty.
    """

    first: int
    records: Records
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def end(self) -> int:
        """The step after the last."""
        return self.first + len(self)


class Engine(Protocol):
    """Holds parameters and optimizer, and trains them in place."""

    def pack(self, chunk: Chunk) -> Any:
        """What `train` takes; may run in another thread, while an earlier chunk trains."""
        ...

    def train(self, packed: Any) -> tuple[Sequence[float], Sequence[int]]:
        """Of each step, the summed cross-entropy (nats) before it, and its number of positions."""
        ...

    def params(self) -> Params:
        """A copy of the parameters, on the CPU."""
        ...

    def moments(self) -> Moments:
        """A copy of the optimizer's state, on the CPU; see `CentralState`."""
        ...


def engine_of(training: "CentralTraining", state: CentralState) -> Engine:
    """The engine that the training asks for, at that state.

    "autograd" is plain PyTorch with torch's optimizers, anywhere, and the oracle of the others. DP-SGD, which needs
    each record's gradient, always takes it, and so do other architectures than the CIFG. "fused" is a gradient written
    out: on a CPU without padding, elsewhere with kernels and graphs of the cohort engine, as one user, which is also
    how bfloat16 is trained anywhere.

    Raises:
        InputError: the engine, or the device, has not the precision that is asked for.
    """
    refuse_precision(training)
    if training.engine == "autograd" or training.privacy.mechanism != "none" or training.architecture != "cifg":
        from flsim.central.autograd import AutogradEngine

        return AutogradEngine(training, state)
    if training.device == "cpu" and training.hparams.precision == "float32":
        from flsim.central.packed import PackedEngine

        return PackedEngine(training, state)
    from flsim.central.stacked import StackedEngine

    return StackedEngine(training, state)


def refuse_precision(training: "CentralTraining") -> None:
    """Raises InputError where neither engine nor device has it."""
    precision = training.hparams.precision
    if precision == "float32":
        return
    if training.architecture != "cifg":
        raise InputError(
            f'architecture "{training.architecture}" trains in float32; training.precision "{precision}" needs "cifg"'
        )
    if training.engine == "autograd" or training.privacy.mechanism != "none":
        raise InputError(
            f'training.precision "{precision}" needs engine "fused" without clip or noise; set it to "float32"'
        )
    if precision == "tf32" and training.device == "cpu":
        raise InputError('training.precision "tf32" needs an NVIDIA GPU; set system.device = "cuda", or "float32"')
