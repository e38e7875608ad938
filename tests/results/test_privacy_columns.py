"""Epsilon in tables: both conventions, only where some run has noise, and never without their names."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from shown import from_csv, to_latex, to_markdown

from flsim.results import tables
from flsim.results.columns import RECORD_PRIVACY
from flsim.results.store import read_run
from flsim.show.table import to_csv

MakeRun = Callable[..., Path]
FIXED = {"perplexity": 68.5, "epsilon paper": 18.77, "epsilon replace-one-rdp": 152.8, "delta": 1e-7}
POISSON = {"perplexity": 68.5, "epsilon poisson-rdp": 9.304, "delta": 1e-7}
RECORD = {"perplexity": 75.0, "record epsilon poisson-rdp": 2.5, "record delta": 1e-5}


def table_of(make_run: MakeRun, **rounds: dict[int, dict[str, float]]) -> pd.DataFrame:
    made = [make_run(found, name=name, setting=f"{name}, b_u = 5000") for name, found in rounds.items()]
    return tables.memorization_table([read_run(path) for path in made])


def test_without_noise_there_are_no_such_columns(make_run: MakeRun) -> None:
    table = table_of(make_run, plain={8: {"perplexity": 58.2}})
    assert list(table.columns) == list(tables.COLUMNS)
    assert "Eps." not in to_markdown(table)


def test_both_epsilons_are_shown_with_their_conventions_at_the_round_shown(make_run: MakeRun) -> None:
    early = FIXED | {"epsilon paper": 5.62, "epsilon replace-one-rdp": 28.5}
    table = table_of(make_run, plain={8: {"perplexity": 58.2}}, fixed={4: early, 8: FIXED}, poisson={8: POISSON})
    shown = to_markdown(table, width=130).splitlines()
    assert [[cell.strip() for cell in line.split("|")[-3:-1]] for line in (shown[0], *shown[2:5])] == [
        ["Eps.", "Convention"],
        ["", ""],
        ["18.8/153", "replace-one-rdp"],
        ["-/9.3", "poisson-rdp"],
    ]
    legend = "Eps.: epsilon by the paper's convention / by one that holds (replace-one-rdp, poisson-rdp), delta 1e-07."
    assert legend in shown
    assert table["epsilon_paper"].tolist()[1] == 18.77
    assert pd.isna(table["epsilon_paper"][2])
    assert table["sound_convention"].tolist()[1:] == ["replace-one-rdp", "poisson-rdp"]
    pd.testing.assert_frame_equal(from_csv(to_csv(table)), table)
    assert "18.8/153" in to_latex(table)


def test_an_epsilon_of_a_record_is_never_in_a_user_s_column(make_run: MakeRun) -> None:
    """A table with both: each epsilon in columns of its own, and the legend says which is about what."""
    table = table_of(make_run, user={8: FIXED}, record={9: RECORD}, plain={8: {"perplexity": 58.2}})
    assert table["epsilon_sound"].isna().tolist() == [False, True, True]
    assert table["epsilon_paper"].isna().tolist() == [False, True, True]
    assert table["delta"].isna().tolist() == [False, True, True]
    assert table["record_epsilon"].isna().tolist() == [True, False, True]
    assert [table[name][1] for name in RECORD_PRIVACY] == [2.5, "poisson-rdp", 1e-5]
    shown = to_markdown(table, width=110).splitlines()
    assert [[cell.strip() for cell in line.split("|")[-3:-1]] for line in (shown[0], *shown[2:5])] == [
        ["Eps.", "Rec. eps."],
        ["18.8/153", ""],
        ["", "2.5"],
        ["", ""],
    ]
    assert "Rec. eps.: epsilon of one record, not of a user, by poisson-rdp, delta 1e-05." in shown
    assert "Round: completed rounds; for central training (b_r), steps." in shown
    pd.testing.assert_frame_equal(from_csv(to_csv(table)), table)
    assert r"Record-level $\varepsilon$" in to_latex(table)
