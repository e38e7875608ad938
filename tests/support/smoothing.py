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

    With an epsilon of 1e-8, a component of a gradient that is nearly 0 can move its weight by the full learning rate,
    in a direction that rounding determines. No tolerance derived from a number format separates this from a fault.

    An epsilon of 1 does not amplify rounding. Adam's direction is m / (s + epsilon): m is a mean of the gradients so
    far, and s is the root of a weighted mean of their squares. If gradients have errors of at most d, then m and s have
    errors of at most d (triangle inequality), and |m| <= 1.09 s within 14 steps (Cauchy and Schwarz). The error of the
    direction is at most d / (s + epsilon) + 1.09 s d / (s + epsilon)^2. This is largest for s near 0: d / epsilon, as
    smooth as a step of plain SGD. In RMSProp, s^2 is a sum whose factors add up to less than 0.14 within 14 steps.
    Therefore s has an error of at most 0.37 d, |g| <= 10 s, and the direction an error of at most 1.5 d / epsilon.
    """
    with ExitStack() as patches:
        for name in ("Adam", "RMSprop"):
            patches.enter_context(patch.object(torch.optim, name, partial(getattr(torch.optim, name), eps=EPSILON)))
        patches.enter_context(patch.object(optimizers, "EPSILON", EPSILON))
        yield


def amplified(bound: float) -> float:
    """Return the largest factor by which smooth steps of Adam amplify a relative error of gradients of a bounded norm.

    No component exceeds the bound, nor does s: the norm of the directions is at least that of m / (bound + epsilon).
    """
    return 1 + bound / EPSILON
