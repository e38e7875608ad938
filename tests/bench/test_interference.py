"""The figures of the benchmark of interference, from rounds that are written down here."""

import pytest

from flsim.bench.interference import Round, compare, describe


def test_the_slowdown_is_set_beside_the_share() -> None:
    """2 s at rest, 2.5 s at work: of 2.5 s a fifth is lost, while the evaluator takes a quarter of the machine."""
    rest = [Round(2.0, 0.0), Round(1.9, 0.05), Round(9.0, 0.0)]
    work = [Round(2.5, 1.0), Round(2.4, 0.95), Round(8.0, 1.0)]
    partly = [Round(100.0, 0.5)]
    figures = compare([Round(1.8, 0.0)], rest + work + partly, share=0.25)
    assert figures["round_seconds"] == {"without_evaluation": 1.8, "at_rest": 2.0, "at_work": 2.5}
    assert figures["rounds"] == {"without_evaluation": 1, "at_rest": 3, "at_work": 3}
    assert figures["slowdown"] == pytest.approx(0.2)
    assert figures["ratio"] == pytest.approx(0.8)
    said = describe({**figures, "cores": 2, "unit": "a round"})
    assert "takes 25.0% of 2 cores, training is 20.0% slower: 0.80 times its share" in said
