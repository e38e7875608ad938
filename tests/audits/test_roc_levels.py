"""Levels of a ROC curve: one false positive of n is a level of n others, however 1 / n is rounded."""

import numpy as np
import pytest

from flsim.audits.roc import roc
from flsim.base.errors import InputError


def test_a_level_of_one_of_n_is_one_false_positive() -> None:
    """1 / 98 times 98 is below 1 in float64."""
    assert 1 / 98 * 98 < 1
    for count in range(1, 400):
        members, others = (np.arange(count, dtype=np.float64) for _ in range(2))
        members += 0.5
        at = roc(members, others).at(1 / count)
        assert (at.alarms, at.detected) == (1, min(2, count))


def test_a_level_below_one_of_n_is_refused() -> None:
    with pytest.raises(InputError, match="needs 99 others, found 98"):
        roc(np.array([1.0]), np.arange(98.0)).at(1 / 99)
