"""Two runs in full, on runs whose every number is known."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from flsim.base.statistics import holm
from flsim.results import compare_runs
from flsim.results.compare import counts_of
from flsim.results.compare_runs import RunsCompared
from flsim.results.formats import from_csv, to_csv
from flsim.results.pairing import paired_canaries
from flsim.results.store import read_run

MakeRun = Callable[..., Path]
GRID = [(0.01, 0.5), (0.01, 1.0), (1 / 5000, 1.0)]
# Three canaries in each configuration.
A = {"exposure": [3, 5, 4, 9, 8, 6, 14, 14, 14], "rs": [0, 0, 0, 1, 1, 0, 1, 1, 1], "bs": [0, 0, 0, 0, 0, 0, 1, 1, 0]}
B = {"exposure": [2, 4, 1, 4, 9, 2, 14, 13, 9], "rs": [0, 1, 0, 0, 0, 0, 1, 1, 0], "bs": [0] * 9}
MODEL = {"references": 10_000, "accuracy": 0.2, "perplexity": 60.0}


def compared(make_run: MakeRun, b: dict[str, object] | None = None, **about: object) -> RunsCompared:
    grid = {"grid": GRID, "copies": 3}
    one = make_run({20: A | MODEL}, name="a", rounds_per_epoch=2.0, **grid)
    other = make_run({20: (b or B) | MODEL | {"perplexity": 66.0}}, name="b", rounds_per_epoch=2.0, **grid, **about)
    return compare_runs.compare_runs(read_run(one), read_run(other))


def cells(text: str) -> list[list[str]]:
    """Of every line of a table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_all_canaries_and_each_configuration(make_run: MakeRun) -> None:
    table = compared(make_run).table
    assert table["configuration"].tolist() == ["all", "1/100, 50%", "1/100, 100%", "1/5K, 100%"]
    assert table["n"].tolist() == [9, 3, 3, 3]
    assert table["mean_difference"].tolist() == pytest.approx([19 / 9, 5 / 3, 8 / 3, 2.0])
    assert table["rs_a"].tolist() == [5, 0, 2, 3]
    assert table["rs_b"].tolist() == [3, 1, 0, 2]
    assert table["rs_only_a"].tolist() == [3, 0, 2, 1]
    assert table["rs_only_b"].tolist() == [1, 1, 0, 0]
    assert table["rs_p"].tolist() == [0.625, 1, 0.5, 1]  # 2 (1 + 4) / 2^4, 1, 2 / 2^2, 1
    assert table["rs_p_holm"].tolist()[1:] == [1, 1, 1]
    p = [stats.ttest_1samp(each, 0).pvalue for each in ([1, 1, 3], [5, -1, 4], [0, 1, 5])]
    assert table["p_t"].tolist()[1:] == pytest.approx(p)
    assert table["p_t_holm"].tolist()[1:] == pytest.approx(holm(p))
    assert pd.isna(table["p_t_holm"].iloc[0])
    low, high = stats.binomtest(3, 4).proportion_ci(method="exact")
    first = table.iloc[0]
    assert (first["rs_share"], first["rs_share_low"], first["rs_share_high"]) == pytest.approx((0.75, low, high))
    assert pd.isna(table["bs_share"].iloc[1])  # nothing discordant has no share


def test_exchanging_the_runs_exchanges_everything(make_run: MakeRun) -> None:
    a = read_run(make_run({20: A | MODEL}, name="a", grid=GRID, copies=3))
    b = read_run(make_run({20: B | MODEL}, name="b", grid=GRID, copies=3))
    there, back = (paired_canaries(*pair).canaries for pair in ((a, b), (b, a)))
    for metric in ("rs", "bs"):
        one, other = counts_of(there, metric), counts_of(back, metric)
        assert one is not None
        assert other is not None
        assert (one.a, one.b, one.only_a, one.only_b, one.p) == (other.b, other.a, other.only_b, other.only_a, other.p)
        assert (one.share_low, one.share_high) == pytest.approx((1 - other.share_high, 1 - other.share_low))


def test_the_text_is_of_80_columns_and_says_what_is_meant(make_run: MakeRun) -> None:
    found = compared(make_run)
    text = compare_runs.to_markdown(found)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(str(found.numbers[0]))
    assert found.numbers[0].mean_difference == pytest.approx(19 / 9)
    shown = cells(text)
    assert ["RS /9", "5", "3", "3", "1", "0.625", "75% (19% to 99%)"] in shown
    assert ["Perplexity", "60.0", "66.0", "", "", "", ""] in shown
    p = holm([stats.ttest_1samp(each, 0).pvalue for each in ([1, 1, 3], [5, -1, 4], [0, 1, 5])])[2]
    assert ["1/5K, 100%", "3", "+2.00", "6.57", f"{p:.3f}", "3/2", "1.000", "2/0", "1.000"] in shown
    assert "McNemar's exact test" in text
    assert "Epsilon" not in text


def test_what_was_not_measured_is_blank(make_run: MakeRun) -> None:
    found = compared(make_run, {"exposure": B["exposure"]})
    assert found.table[["rs_a", "rs_p", "bs_b", "bs_p_holm"]].isna().all().all()
    text = compare_runs.to_markdown(found)
    assert "RS /9" not in text
    assert "Perplexity" in text


def test_models_that_are_not_alike_are_said_to_be(make_run: MakeRun) -> None:
    text = compare_runs.to_markdown(compared(make_run, status="running"))
    assert "Run b is running: this is not its final model." in text
    longer, shorter = (
        read_run(make_run({20: B | MODEL}, name=name, grid=GRID, copies=3, rounds_per_epoch=epoch))
        for name, epoch in (("c", 2.0), ("d", 4.0))
    )
    assert "different numbers of epochs" in compare_runs.to_markdown(compare_runs.compare_runs(longer, shorter))


def test_epsilon_is_beside(make_run: MakeRun) -> None:
    spent: dict[str, object] = {"delta": 1e-5, "epsilon paper": 18.8, "epsilon replace-one-rdp": 152.8}
    text = compare_runs.to_markdown(compared(make_run, {**B, **spent}))
    shown = cells(text)
    assert ["Epsilon", "", "153", "", "", "", ""] in shown
    assert ["Epsilon, paper's", "", "18.8", "", "", "", ""] in shown


def test_json_and_csv_say_the_same(make_run: MakeRun) -> None:
    found = compared(make_run)
    said = json.loads(json.dumps(compare_runs.to_json(found), allow_nan=False))
    assert (said["a"]["run"], said["b"]["perplexity"]) == ("a", 66.0)
    assert said["all"]["rs_only_a"] == 3
    assert said["all"]["p_t_holm"] is None
    assert [row["configuration"] for row in said["configurations"]] == found.table["configuration"].tolist()[1:]
    again = from_csv(to_csv(found.table), compare_runs.COLUMNS)
    pd.testing.assert_frame_equal(again, found.table)


def test_canaries_of_a_number_of_copies(make_run: MakeRun) -> None:
    """The roster has no probabilities then, and the numbers are the configurations."""
    folders = [make_run({20: each | MODEL}, name=name, grid=GRID, copies=3) for name, each in (("a", A), ("b", B))]
    for folder in folders:
        path = folder / "planted" / "roster.parquet"
        numbers = [1] * 3 + [2] * 6
        roster = pd.read_parquet(path).assign(p_u=float("nan"), p_e=float("nan"), planned_insertions=numbers)
        roster.to_parquet(path)
    found = compare_runs.compare_runs(read_run(folders[0]), read_run(folders[1]))
    assert found.table["configuration"].tolist() == ["all", "1 copy", "2 copies"]
    assert found.table["copies"].tolist()[1:] == [1, 2]
    assert found.table["n"].tolist() == [9, 3, 6]
    assert "Canaries" in cells(compare_runs.to_markdown(found))[-4]
