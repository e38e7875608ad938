"""Runs side by side after equally many epochs, however many rounds or steps those are."""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown import from_csv, to_markdown

from flsim.base.errors import InputError
from flsim.results.rows import Row, frame
from flsim.results.store import RunResults, read_run
from flsim.results.tables import memorization_table
from flsim.show.table import to_csv

MakeRun = Callable[..., Path]
RS = {"rs": [0.0] * 9}
FEDAVG, SGD = "Non-IID, FedAvg, b_u=16", "Non-IID, SGD, b_r=32"


@pytest.fixture
def pair(make_run: MakeRun) -> list[RunResults]:
    """Ten epochs are 100 rounds of one and 3,720 steps of the other, and each was evaluated after five as well."""
    return [
        read_run(make_run({50: RS, 100: RS}, name="fedavg", setting=FEDAVG, rounds_per_epoch=10.0)),
        read_run(make_run({1860: RS, 3720: RS}, name="sgd", setting=SGD, rounds_per_epoch=372)),
    ]


def test_what_run_json_says_is_read_and_an_older_one_says_nothing(make_run: MakeRun) -> None:
    new = read_run(make_run({5: RS}, name="new", rounds_per_epoch=2.5, seed=3, series="ab"))
    old = read_run(make_run({5: RS}, name="old"))
    assert (new.rounds_per_epoch, new.seed, new.series, new.epochs_of(5)) == (2.5, 3, "ab", 2)
    assert (old.rounds_per_epoch, old.seed, old.series, old.epochs_of(5)) == (None, None, None, None)
    with pytest.raises(InputError, match="run old: an older run, which does not say what an epoch is"):
        old.evaluation_at_epoch(2)


ROUNDS = st.sets(st.integers(1, 5_000), min_size=1, max_size=6)


@given(ROUNDS, st.floats(0.05, 500), st.floats(0.01, 100))
def test_the_evaluation_at_an_epoch_is_the_nearest_and_near(rounds: set[int], per_epoch: float, epoch: float) -> None:
    """Against the definition: no other round is nearer, and it is less than a round off, or 1% where that is more."""
    rows = frame([Row("a", round_, "accuracy", "", 0.2) for round_ in sorted(rounds)])
    run = RunResults("a", "A", "completed", None, max(rounds), max(rounds), rows, pd.DataFrame(), {}, per_epoch)
    off = {round_: abs(round_ - epoch * per_epoch) for round_ in rounds}
    if min(off.values()) < max(1.0, 0.01 * epoch * per_epoch):
        assert off[run.evaluation_at_epoch(epoch)] == min(off.values())
    else:
        with pytest.raises(InputError, match="choose one of"):
            run.evaluation_at_epoch(epoch)


@pytest.mark.parametrize("epoch", [9.8, 7, 0, -5, math.nan, math.inf])
def test_an_epoch_that_was_not_evaluated_is_one_line_with_those_that_were(pair: list[RunResults], epoch: float) -> None:
    with pytest.raises(InputError) as caught:
        pair[1].evaluation_at_epoch(epoch)
    assert str(caught.value) == f"run sgd: was not evaluated at {epoch:g} epochs; choose one of 5, 10"


def test_runs_of_both_kinds_are_shown_after_as_many_epochs(pair: list[RunResults]) -> None:
    table = memorization_table(pair, epoch=5)
    assert (table["round"].tolist(), table["epochs"].tolist()) == ([50, 1860], [5, 5])
    shown = to_markdown(table)
    assert "Round" not in shown
    assert "| Epochs" not in shown
    assert "\nAll after 5 epochs; an epoch reads as many records as there are.\n" in shown
    pd.testing.assert_frame_equal(from_csv(to_csv(table)), table, check_exact=True)


def test_a_run_that_has_not_come_so_far_is_blank(pair: list[RunResults], make_run: MakeRun) -> None:
    slow = read_run(make_run({50: RS}, name="slow", setting="Slow", status="running", rounds_per_epoch=10))
    table = memorization_table([pair[0], slow], epoch=10)
    assert table["epochs"].fillna(-1).tolist() == [10, -1]
    assert memorization_table([pair[0], slow], epoch=5)["epochs"].tolist() == [5, 5]
    with pytest.raises(InputError, match="was not evaluated at 3 epochs"):
        memorization_table([pair[0], slow], epoch=3)
