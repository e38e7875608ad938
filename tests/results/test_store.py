"""Stored rows are complete or absent, occur once, and never belong to another run."""

import dataclasses
import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import Diverged, InputError
from flsim.results.rows import SCHEMA, Row, RunResults, frame, read_run, write_rows
from flsim.results.tables import memorization_table

MakeRun = Callable[..., Path]

NINE = [0.0] * 9
WHOLE = {"name": "iid", "setting": "a", "status": "completed", "reason": None, "round": 1, "rounds": 1}
ROWS = [Row("iid", 10, "rs", f"c{index:02d}", float(index % 2)) for index in range(9)]
ROWS += [Row("iid", 10, "accuracy", "", 0.25), Row("iid", 10, "rank", "c00", 1.0)]


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_run(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_written_rows_are_read_back(make_run: MakeRun) -> None:
    folder = make_run()
    write_rows(folder, 10, ROWS)
    write_rows(folder, 5, [Row("iid", 5, "accuracy", "", 0.125)])
    run = read_run(folder)
    assert (run.name, run.setting, run.status, run.reason) == ("iid", "IID, FedAvg, b_u = 16", "completed", None)
    assert run.evaluated == [5, 10]
    stored = {Row(**{str(name): value for name, value in row.items()}) for row in run.rows.to_dict("records")}
    assert stored == {*ROWS, Row("iid", 5, "accuracy", "", 0.125)}
    assert pq.read_schema(folder / "rows" / "round-000010.parquet").equals(SCHEMA)
    rs = run.of_canaries("rs", 10)
    assert rs is not None
    assert rs.tolist() == [float(index % 2) for index in range(9)]
    assert run.of_canaries("bs", 10) is None
    assert run.of_model("accuracy", 5) == 0.125
    assert run.of_model("perplexity", 5) is None


def test_writing_rows_twice_changes_no_byte(make_run: MakeRun) -> None:
    """The same rows in any order are the same file, byte for byte."""
    folder = make_run()
    write_rows(folder, 10, ROWS)
    before = {path.name: path.read_bytes() for path in (folder / "rows").iterdir()}
    write_rows(folder, 10, ROWS[::-1])
    assert {path.name: path.read_bytes() for path in (folder / "rows").iterdir()} == before


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Row("iid", 11, "accuracy", "", 0.5)],
        [*ROWS, Row("iid", 11, "accuracy", "", 0.5)],
        [*ROWS, Row("other", 10, "accuracy", "", 0.5)],
        [*ROWS, Row("iid", 10, "accuracy", "", 0.5)],
    ],
    ids=["none", "another round", "two rounds", "two runs", "a key twice"],
)
def test_rows_that_do_not_belong_are_refused(make_run: MakeRun, rows: list[Row]) -> None:
    folder = make_run()
    with pytest.raises(ValueError, match=r"rows of one run|accuracy is measured twice"):
        write_rows(folder, 10, rows)
    assert not (folder / "rows").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_canary_without_a_finite_value_is_never_stored(make_run: MakeRun, value: float) -> None:
    folder = make_run()
    with pytest.raises(Diverged, match="iid: exposure c03 of round 10 is"):
        write_rows(folder, 10, [*ROWS, Row("iid", 10, "exposure", "c03", value)])
    assert not (folder / "rows").exists()


def test_a_run_without_rows_is_readable(make_run: MakeRun) -> None:
    run = read_run(make_run(status="running"))
    assert run.evaluated == []
    assert run.rows.dtypes.to_dict() == read_run(make_run({1: {"rs": NINE}}, name="b")).rows.dtypes.to_dict()
    with pytest.raises(InputError, match="not evaluated yet"):
        run.evaluation()


def test_partial_files_of_a_killed_write_are_not_read(make_run: MakeRun) -> None:
    folder = make_run({10: {"rs": NINE}})
    (folder / "rows" / ".round-000020.parquet.partial-1").write_bytes(b"PAR1")
    assert read_run(folder).evaluated == [10]


def test_folders_that_are_not_runs_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")
    assert "not a run folder" in refusal(tmp_path)
    folder = make_run({10: {"rs": NINE}})
    (folder / "planted" / "roster.parquet").unlink()
    assert "roster.parquet: no such file" in refusal(folder)


@pytest.mark.parametrize(
    "about",
    [
        "{",
        json.dumps(WHOLE | {"setting": "a\nb"}),
        json.dumps(WHOLE | {"status": "perhaps"}),
        json.dumps(WHOLE | {"partition": "mars", "label": "a"}),
        json.dumps(WHOLE | {"partition": "iid", "label": "a\nb"}),
    ],
)
def test_a_damaged_run_json_is_named(make_run: MakeRun, about: str) -> None:
    folder = make_run()
    (folder / "run.json").write_text(about)
    assert "run.json: does not describe a run" in refusal(folder)


def test_the_partition_is_stored_or_begins_the_setting(make_run: MakeRun) -> None:
    """If run.json has no partition, the setting begins with it. A label may look like a partition."""
    cases: list[tuple[dict[str, Any], tuple[str | None, str]]] = [
        ({"setting": "Non-IID, FedAvg"}, ("non-iid", "FedAvg")),
        ({"setting": "DP-SGD"}, (None, "DP-SGD")),
        ({"setting": "IID, A", "partition": "iid", "label": "A"}, ("iid", "A")),
        ({"setting": "IID, A", "partition": None, "label": "IID, A"}, (None, "IID, A")),
    ]
    for number, (about, expected) in enumerate(cases):
        run = read_run(make_run(name=f"run-{number}", **about))
        assert (run.partition, run.label, run.setting) == (*expected, about["setting"])


@pytest.mark.parametrize("kept", [0, 4, 500, -1])
def test_a_damaged_file_is_named(make_run: MakeRun, kept: int) -> None:
    folder = make_run({10: {"rs": NINE}, 20: {"rs": NINE}})
    path = folder / "rows" / "round-000020.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    assert refusal(folder).startswith(f"{path}: not a readable Parquet file")
    (folder / "planted" / "roster.parquet").write_bytes(b"not Parquet")
    assert "roster.parquet: not a readable Parquet file" in refusal(folder)


def store(folder: Path, name: str, rows: list[Row]) -> None:
    """Write a file of rows as another program might do."""
    frame = pd.DataFrame([dataclasses.asdict(row) for row in rows])
    pq.write_table(pa.Table.from_pandas(frame, SCHEMA, preserve_index=False), folder / "rows" / name)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*ROWS, ROWS[0]], "rs c00 occurs twice"),
        ([Row("iid", 11, "rs", "c00", 1.0)], "another round or canary"),
        ([Row("non-iid", 10, "rs", "c00", 1.0)], "another run, 'non-iid'"),
        ([Row("iid", 10, "rs", "c99", 1.0)], "another round or canary"),
        ([Row("iid", 10, "exposure", "c00", math.nan)], "not finite"),
    ],
)
def test_files_with_invalid_rows_are_named(make_run: MakeRun, rows: list[Row], said: str) -> None:
    folder = make_run({5: {"rs": NINE}})
    store(folder, "round-000010.parquet", rows)
    message = refusal(folder)
    assert "round-000010.parquet: " in message
    assert said in message


def test_a_file_of_another_kind_is_named(make_run: MakeRun) -> None:
    folder = make_run({5: {"rs": NINE}})
    pd.DataFrame({"run": ["iid"]}).to_parquet(folder / "rows" / "round-000005.parquet")
    assert "has no column round" in refusal(folder)


def test_a_metric_of_only_some_canaries_is_refused(make_run: MakeRun) -> None:
    run = read_run(make_run({10: {"rs": NINE[:8]}}))
    with pytest.raises(InputError, match="rs of 1 canaries is missing, for example c08"):
        run.of_canaries("rs", 10)
    with pytest.raises(InputError, match="round 7 was not evaluated; choose one of 10"):
        run.evaluation(7)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["rs", "bs"]), st.sampled_from(["", "b", "a"])), unique=True)
)
def test_values_equal_a_search_through_all_rows(keys: list[tuple[int, str, str]]) -> None:
    """Rows are in any order, and some canaries lack a value."""
    rows = pd.DataFrame([("iid", *key, index / 7) for index, key in enumerate(keys)], columns=SCHEMA.names)
    results = RunResults("iid", "a", "completed", None, 9, 9, rows, pd.DataFrame({"canary": ["a", "b"]}))
    for round_, metric in product(range(4), ("rs", "bs", "none")):
        values = {canary: index / 7 for index, (at, name, canary) in enumerate(keys) if (at, name) == (round_, metric)}
        of_model = values.pop("", None)
        assert results.of_model(metric, round_) == of_model
        of_canaries = results.of_canaries(metric, round_, is_partial=True)
        if not values:
            assert of_canaries is None
            continue
        assert of_canaries is not None
        expected = pd.Series(values, dtype="float64").reindex(["a", "b"])
        pd.testing.assert_series_equal(of_canaries, expected)
        if len(values) < 2:
            with pytest.raises(InputError, match="of 1 canaries is missing"):
                results.of_canaries(metric, round_)


RS = {"rs": [0.0] * 9}
FEDAVG, SGD = "Non-IID, FedAvg, b_u=16", "Non-IID, SGD, b_r=32"


@pytest.fixture
def pair(make_run: MakeRun) -> list[RunResults]:
    """Return two runs of ten epochs, 100 rounds and 3,720 steps, both also evaluated after five epochs."""
    return [
        read_run(make_run({50: RS, 100: RS}, name="fedavg", setting=FEDAVG, rounds_per_epoch=10.0)),
        read_run(make_run({1860: RS, 3720: RS}, name="sgd", setting=SGD, rounds_per_epoch=372)),
    ]


def test_epochs_seed_and_series_are_read_and_may_be_absent(make_run: MakeRun) -> None:
    new = read_run(make_run({5: RS}, name="new", rounds_per_epoch=2.5, seed=3, series="ab"))
    old = read_run(make_run({5: RS}, name="old"))
    assert (new.rounds_per_epoch, new.seed, new.series, new.epochs_of(5)) == (2.5, 3, "ab", 2)
    assert (old.rounds_per_epoch, old.seed, old.series, old.epochs_of(5)) == (None, None, None, None)
    with pytest.raises(InputError, match="run old: an older run without stored epochs"):
        old.evaluation_at_epoch(2)


ROUNDS = st.sets(st.integers(1, 5_000), min_size=1, max_size=6)


@given(ROUNDS, st.floats(0.05, 500), st.floats(0.01, 100))
def test_the_evaluation_at_an_epoch_is_the_nearest_and_near(rounds: set[int], per_epoch: float, epoch: float) -> None:
    """By definition, no other round is nearer, and it is less than a round away, or less than 1% if that is more."""
    rows = frame([Row("a", round_, "accuracy", "", 0.2) for round_ in sorted(rounds)])
    run = RunResults("a", "A", "completed", None, max(rounds), max(rounds), rows, pd.DataFrame(), {}, per_epoch)
    off = {round_: abs(round_ - epoch * per_epoch) for round_ in rounds}
    if min(off.values()) < max(1.0, 0.01 * epoch * per_epoch):
        assert off[run.evaluation_at_epoch(epoch)] == min(off.values())
    else:
        with pytest.raises(InputError, match=r"run a: was not evaluated at .* epochs; choose one of"):
            run.evaluation_at_epoch(epoch)


def test_a_run_that_has_not_reached_the_epoch_is_blank(pair: list[RunResults], make_run: MakeRun) -> None:
    slow = read_run(make_run({50: RS}, name="slow", setting="Slow", status="running", rounds_per_epoch=10))
    table = memorization_table([pair[0], slow], epoch=10)
    assert table["epochs"].fillna(-1).tolist() == [10, -1]
    assert memorization_table([pair[0], slow], epoch=5)["epochs"].tolist() == [5, 5]
    with pytest.raises(InputError, match="was not evaluated at 3 epochs"):
        memorization_table([pair[0], slow], epoch=3)
