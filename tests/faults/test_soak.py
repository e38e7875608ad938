"""A short form of `make soak` checks that memory, descriptors and objects do not grow over the rounds of a run."""

from pathlib import Path

import pytest
from soak import after_warm_up, soak

from flsim.runs.folder import Run

ROUNDS, EVERY = 150, 10
WATCHED = {"driver", "client", "gcs_server", "raylet"}  # not the evaluator, which starts during the run


@pytest.mark.nightly
def test_memory_descriptors_and_objects_do_not_grow(tmp_path: Path) -> None:
    """Memory grows by less than a copy of the parameters (315 KB) a round; heaps that still fill grew by 3 to 73 KB."""
    soaked = soak(tmp_path, ROUNDS, EVERY, seconds=0.1)
    parameters = sum(value.nbytes for value in Run.open(tmp_path / "run").latest_state().params.values())

    def left_behind(rounds: list[int], values: list[int]) -> tuple[int, int]:
        """Return a number of rounds, and the growth of the minimum over them."""
        rounds, values = after_warm_up(rounds, values, ROUNDS)
        fifth = len(values) // 5
        assert fifth > 1
        return rounds[-fifth] - rounds[0], min(values[-fifth:]) - min(values[:fifth])

    watched = [each for each in soaked.processes if each.kind in WATCHED]
    assert {each.kind for each in watched} == WATCHED
    for each in watched:
        rounds, grown = left_behind(each.rounds, each.own)
        assert grown < parameters * rounds, each.kind
        rounds, grown = left_behind(each.rounds, each.descriptors)
        assert grown < rounds / EVERY, each.kind
    for values in (soaked.objects.references, soaked.objects.owned):
        rounds, grown = left_behind(soaked.objects.rounds, values)
        assert grown < rounds / EVERY
