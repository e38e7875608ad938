"""The trace: every row from the events themselves, on paper as in every format, and a figure that says the same."""

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import LineCollection

from flsim import cli
from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity
from flsim.results.canary_table import trace
from flsim.results.rows import Row, write_rows
from flsim.results.store import RunResults, read_run
from flsim.show.figure import refuse_other_than_figure
from flsim.show.trace import draw_trace, plot_trace, steps_to_text, to_csv, to_json, to_text

MakeRun = Callable[..., Path]
EVENTS = [  # round, canary, user
    (1, "c00", 7),
    (3, "c00", 7),
    (3, "c00", 9),
    (10, "c00", 9),
    (11, "c01", 2),
    (15, "c00", 7),
    (15, "c01", 2),
    (21, "c00", 7),
]


def frame(events: list[tuple[int, str, int]]) -> pd.DataFrame:
    return pd.DataFrame(events, columns=["round", "canary", "user"]).sort_values(["round", "canary", "user"])


@pytest.fixture
def run(make_run: MakeRun) -> RunResults:
    """Nine canaries, evaluated at 10 and 20; c02 is memorized at 20, by BS too; at 30 no canary was measured."""
    exposures = [float(index) for index in range(9)]
    at_20 = {"rs": [float(i == 2) for i in range(9)], "bs": [float(i == 2) for i in range(9)]}
    rounds = {
        10: {"exposure": exposures, "rs": [0.0] * 9, "bs": [0.0] * 9, "references": 1023.0},
        20: {"exposure": exposures[::-1], **at_20, "references": 1023.0},
        30: {"references": 1023.0},
    }
    return read_run(make_run(rounds))


def test_the_rows(run: RunResults) -> None:
    table = trace(run, frame(EVENTS), ["c01", "c00"])
    kept = table.drop(columns=["rs", "bs"]).itertuples(index=False, name=None)
    assert [tuple("-" if value != value else value for value in row) for row in kept] == [
        ("c00", 10, 0.0, 2, 4, 0, (1, 3, 10)),
        ("c00", 20, 8.0, 1, 5, 5, (15,)),
        ("c00", 30, "-", 1, 6, 9, (21,)),
        ("c01", 10, 1.0, 0, 0, "-", ()),
        ("c01", 20, 7.0, 1, 2, 5, (11, 15)),
        ("c01", 30, "-", 0, 2, 15, ()),
    ]
    of_c02 = trace(run, frame(EVENTS), ["c02"])
    assert of_c02[["rs", "bs"]].fillna(-1).to_numpy().tolist() == [[0, 0], [1, 1], [-1, -1]]


EVENT = st.tuples(st.integers(1, 35), st.sampled_from(["c00", "c03", "c08"]), st.integers(0, 3))


@settings(max_examples=50)
@given(st.lists(EVENT))
def test_windows_part_the_events(events: list[tuple[int, str, int]]) -> None:
    """Counted one by one; nothing after the last evaluation counts."""
    table = trace(SHARED, frame(events))
    assert len(table) == 9 * 3
    for row in table.to_dict("records"):
        own = [(round_, user) for round_, canary, user in events if canary == row["canary"] and round_ <= row["round"]]
        window = [(round_, user) for round_, user in own if round_ > row["round"] - 10]
        assert row["sharer_rounds"] == tuple(sorted({round_ for round_, _ in window}))
        assert row["sharers"] == len({user for _, user in window})
        assert row["participations"] == len(own)
        uses = [round_ for round_, _ in own]
        assert (row["rounds_since_use"] == row["round"] - max(uses)) if uses else math.isnan(row["rounds_since_use"])


def _shared() -> RunResults:
    ids = [f"c{index:02d}" for index in range(9)]
    rows = [("r", at, "exposure", id_, 1.0) for at in (10, 20, 30) for id_ in ids]
    roster = pd.DataFrame({"canary": ids, "p_u": 0.1, "p_e": 0.5})
    columns = ["run", "round", "metric", "canary", "value"]
    return RunResults("r", "s", "completed", None, 30, 30, pd.DataFrame(rows, columns=columns), roster)


SHARED = _shared()


def test_json_and_csv_hold_all(run: RunResults) -> None:
    table = trace(run, frame(EVENTS))
    rows = json.loads(to_json(table))
    assert rows[0] == {
        "canary": "c00",
        "round": 10,
        "exposure": 0.0,
        "rs": 0.0,
        "bs": 0.0,
        "sharers": 2,
        "participations": 4,
        "rounds_since_use": 0.0,
        "sharer_rounds": [1, 3, 10],
    }
    assert rows[2]["exposure"] is None
    read = pd.read_csv(io.StringIO(to_csv(table)), dtype={"sharer_rounds": "string"})
    assert read["sharer_rounds"][:2].tolist() == ["1 3 10", "15"]
    pd.testing.assert_frame_equal(read.drop(columns="sharer_rounds"), table.drop(columns="sharer_rounds"))


def test_text_fits_a_terminal(run: RunResults) -> None:
    many = [(round_, "c02", round_ % 5) for round_ in range(12, 20)]
    text = to_text(trace(run, frame([*EVENTS, *many])), run)
    assert max(map(len, text.splitlines())) <= 80
    block = text.split("\n\n")[3].splitlines()
    assert block[0] == "c02: p_u 1/5K, p_e 100%; copies 3"
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in block[3:]] == [
        ["10", "2.0", "no", "no", "0", "0", "", ""],
        ["20", "6.0", "yes", "yes", "5", "8", "1", "12 13 14 15 16 17 18 19"],
        ["30", "", "", "", "0", "8", "11", ""],
    ]
    assert "of at most 10.0" in text
    longer = [(round_, "c00", 1) for round_ in range(1, 10)] + [(10_000_000 + i, "c00", 1) for i in range(9)]
    late = read_run_at(run, 20_000_000)
    cut = to_text(trace(late, frame(longer), ["c00"]), late).splitlines()
    assert max(map(len, cut)) <= 80
    assert re.search(r"9,999,992 *\| *1 2 3 4 5 6 7 8 9 \.\.\.", "\n".join(cut))


def read_run_at(run: RunResults, round_: int) -> RunResults:
    """The same, evaluated at one late round."""
    rows = run.rows[run.rows["round"] == 10].assign(round=round_)
    return RunResults("r", "s", "completed", None, round_, round_, rows, run.roster)


def test_effective_steps_are_one_line_or_two_and_none_without_rounds() -> None:
    text = steps_to_text([0.05, 0.1, 0.0501, 0.0502, 12345.678])
    assert max(map(len, text.splitlines())) <= 80
    assert "median 0.0502 over 5 rounds, from 0.05 to 1.23e+04" in " ".join(text.split())
    assert steps_to_text([]) == ""


def test_what_there_is_not_is_refused(run: RunResults, make_run: MakeRun) -> None:
    with pytest.raises(InputError, match="has no canary c09; its canaries are c00 to c08"):
        trace(run, frame(EVENTS), ["c00", "c09"])
    with pytest.raises(InputError, match="new: not evaluated yet"):
        trace(read_run(make_run(name="new")), frame(EVENTS))


def test_the_figure_says_what_the_table_says(run: RunResults) -> None:
    table = trace(run, frame(EVENTS))
    figure = draw_trace(run, table)
    assert [axes.get_title(loc="left") for axes in figure.axes[::2]][:2] == [
        "$p_u$ = 1/5K, $p_e$ = 1%",
        "$p_u$ = 1/5K, $p_e$ = 10%",
    ]
    lines, strip = figure.axes[:2]
    x, y = np.asarray(lines.get_lines()[0].get_data(), float)
    assert (x[:2].tolist(), y[:2].tolist(), math.isnan(y[2])) == ([10, 20], [0, 8], True)
    ticks = [collection for collection in strip.collections if isinstance(collection, LineCollection)]
    assert [segment[0][0] for collection in ticks for segment in collection.get_segments()] == [1, 3, 10, 15, 21]
    assert [label.get_text() for label in strip.get_yticklabels()] == ["c00 (3)"]
    filled, ring = figure.axes[4].get_lines()[1:3]
    for mark in (filled, ring):
        assert np.asarray(mark.get_data(), float).T.tolist() == [[20, 6]]
    assert lines.get_ylabel() == "exposure, bits"
    assert figure.axes[-1].get_xlabel() == "completed rounds (central: steps)"


def test_own_quantities_have_a_panel_each(make_run: MakeRun) -> None:
    folder = make_run(name="own")
    own = [
        Quantity(name="nats", unit="nats", description="Nats of a canary."),
        Quantity(name="seen", kind="flag", description="Whether it was seen."),
    ]
    for round_ in (10, 20):
        values = {"exposure": 2.0, "nats": 5.0 + round_, "seen": float(round_ == 20)}
        rows = [Row("own", round_, name, f"c{i:02d}", value) for name, value in values.items() for i in range(9)]
        write_rows(folder, round_, rows, own)
    figure = draw_trace(read_run(folder), trace(read_run(folder), frame(EVENTS), ["c00", "c01"]))
    exposure, seen, nats, strip = figure.axes[:4]
    assert [axes.get_ylabel() for axes in (exposure, seen, nats)] == ["exposure, bits", "seen", "nats, nats"]
    drawn = [np.asarray(axes.get_lines()[0].get_data(), float).tolist() for axes in (exposure, seen, nats)]
    assert drawn == [[[10, 20], [2, 2]], [[10, 20], [0, 1]], [[10, 20], [15, 25]]]
    assert [label.get_text() for label in seen.get_yticklabels()] == ["no", "yes"]
    assert {axes.get_xlim() for axes in figure.axes} == {strip.get_xlim()}
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box and other and box.overlaps(other)]


def test_nothing_in_the_figure_overlaps_and_lines_differ_without_colour(make_run: MakeRun) -> None:
    level = {"exposure": [1.0] * 26, "rs": [0.0] * 26, "bs": [0.0] * 26, "references": 1000.0}
    run = read_run(make_run({10: level, 20: level}, grid=((0.1, 0.1), (0.1, 1.0)), copies=13))
    figure = draw_trace(run, trace(run, frame([(5, "c25", 0)])))
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [figure.legends[0].get_window_extent()]
    for index, box in enumerate(boxes):
        assert box is not None
        assert not any(box.overlaps(other) for other in boxes[:index] if other is not None)
        assert figure.bbox.containsx(box.x0 + 1)
        assert figure.bbox.containsx(box.x1 - 1)
    lines = [line for line in figure.axes[0].get_lines() if len(np.asarray(line.get_xdata())) == 2][:-1]
    shapes = [(line.get_marker(), line.get_linestyle()) for line in lines if line.get_linestyle() != "None"]
    assert len(set(shapes)) == len(shapes) == 13


@pytest.mark.parametrize("name", ["trace.png", "trace.svg", "trace.pdf"])
def test_the_same_trace_gives_the_same_file(run: RunResults, tmp_path: Path, name: str) -> None:
    table = trace(run, frame(EVENTS))
    plot_trace(run, table, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    plot_trace(run, table, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    with pytest.raises(InputError, match="written as"):
        refuse_other_than_figure(tmp_path / "trace.jpg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: not a run folder"),
        (["iid", "--json", "--csv"], "--json and --csv: choose one of them"),
        (["iid", "--out", "trace.jpg"], "plots are written as .png, .svg or .pdf"),
        (["iid"], "iid: not a run folder (it has no config.toml)"),
    ],
)
def test_bad_input_is_one_line(
    run: RunResults,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["flsim", "trace", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert (stop.value.code, said.out, len(said.err.splitlines())) == (2, "", 1)
    assert message in said.err
