"""A step of stacked users whose activations are by position, without padding between the records of a batch.

The recurrence has the rows of each time one after another, so that what it leaves is what words are predicted from. The
output layer stores no logits (`position_kernels`). Each product of the weights' gradients ends with a user's positions.

Shapes: u users, T times, B rows, N positions, D embedding, H units, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from flsim.models.language_model import Params
from flsim.training.cohort.activations import PositionActivations, PositionSizes
from flsim.training.cohort.packing import Parts, Shape
from flsim.training.cohort.position_kernels import PositionKernels, Prediction, Target
from flsim.training.cohort.stacked_model import StackedWeights
from flsim.training.hparams import Precision


class PositionModel(StackedWeights):
    """The gradient of each model's mean cross-entropy by its own weights; `StackedModel` is its oracle.

    Args:
        wide, users, precision, holds_gradients: as for `StackedWeights`.
        kernels: the parts of a step that are no plain products.
    """

    sizes = PositionSizes

    def __init__(
        self, wide: Params, users: int, precision: Precision, kernels: PositionKernels, holds_gradients: bool
    ) -> None:
        super().__init__(wide, users, precision, holds_gradients)
        self._kernels = kernels

    def descend(self, shape: Shape, parts: Parts, rate: float | Tensor) -> Tensor:
        """Take a step of plain SGD, which needs no gradients in memory.

        Args:
            shape, parts: the step of the first u users; positions are in the order of time, then row.
            rate: learning rate. A tensor, float64 [1], may change under a CUDA graph.

        Returns:
            [u, N], the cross-entropy in nats before the step, 0 beyond a user's positions.
        """
        return self._step(shape, parts, *((rate, 1.0) if isinstance(rate, Tensor) else (None, rate)))

    def gradient(self, shape: Shape, parts: Parts) -> Tensor:
        """Compute the gradients of the first u users that have positions; arguments and result as for `descend`."""
        return self._step(shape, parts, None, None)

    def _step(self, shape: Shape, parts: Parts, factor: Tensor | None, rate: float | None) -> Tensor:
        """Compute gradients times the factor, and store them, or subtract rate times them from the weights."""
        kernels, a = self._kernels, PositionActivations(*self.buffers.views(shape))
        w = {name: value[: shape.users] for name, value in self.low.items()}
        has_low = rate is not None and self.low is not self.weights
        values = self.gradients if rate is None else self.weights

        def target(name: str) -> Target:
            return Target(values[name][: shape.users], w[name] if has_low else None)

        parts, starts = _by_position(shape, parts)
        tokens = self._flat_places(parts.tokens.flatten(1), w["embedding"].shape[1])
        torch.index_select(w["embedding"].flatten(0, 1), 0, tokens, out=a.read.flatten(0, 1))
        torch.bmm(a.read, w["input_weight"], out=a.gates)
        weights = w["recurrent_weight"], w["projection"]
        kernels.recur_positions(
            a.gates, w["gate_bias"], *weights, a.before, a.outputs, a.cells, a.hidden, starts, shape.rows
        )
        # Where the low copy is the rounded weight, the second pass reads the weight alone, which it needs anyway.
        prediction = Prediction(
            a.outputs, w["embedding"], w["output_bias"], parts.targets, parts.counts, a.log_sums, factor
        )
        kernels.predict(prediction, a.losses, a.d_outputs)
        table = target("embedding")
        own = prediction if rate is None else prediction._replace(embedding=table.value)
        kernels.descend_predictions(own, table, target("output_bias"), rate)
        kernels.recur_positions_back(a.gates, *weights, a.d_outputs, a.cells, starts, shape.rows)
        torch.bmm(a.gates, w["input_weight"].mT, out=a.d_read)

        def descend(names: list[str], lefts: list[Tensor], right: Tensor, bias: Target | None = None) -> None:
            kernels.descend_positions([target(name) for name in names], lefts, right, bias, parts.counts, rate)

        descend(["input_weight", "recurrent_weight"], [a.read, a.before], a.gates, target("gate_bias"))
        descend(["projection"], [a.hidden], a.d_outputs)
        kernels.add_rows(table.value, table.low, a.d_read, parts, 1.0 if rate is None else -rate)
        return a.losses


def _by_position(shape: Shape, parts: Parts) -> tuple[Parts, Tensor]:
    """Return the step as one time with a row for each position, and where times begin, int32 [u, T + 1].

    The last value of a user is its number of positions.
    """
    users, times, rows, positions = shape
    numbers: Any = {"device": parts.places.device, "dtype": torch.int32}
    position = torch.arange(positions, **numbers)
    tokens = parts.tokens.flatten(1).gather(1, (parts.places - rows).clamp(min=0).long())
    ends = torch.arange(rows, rows * (times + 1) + 1, rows, **numbers)
    earlier = (parts.places[:, None] < ends[:, None]) & (position < parts.counts[:, None])[:, None]
    places = (positions + position).expand(users, -1).contiguous()
    return parts._replace(tokens=tokens[:, None], places=places), earlier.sum(-1, dtype=torch.int32)
