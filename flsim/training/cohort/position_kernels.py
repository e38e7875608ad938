"""The operations of a stacked step whose activations are by position; `triton_positions` has them.

Positions are in the order of time, then row. Logits are not stored: the first pass stores the log-sum-exp of each
position, and the second recomputes the logits while it updates the weights. Shapes and dtypes are as in `kernels`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flsim.training.cohort.kernels import Kernels


class Target(NamedTuple):
    """A weight that takes a step, or the memory of its gradient."""

    value: Tensor  # the weight in its own dtype, or the gradient
    # copy of the weight in the dtype of products; None if the weight has that dtype, and for gradients
    low: Tensor | None = None


class Prediction(NamedTuple):
    """The operands of the output layer."""

    chosen: Tensor  # [u, N, D], r at each position
    embedding: Tensor  # [u, V, D]; rounded to the dtype of `chosen` before it is multiplied
    bias: Tensor  # [u, V]
    targets: Tensor  # int32 [u, N]; 0, which is padding and not a word, after the positions of a user
    counts: Tensor  # int32 [u], number of positions of each user, which are the first ones
    # [u, N], log-sum-exp of the logits (nats), infinite after the positions of a user; written by `predict`
    log_sums: Tensor
    factor: Tensor | None = None  # float64 [1], factor of all gradients; 1 if None


class PositionKernels(Kernels, ABC):
    """The operations of a step by position; methods write to their arguments, but only within the positions of a user.

    Gradients are of each user's mean loss. If `rate` is None, a method writes gradients to its targets; otherwise it
    subtracts rate times the gradient from them. Targets of users without positions do not change.
    """

    @abstractmethod
    def recur_positions(
        self, gates: Tensor, bias: Tensor, recurrent: Tensor, projection: Tensor, before: Tensor, outputs: Tensor,
        cells: Tensor, hidden: Tensor, starts: Tensor, rows: int,
    ) -> None:  # fmt: skip
        """Run the cells over time, as in `flsim.models.cifg`.

        `gates` [u, N, 3H] have the contribution of inputs to the sums of gates, and become f, o, g; `bias` [u, 3H],
        `recurrent` [u, D, 3H], `projection` [u, H, D]. `before` [u, N, D] becomes r of the previous time of each
        position, 0 at the first time; `outputs` [u, N, D], `cells` [u, N, H] and `hidden` [u, N, H] become r, c and o
        tanh c. `starts`, int32 [u, T + 1], has the first position of each time, then the number of positions; `rows` is
        the largest number of rows at a time.
        """

    @abstractmethod
    def recur_positions_back(
        self, gates: Tensor, recurrent: Tensor, projection: Tensor, d_outputs: Tensor, cells: Tensor, starts: Tensor,
        rows: int,
    ) -> None:  # fmt: skip
        """Run the cells backwards over time; see `recur_positions`. The values of `cells` are lost.

        `gates`, f, o, g, become the gradient by the gates' sums; `d_outputs` [u, N, D] the complete gradient by r.
        """

    @abstractmethod
    def predict(self, prediction: Prediction, losses: Tensor, d_chosen: Tensor) -> None:
        """Compute the cross-entropy, and its gradient by `chosen`; log-sum-exps of the prediction are written.

        `losses` [u, N], nats, and `d_chosen` [u, N, D] become 0 after a user's positions.
        """

    @abstractmethod
    def descend_predictions(self, prediction: Prediction, weight: Target, bias: Target, rate: float | None) -> None:
        """Compute the gradients by the embedding [u, V, D] and by the bias [u, V], and store or apply them."""

    @abstractmethod
    def descend_positions(
        self, weights: Sequence[Target], lefts: Sequence[Tensor], right: Tensor, bias: Target | None, counts: Tensor,
        rate: float | None,
    ) -> None:  # fmt: skip
        """Compute the gradients left' right of one or two weights, and right's sum for a bias; store or apply them.

        `weights` are targets [u, m, n], each with a left [u, N, m]; `right` is [u, N, n], `bias` a target [u, n] or
        None, and `counts`, int32 [u], the number of positions of each user.
        """
