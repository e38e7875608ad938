"""Training in a known order: it never forgets in exact arithmetic, and in floats when the difference rounds away."""

from fractions import Fraction

import numpy as np
import pytest

from experiments.theory.deterministic_order import BITS, difference, measured_steps_until_equal, path, steps_until_equal
from flsim.base.rng import stream


@pytest.mark.parametrize("eta", [Fraction(1, 100), Fraction(1, 3), Fraction(49, 100)])
def test_exact_runs_always_differ_by_the_formula(eta: Fraction) -> None:
    """Jagielski et al. (2022), Theorem 2, in rational arithmetic: whichever example differs, all later models do."""
    examples = [Fraction(int(x), 7) for x in stream(0, "examples").integers(-20, 20, size=40)]
    for place in (0, 17, 39):
        other = [*examples[:place], examples[place] + Fraction(1, 1000), *examples[place + 1 :]]
        one, two = (list(path(Fraction(1), order, 2 * eta)) for order in (examples, other))
        for step, (a, b) in enumerate(zip(one, two, strict=True)):
            assert (a == b) == (step < place)
            if step >= place:
                assert b - a == 2 * eta * Fraction(1, 1000) * (1 - 2 * eta) ** (step - place)
                assert float(b - a) == pytest.approx(difference(float(eta), step - place, 0.001), rel=1e-9)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3])
def test_floats_are_equal_about_when_the_difference_is_below_their_spacing(rate: float, kind: str) -> None:
    """At half the steps no pair is equal. The median is within 5% and 2 steps of the formula."""
    counts = measured_steps_until_equal(rate, kind)
    expected = steps_until_equal(rate, moved=2, bits=BITS[kind])
    assert counts.min() > expected / 2
    assert np.median(counts) == pytest.approx(expected, rel=0.05, abs=2)
