"""Runs side by side after equally many epochs, however many rounds or steps those are."""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown import from_csv, to_latex, to_markdown

from flsim.base.errors import InputError
from flsim.results.rows import Row, frame
from flsim.results.store import RunResults, read_run
from flsim.results.tables import memorization_table
from flsim.show import memorization
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


@pytest.mark.parametrize("wrong", [{"rounds_per_epoch": 0}, {"rounds_per_epoch": math.inf}, {"seed": "x"}])
def test_a_damaged_run_json_is_named(make_run: MakeRun, wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"run\.json: does not describe a run"):
        read_run(make_run({5: RS}, **wrong))


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


def test_many_epochs_are_abbreviated(make_run: MakeRun) -> None:
    run = read_run(make_run(dict.fromkeys(range(10, 210, 10), RS), rounds_per_epoch=10))
    with pytest.raises(InputError, match=r"choose one of 1, 2, 3, 4, \.\.\., 17, 18, 19, 20$"):
        run.evaluation_at_epoch(0.5)


def test_runs_of_both_kinds_are_shown_after_as_many_epochs(pair: list[RunResults]) -> None:
    table = memorization_table(pair, epoch=5)
    assert (table["round"].tolist(), table["epochs"].tolist()) == ([50, 1860], [5, 5])
    shown = to_markdown(table)
    assert "Round" not in shown
    assert "| Epochs" not in shown
    assert "\nAll after 5 epochs; an epoch reads as many records as there are.\n" in shown
    pd.testing.assert_frame_equal(from_csv(to_csv(table)), table, check_exact=True)


def test_different_epochs_have_a_column_in_place_of_rounds(pair: list[RunResults], make_run: MakeRun) -> None:
    half = read_run(make_run({93: RS}, name="half", setting="Half", rounds_per_epoch=37.2))
    table = memorization_table([*pair, half])
    head, _, *lines = to_markdown(table).splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == ["Epochs", "RS /9"]
    assert [line.split("|")[2].strip() for line in lines[:3]] == ["10", "10", "2.5"]
    assert memorization.EPOCH in to_markdown(table)
    assert "& Epochs &" in to_latex(table)
    old = read_run(make_run({5: RS}, name="old", setting="Old"))
    mixed = memorization_table([*pair, half, old])
    assert mixed["epochs"].isna().tolist() == [False, False, False, True]
    assert [line.split("|")[2].strip() for line in to_markdown(mixed).splitlines()[2:6]] == [
        "100",
        "3720",
        "93",
        "5",
    ]


def test_a_run_that_has_not_come_so_far_is_blank(pair: list[RunResults], make_run: MakeRun) -> None:
    slow = read_run(make_run({50: RS}, name="slow", setting="Slow", status="running", rounds_per_epoch=10))
    table = memorization_table([pair[0], slow], epoch=10)
    assert table["epochs"].fillna(-1).tolist() == [10, -1]
    assert memorization_table([pair[0], slow], epoch=5)["epochs"].tolist() == [5, 5]
    with pytest.raises(InputError, match="was not evaluated at 3 epochs"):
        memorization_table([pair[0], slow], epoch=3)


def test_a_round_and_an_epoch_are_one_too_many(pair: list[RunResults]) -> None:
    with pytest.raises(InputError, match="--round and --epoch"):
        memorization_table(pair, round=50, epoch=5)
