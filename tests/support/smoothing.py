"""Adam and RMSProp without amplified rounding, for tests that compare engines."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch

from flsim.training import optimizers

EPSILON = 1.0


@contextmanager
def smooth_steps() -> Iterator[None]:
    """Set the epsilon of Adam and RMSProp to 1, in all engines; usable as a decorator.

    With an epsilon of 1e-8 a gradient's component that is nearly 0 moves its weight by up to the whole learning rate,
    in the direction that rounding chose: no tolerance that is derived from a number format tells that from a fault.

    With an epsilon of 1 rounding stays what it is. Adam's direction is m / (s + epsilon), where m is a mean of the
    gradients so far and s the root of a weighted mean of their squares. Gradients that are off by at most d move m by
    at most d, s by at most d (triangle inequality), and |m| <= 1.09 s within 14 steps (Cauchy and Schwarz). So the
    direction is off by at most d / (s + epsilon) + 1.09 s d / (s + epsilon)^2, which is largest where s is about 0:
    d / epsilon. A step is as smooth as one of plain SGD. In RMSProp s^2 is a sum whose factors add up to less than 0.14
    within 14 steps, so s is off by at most 0.37 d, and |g| <= 10 s: the direction is off by at most 1.5 d / epsilon.
    """
    with ExitStack() as patches:
        for name in ("Adam", "RMSprop"):
            patches.enter_context(patch.object(torch.optim, name, partial(getattr(torch.optim, name), eps=EPSILON)))
        patches.enter_context(patch.object(optimizers, "EPSILON", EPSILON))
        yield


def amplified(bound: float) -> float:
    """Return how many times a relative error of gradients is at most, in smooth steps of Adam, by their norm's bound.

    No component exceeds the bound, and neither does s: the directions' norm is at least that of m / (bound + epsilon).
    """
    return 1 + bound / EPSILON
