"""The trace: rows follow from the events, and text, JSON, CSV and the figure have the same values."""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import EventCollection

from flsim.base.errors import InputError
from flsim.results.rows import RunResults, read_run
from flsim.results.tables import canary_table, trace
from flsim.show.table import json_rows
from flsim.show.trace import draw_trace, steps_to_text, to_csv, to_text

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
    """Return a run of nine canaries, measured at 10 and 20, not at 30; RS and BS find only c02, at 20."""
    exposures = [float(index) for index in range(9)]
    at_20 = {"rs": [float(i == 2) for i in range(9)], "bs": [float(i == 2) for i in range(9)]}
    rounds = {
        10: {"exposure": exposures, "rs": [0.0] * 9, "bs": [0.0] * 9, "references": 1023.0},
        20: {"exposure": exposures[::-1], **at_20, "references": 1023.0},
        30: {"references": 1023.0},
    }
    return read_run(make_run(rounds))


EVENT = st.tuples(st.integers(1, 35), st.sampled_from(["c00", "c03", "c08"]), st.integers(0, 3))


@settings(max_examples=25)
@given(st.lists(EVENT))
def test_windows_divide_the_events(events: list[tuple[int, str, int]]) -> None:
    """Expected: a count one by one. Events after the last evaluation do not count."""
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


def test_text_is_one_table_with_a_column_of_canaries(run: RunResults) -> None:
    lines = to_text(trace(run, frame(EVENTS), ["c00", "c02"]), run).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert rows[0] == ["id", "round", "bits", "RS", "BS", "sharers", "so far", "since", "in rounds"]
    assert [row[:2] for row in rows[2:]] == [[canary, at] for canary in ("c00", "c02") for at in ("10", "20", "30")]
    assert rows[2][2:] == ["0.0", "no", "no", "2", "4", "0", "1 3 10"]
    assert rows[6][2:] == ["6.0", "yes", "yes", "0", "0", "", ""]
    assert next(line for line in lines if line.startswith("c0")).startswith("c00: 1/5K, 1%; ")


def test_the_effective_step_is_shown_unless_every_step_is_the_mean_update() -> None:
    assert steps_to_text([1.0, 1.0 + 1e-7]) == steps_to_text([]) == ""
    assert " 0.5 over 3 rounds, from 0.2 to 1 " in steps_to_text([1.0, 0.2, 0.5]).replace("\n", " ")


def test_json_and_csv_have_all_values(run: RunResults) -> None:
    table = trace(run, frame(EVENTS))
    rows = json_rows(table)
    measured = {"canary": "c00", "round": 10, "exposure": 0.0, "rs": 0.0, "bs": 0.0}
    met = {"sharers": 2, "participations": 4, "rounds_since_use": 0.0, "sharer_rounds": [1, 3, 10]}
    assert rows[0] == measured | met
    assert rows[2]["exposure"] is None
    read = pd.read_csv(io.StringIO(to_csv(table)), dtype={"sharer_rounds": "string"})
    assert read["sharer_rounds"][:2].tolist() == ["1 3 10", "15"]
    pd.testing.assert_frame_equal(read.drop(columns="sharer_rounds"), table.drop(columns="sharer_rounds"))


def test_the_figure_has_the_values_of_the_table(run: RunResults) -> None:
    """There are nine configurations of one canary each; c00 takes part five times, and c02 is memorized."""
    figure = draw_trace(run, trace(run, frame(EVENTS)))
    lines, strip = figure.axes[:2]
    assert lines.get_title(loc="left") == "1/5K, 1%"
    x, y = np.asarray(lines.get_lines()[0].get_data(), float)
    assert (x[:2].tolist(), y[:2].tolist(), math.isnan(y[2])) == ([10, 20], [0, 8], True)
    (events,) = [each for each in strip.collections if isinstance(each, EventCollection)]
    assert sorted(events.get_positions()) == [1, 3, 10, 15, 21]
    assert [label.get_text() for label in strip.get_yticklabels()] == ["c00"]
    assert np.asarray(figure.axes[4].get_lines()[1].get_data(), float).T.tolist() == [[20, 6]]
    assert lines.get_ylabel() == "Exposure, bits"
    assert figure.axes[-1].get_xlabel() == "completed rounds (central: steps)"


def test_a_run_without_canaries_has_neither_a_list_nor_a_trace(make_run: MakeRun) -> None:
    run = read_run(make_run({10: {"perplexity": 2.0}}))
    run = replace(run, roster=run.roster.iloc[:0])
    with pytest.raises(InputError, match="was trained without canaries; name a run with canaries"):
        canary_table(run)
    with pytest.raises(InputError, match="was trained without canaries; name a run with canaries"):
        trace(run, None)
