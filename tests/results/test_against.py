"""Tables of sweeps with published values, and the marks of agreement that hand-made rows must get."""

import io
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ninety import PRIVATE, PublishedRow, fedavg, paper
from shown import from_csv, over_seeds, to_latex, to_markdown

from flsim.base.errors import InputError
from flsim.base.statistics import share_interval
from flsim.results import tables
from flsim.results.published import (
    AGAINST,
    DATA,
    SETTING,
    TABLE,
    Agreement,
    against,
    agreements,
    matching,
    published_rows,
    score,
    size,
    with_question,
)
from flsim.results.rows import WHOLE_TEST_USERS, RunResults
from flsim.show import memorization
from flsim.show.table import to_csv, write_parquet


def test_marks_of_size_and_direction(four: dict[RunResults, PublishedRow]) -> None:
    """RS has the published order in all pairs except the two non-IID rows. 40 of 90 is 34 to 55%, 10 is 5 to 19%.

    In the paper, rows of one partition differ by no more than chance: 66 and 69, 21 and 23; 56 and 58, 0 and 1. In the
    other four pairs, BS of the IID row is above the second row as published, and tied with the fourth, which counts
    half."""
    table = against(tables.memorization_table(list(four), published=four))
    assert table["rs_size"].tolist() == ["same", "higher", "same", "lower"]
    assert table["rs_pairs"].tolist() == [1, 1, 1, 1]
    assert table["rs_twin"].tolist() == ["yes"] * 4
    assert table["bs_pairs"].tolist() == [0.75, 1, 0.75, 0.5]
    assert table["bs_twin"].tolist() == ["yes", "yes", "tie", "tie"]
    assert table["bs_size"].tolist() == ["lower", "same", "lower", "higher"]
    rs, bs = agreements(table)
    assert (score(rs.pairs), score(bs.pairs)) == ("5 of 6", "4.5 of 6")
    assert [score(each.pairs[each.pairs["is_clear"]]) for each in (rs, bs)] == ["4 of 4", "3 of 4"]
    text = to_markdown(table)
    said = " ".join(text.split())
    for figures in (
        "RS, Table 1: 4 of 4 pairs",
        "5 of 6 of all pairs (tau-b 0.67)",
        "in 2 of 2 such twins",
        "1 of 2 (1 tied)",
    ):
        assert figures in said
    head, _, first, second, _, fourth = (re.split(r" *\| *", line) for line in text.splitlines()[:6])
    for line, marks in ((first, ["=", "yes"]), (second, [">", "yes"]), (fourth, ["<", "yes"])):
        assert line[head.index("vs") : head.index("Twin") + 1] == marks
    for note in (memorization.VS, memorization.TWIN, memorization.PAPER, memorization.SHARE_INTERVAL):
        assert note in said


def test_sizes_are_not_compared_if_the_number_of_references_differs(
    four: dict[RunResults, PublishedRow], make: Callable[..., RunResults]
) -> None:
    """With fewer references, a canary has rank 1 more easily. Directions do not depend on their number."""
    small = {"references": 20_000}
    counts = {"IID": 60, "Non-IID": 10}
    runs = {make(f"few, {data}", rs, measured=small): fedavg(data, 500) for data, rs in counts.items()}
    table = against(tables.memorization_table(list(runs), published=runs))
    assert not {"rs_size", "bs_size"} & {*table}
    assert table["rs_twin"].tolist() == ["yes", "yes"]
    assert (table["prefix"].tolist(), table["length"].tolist()) == ([1, 1], [5, 5])
    text = to_markdown(table)
    assert "vs" not in text.split()
    assert "Sizes are not compared: |R| is 20,000 here and 2,000,000 in the paper." in " ".join(text.split())
    both = against(tables.memorization_table([*runs, *four], published=runs | four))
    assert both["rs_size"].isna().tolist() == [True] * 2 + [False] * 4
    assert "Sizes of some rows are not compared: |R| is 20,000" in to_markdown(both)
    assert "not compared" not in to_markdown(against(tables.memorization_table(list(four), published=four)))


def test_sizes_are_not_compared_if_prefixes_or_lengths_differ(make: Callable[..., RunResults]) -> None:
    run = make("IID", 60)
    shorter = run.roster.assign(tokens=[row[:4] for row in run.roster["tokens"]])
    for other, why in (
        (
            replace(run, settings={"evaluation.prefix": 2}),
            "the length of the known prefix is 2 here and 1 in the paper",
        ),
        (replace(run, settings={"evaluation.prefix": None}), "the length of the known prefix is unknown here and 1 in"),
        (replace(run, roster=shorter), "the length of canaries is 4 here and 5 in the paper"),
    ):
        table = against(tables.memorization_table([other], published={other: fedavg("IID", 500)}))
        assert "rs_size" not in table
        assert f"Sizes are not compared: {why}" in " ".join(to_markdown(table).split())


def test_runs_of_one_published_row_count_as_their_mean(make: Callable[..., RunResults]) -> None:
    """The mean of the IID row is 30, equal to the non-IID row: a tie, although one seed is above it."""
    published = {make(name, rs, setting="IID, A"): fedavg("IID", 500) for name, rs in (("a", 50), ("b", 10))}
    published[make("c", 30)] = fedavg("Non-IID", 500)
    table = against(tables.memorization_table(list(published), published=published))
    assert score(agreements(table)[0].pairs) == "0.5 of 1"
    assert table["rs_twin"].tolist() == ["tie"] * 3
    assert table["rs_size"].tolist() == ["lower", "lower", "higher"]


def test_the_secret_sharer_is_compared_only_in_direction(make: Callable[..., RunResults]) -> None:
    """Exposures are over the complete space if all runs have them, and otherwise among references."""
    rows = published_rows("carlini2018.csv", "2")[:3]  # 1.7, 4.3, 6.9 bits
    spaces = [9.0, 8.0, 7.0]
    measured = [{"space_exposure": [space] * 90} for space in spaces]
    runs = [make(f"run-{index}", 9, bits=5.0 + index, measured=each) for index, each in enumerate(measured)]
    table = against(tables.memorization_table(runs, published=dict(zip(runs, rows, strict=True))))
    assert {name for name in AGAINST if name in table} == {"exposure_pairs"}
    assert "Sizes" not in to_markdown(table)
    assert score(agreements(table)[0].pairs) == "0 of 3"
    shown_ = to_markdown(table, 200).splitlines()[0]
    assert re.split(r" *\| *", shown_)[8:13] == ["Bits", "CI", "Space", "Paper", "Pairs"]
    without = make("without", 9, bits=9.0)
    published = dict(zip([*runs[:2], without], rows, strict=True))
    assert agreements(tables.memorization_table(list(published), published=published))[0].pairs["agrees"].sum() == 6


def test_over_seeds_canaries_are_pooled(make: Callable[..., RunResults]) -> None:
    """Seeds with 30 and 60 of 90 canaries have the exact interval of one run with 90 of 180."""
    runs = [make(f"r{seed}", count, seed=seed, series="s") for seed, count in enumerate((30, 60))]
    table = against(over_seeds(runs, published=dict.fromkeys(runs, fedavg("IID", 500))))
    low, high = table["rs_share_low"].item(), table["rs_share_high"].item()
    assert (low, high) == pytest.approx((0.4247, 0.5753), abs=1e-4)
    assert (table["published_rs"].item(), table["rs_size"].item()) == (66, "lower")
    assert "43-57" not in to_markdown(table)
    assert "42-58" in to_markdown(table)
    assert "Lowest" not in to_markdown(table)


CANARIES = 48
VALUES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def test_size_compares_the_published_share_with_the_interval() -> None:
    low, high = share_interval(20, CANARIES)  # 41.7%: 27.6 to 56.8
    found = [size(low, high, published) for published in (0.2, low, 0.4, high, 0.6)]
    assert found == ["higher", "same", "same", "same", "lower"]


def agreement_of(ours: Sequence[float], published: Sequence[float]) -> Agreement:
    rows = pd.DataFrame({TABLE: "1", DATA: "", "ours": np.array(ours, float), "published": np.array(published, float)})
    return Agreement("exposure", rows.assign(**{SETTING: rows.index.astype(str)}))


@given(VALUES)
def test_pairs_and_tau_equal_a_count_pair_by_pair(values: list[tuple[int, int]]) -> None:
    """Tau-b is (concordant - discordant) over the root of the product of pairs untied in each (Kendall, 1945)."""
    ours, theirs = zip(*values, strict=True)
    found, pairs = agreement_of(ours, theirs), list(combinations(range(len(values)), 2))
    value = {-1: 0.0, 0: 0.5, 1: 1.0}
    sign = {
        (i, j): int(np.sign((ours[i] - ours[j]) * (theirs[i] - theirs[j]))) for i, j in pairs if theirs[i] != theirs[j]
    }
    assert (len(found.pairs), found.pairs["agrees"].sum()) == (
        2 * len(sign),
        2 * sum(value[each] for each in sign.values()),
    )
    shares = found.pairs.groupby(SETTING)["agrees"].mean()
    for row in range(len(values)):
        of_row = [value[each] for pair, each in sign.items() if row in pair]
        assert shares.get(str(row)) == (pytest.approx(np.mean(of_row)) if of_row else None)
    untied = sum(ours[i] != ours[j] for i, j in pairs)
    if sign and untied:
        assert found.tau == pytest.approx(sum(sign.values()) / math.sqrt(len(sign) * untied))
    else:
        assert math.isnan(found.tau)


HOSTILE = r"*[x]\input{x} & 100% $b_x$ #1 {~^} <|> `--é漢"


@pytest.fixture
def everything(make: Callable[..., RunResults]) -> dict[RunResults, PublishedRow]:
    """Return runs with every kind of column, and names with LaTeX commands and characters that LaTeX lacks."""
    dp = paper("2", data="IID", optimizer="DP-FedAvg", budget="10 epochs")
    secret = published_rows("carlini2018.csv", "7")[0]
    common = {"series": "s", "seed": 0, "rounds_per_epoch": 1.0}
    measured = PRIVATE | {"space_exposure": [7.0] * 90, WHOLE_TEST_USERS: 5.0}
    return {
        make("dp-fedavg-iid-cohort16-seed0", 20, 3, setting=HOSTILE, measured=measured, **common): dp,
        make(
            "b%_$#&{}~^", 30, 4, setting=HOSTILE, measured={"record epsilon poisson-rdp": 2.5, "record delta": 1e-5}
        ): secret,
        make("[c]", 9, 4, setting="[c]", status="failed", reason=HOSTILE): published_rows("carlini2018.csv", "4")[1],
        without_copies(make("d", 40, 5, setting="IID, FedAvg, b_u=16"), 4): fedavg("IID", 500),
        make("e", 10, 5, setting="Non-IID, FedAvg, b_u=16"): fedavg("Non-IID", 500),
    }


def without_copies(run: RunResults, count: int) -> RunResults:
    """Return the run as if its last canaries had replaced no record."""
    planned = [3] * (len(run.roster) - count) + [0] * count
    return replace(run, roster=run.roster.assign(planned_insertions=planned))


def frames(published: dict[RunResults, PublishedRow]) -> list[tuple[pd.DataFrame, str]]:
    """Return both tables of the runs, over runs and over seeds, each with its LaTeX."""
    runs = against(tables.memorization_table(list(published), published=published))
    seeds = against(over_seeds(list(published), published=published))
    return [(runs, to_latex(runs)), (seeds, to_latex(seeds))]


def compiled(bodies: list[str], folder: Path) -> str:
    """Return the output of pdflatex for tables that are pasted into an article."""
    preamble = "\\documentclass{article}\n\\usepackage[margin=1in]{geometry}\n\\usepackage{booktabs}\n"
    pages = "\\newpage\n".join(f"\\noindent\\small\n{body}" for body in bodies)
    (folder / "table.tex").write_text(f"{preamble}\\begin{{document}}\n{pages}\\end{{document}}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles_with_every_kind_of_column(everything: dict[RunResults, PublishedRow], tmp_path: Path) -> None:
    both = frames(everything)
    assert {*tables.types("run")} - {*both[0][0]} == {"extracted_pairs", "exposure_pairs"} | {
        name for name in AGAINST if name.startswith(("extracted", "exposure")) and name.endswith("twin")
    }
    compiled([text for _, text in both], tmp_path)


def test_all_columns_read_back_from_csv_and_parquet(everything: dict[RunResults, PublishedRow], tmp_path: Path) -> None:
    for table, _ in frames(everything):
        pd.testing.assert_frame_equal(from_csv(to_csv(table)), table, check_exact=True)
        write_parquet(table, tmp_path / "table.parquet")
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table, check_exact=True)
        assert list(pd.read_csv(io.StringIO(to_csv(table))).columns) == list(table.columns)


def test_unusable_rows_do_not_count(four: dict[RunResults, PublishedRow], make: Callable[..., RunResults]) -> None:
    wild, other = make("wild", 90, 90, status="diverged"), make("other", 0, 0)
    runs = [*four, wild, other]
    table = against(tables.memorization_table(runs, published=four | {wild: fedavg("IID", 2000)}))
    alone = against(tables.memorization_table(list(four), published=four))
    assert table["rs_pairs"].tolist()[:4] == alone["rs_pairs"].tolist()
    assert table.loc[4:, [name for name in AGAINST if name in table]].isna().all(axis=None)
    assert [str(each) for each in agreements(table)] == [str(each) for each in agreements(alone)]
    assert "published_rs" in table
    nothing = against(tables.memorization_table([other]))
    assert not {*AGAINST} & {*nothing}
    assert agreements(nothing) == []


def test_rows_of_two_published_tables_are_not_pairs(make: Callable[..., RunResults]) -> None:
    """Both rows of each table have the published order; rows of different tables do not."""
    published = {
        make("a", 80): fedavg("IID", 500),
        make("b", 70): fedavg("Non-IID", 500),
        make("c", 20): paper("3", data="IID", optimizer="Adam"),
        make("d", 10): paper("3", data="Non-IID", optimizer="Adam"),
    }
    table = against(tables.memorization_table(list(published), published=published))
    found = [(each.rows[TABLE].iloc[0], score(each.pairs)) for each in agreements(table)]
    assert found == [("1", "1 of 1"), ("3", "1 of 1")]


THAKKAR, CARLINI = "thakkar2020.csv", "carlini2018.csv"
Row = dict[str, object]


def thakkar(*tables: str) -> list[Row]:
    return [row for table in tables for row in published_rows(THAKKAR, table)]


def numbers(rows: list[Row], name: str) -> list[float]:
    return [float(str(row[name])) for row in rows]


def test_rows_of_thakkar_agree_with_its_text() -> None:
    """Section 4.2 has the ranges of each regime; everything extracted by beam search is memorized by sampling."""
    ranges = {
        ("IID", "SGD"): ((52, 54), (42, 45)),
        ("IID", "FedAvg"): ((65, 69), (56, 58)),
        ("Non-IID", "SGD"): ((37, 51), (19, 39)),
        ("Non-IID", "FedAvg"): ((19, 26), (0, 2)),
    }
    for (data, optimizer), (rs, bs) in ranges.items():
        rows = [row for row in thakkar("1") if (row["data"], row["optimizer"]) == (data, optimizer)]
        sizes = [32, 64, 128, 256] if optimizer == "SGD" else [500, 1000, 2000, 5000]
        assert [row["batch_size"] for row in rows] == sizes
        for name, (low, high) in (("rs", rs), ("bs", bs)):
            assert (min(numbers(rows, name)), max(numbers(rows, name))) == (low, high)
    rows = thakkar("1", "2", "3", "4")
    assert all(0 <= bs <= rs <= 90 for bs, rs in zip(numbers(rows, "bs"), numbers(rows, "rs"), strict=True))
    assert {row["canaries"] for row in rows} == {90}
    for row in rows:
        for metric in ("rs", "bs"):
            assert (row[metric] == 0) == (row[f"{metric}_lowest"] == "-")
        assert ("epsilon_paper" in row) == ("delta" in row) == (row["optimizer"] == "DP-FedAvg")
        assert 0.2 < float(str(row["accuracy"])) < 0.25


def test_rows_of_carlini_agree_with_its_text() -> None:
    """Captions and sections 6 and 8: shapes of the tables, six private models; recurrent networks memorize most."""
    architectures, sizes, secrets, private = (published_rows(CARLINI, table) for table in "1247")
    assert [len(rows) for rows in (architectures, sizes, secrets, private)] == [9, 35, 20, 9]
    recurrent = [row for row in architectures if row["architecture"] in ("LSTM", "GRU")]
    others = [row for row in architectures if row not in recurrent]
    assert min(numbers(recurrent, "mean_exposure")) > max(numbers(others, "mean_exposure"))
    assert max(numbers(recurrent, "test_loss")) < min(numbers(others, "test_loss"))
    expected = {(2**power, units) for power in range(4, 11) for units in range(50, 300, 50)}
    assert {(row["batch_size"], row["units"]) for row in sizes} == expected
    for one in secrets:
        assert 0 < float(str(one["extracted"])) <= 1
    noisy = [row for row in private if math.isfinite(float(str(row.get("epsilon", "inf"))))]
    assert len(noisy) == 6
    assert {row["optimizer"] for row in noisy} == {"RMSProp"}
    assert max(numbers(noisy, "mean_exposure")) < 9.5 < 31


def test_a_row_is_found_by_value_and_without_case() -> None:
    rows = published_rows(THAKKAR, "1")
    found = matching(rows, {"data": "non-iid", "optimizer": "fedavg", "batch_size": 500.0})
    assert found is not None
    assert (found["rs"], found["bs"], found["accuracy"]) == (21, 0, 0.244)
    assert matching(rows, {"batch_size": 501}) is None
    private = published_rows(CARLINI, "7")
    for epsilon, exposure in (("", 31.0), (2e8, 3.2), ("2e8", 3.2)):
        found = matching(private, {"optimizer": "RMSProp", "epsilon": epsilon})
        assert found is not None
        assert found["mean_exposure"] == exposure
    clipped = matching(private, {"epsilon": math.inf})
    assert clipped is not None
    assert clipped["optimizer"] == "SGD"


def test_published_rows_have_references_prefix_and_length() -> None:
    """Section 4.1: canaries of 5 words, |R| of 2M, and a prefix length of 1. The Secret Sharer has no such settings."""
    asked = {(row["references"], row["prefix"], row["length"]) for row in thakkar("1", "2", "3", "4")}
    assert asked == {(2_000_000, 1, 5)}
    row = published_rows(THAKKAR, "1")[9]
    older = {name: cell for name, cell in row.items() if name not in ("references", "prefix", "length")}
    assert with_question(older) == with_question(row) == row
    secret = published_rows(CARLINI, "1")[0]
    other = {"table": "9", "rs": 65, "canaries": 90}
    assert (with_question(secret), with_question(other)) == (secret, other)


def test_queries_that_do_not_select_one_row_are_refused() -> None:
    rows = published_rows(THAKKAR, "1")
    with pytest.raises(InputError, match="8 rows of the published table have data IID; use more of table, data, opt"):
        matching(rows, {"data": "IID"})
    with pytest.raises(InputError, match="cohort: not a column of the published table; choose one of table, data"):
        matching(rows, {"cohort": 500})
    with pytest.raises(InputError, match=r"thakkar2020\.csv: there is no table 5; choose one of 1, 2, 3, 4"):
        published_rows(THAKKAR, "5")
    with pytest.raises(InputError, match=r"other\.csv: there is no such file of published numbers; choose one of"):
        published_rows("other.csv", "1")
