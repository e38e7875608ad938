"""Tables have the paper's columns and wording, and depend only on rows and rosters."""

import json
import math
import re
import resource
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
from helpers import Flsim
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import write_run
from shown import over_seeds, to_latex, to_markdown

from flsim.base.errors import InputError
from flsim.cli.options import print_or_write
from flsim.measures.quantity import Quantity
from flsim.report.gather import gather
from flsim.report.page import render
from flsim.results import tables
from flsim.results.differences import Pair, compare_runs, differences, planned, to_wide
from flsim.results.rows import Row, RunResults, read_run, write_rows
from flsim.results.sweeps import NOT_SEARCHED, tuned_notes
from flsim.results.tables import RECORD_PRIVACY, memorization_table
from flsim.show.differences import compare_partitions, runs_to_markdown, table_of_pairs
from flsim.show.plots import draw_rounds
from flsim.show.table import Column, latex, markdown

MakeRun = Callable[..., Path]

# (p_u, p_e) of the paper as exact numbers and in its words, in the order of its grid.
P_U = {"1/5K": Fraction(1, 5_000), "3/50K": Fraction(3, 50_000), "1/50K": Fraction(1, 50_000)}
P_E = {"1%": Fraction(1, 100), "10%": Fraction(1, 10), "100%": Fraction(1)}
PAPER = [(f"{u}, {e}", P_U[u], P_E[e]) for u in P_U for e in P_E]
EXPOSURE = [float(value) for value in range(9)]


def memorized(*names: str, copies: int = 1) -> list[float]:
    """Return 1 for every canary of the named configurations and else 0, in the order of the paper's grid."""
    return [float(name in names) for name, _, _ in PAPER for _ in range(copies)]


def roster(pairs: list[tuple[float, float]]) -> pd.DataFrame:
    return pd.DataFrame(pairs, columns=["p_u", "p_e"])


@given(st.sets(st.integers(0, 8), min_size=1), st.randoms())
def test_lowest_is_by_insertions_then_by_sharers(chosen: set[int], random: Random) -> None:
    """Expected: exact arithmetic, over the paper's grid, which has ties of insertion frequency."""
    picked = [PAPER[index] for index in chosen]
    random.shuffle(picked)
    expected = min(picked, key=lambda one: (one[1] * one[2], one[1]))[0]
    assert tables.lowest(roster([(float(p_u), float(p_e)) for _, p_u, p_e in picked])) == expected


def test_products_that_differ_only_by_rounding_are_equal() -> None:
    """10% * 10% and 100% * 1% are one in a hundred: fewer sharers decide, not the last bit."""
    assert 0.1 * 0.1 > 1.0 * 0.01
    assert tables.lowest(roster([(1.0, 0.01), (0.1, 0.1)])) == "1/10, 10%"


@pytest.mark.parametrize(
    ("p_u", "written"),
    [(0.0002, "1/5K"), (0.00006, "3/50K"), (0.999, "999/1K"), (1.0, "1"), (1e-6, "1/1M"), (1e-12, "1e-12")],
)
def test_user_shares_are_written_as_the_paper_does(p_u: float, written: str) -> None:
    assert tables.user_share(p_u) == written


def read_share(text: str) -> Fraction:
    units = text.replace("K", "000").replace("M", "000000")
    return Fraction(units)


@given(st.fractions(Fraction(1, 10**6), 1, max_denominator=10**6).filter(lambda p: p.numerator <= 999))
def test_simple_user_shares_are_exact(p_u: Fraction) -> None:
    assert read_share(tables.user_share(float(p_u))) == p_u


PROBABILITY = st.floats(0, 1, exclude_min=True, allow_subnormal=False)


@given(PROBABILITY, PROBABILITY)
def test_any_configuration_reads_back_to_six_digits(p_u: float, p_e: float) -> None:
    share, percent = tables.lowest(roster([(p_u, p_e)])).split(", ")
    assert float(read_share(share)) == pytest.approx(p_u, rel=5.1e-6, abs=0)
    assert float(percent.removesuffix("%")) / 100 == pytest.approx(p_e, rel=5.1e-6, abs=0)


def test_measures_that_are_missing_are_blank_not_zero(make_run: MakeRun) -> None:
    row = memorization_table([read_run(make_run({5: {"rs": memorized(), "accuracy": math.nan}}))]).iloc[0]
    assert (row["rs"], row["rs_lowest"]) == (0, "-")
    for column in ("bs", "bs_lowest", "mean_exposure", "exposure_low", "accuracy", "perplexity", "references"):
        assert row[column] is pd.NA


@pytest.mark.parametrize("round_", [None, 10])
def test_a_diverged_run_shows_its_status_and_no_result(make_run: MakeRun, round_: int | None) -> None:
    metrics = {"rs": memorized("1/5K, 1%"), "bs": memorized(), "exposure": EXPOSURE, "accuracy": 0.25}
    row = memorization_table([read_run(make_run({10: metrics}, status="diverged"))], round_).iloc[0]
    assert row["status"] == "diverged"
    assert row["canaries"] == 9
    for column in set(tables.COLUMNS) - {"setting", "run", "canaries", "status"}:
        assert row[column] is pd.NA


LEGEND = "Lowest: of the configurations with a memorized canary, the one with the fewest copies."
COPIES = (10, 10, 1, 1, 4, 4)


@pytest.fixture
def run(make_run: MakeRun) -> RunResults:
    """Return a run with six canaries, planted 10, 10, 1, 1, 4, 4 times; those of 4 and one of 10 are memorized."""
    found = {"rs": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], "bs": [0.0] * 6, "exposure": [3.0] * 6, "references": 999.0}
    return with_copies(make_run({10: found}, grid=[(0.1, 0.1)], copies=6))


def with_copies(folder: Path) -> RunResults:
    path = folder / "planted" / "roster.parquet"
    roster = pd.read_parquet(path).assign(p_u=math.nan, p_e=math.nan, planned_insertions=COPIES)
    roster.to_parquet(path)
    return read_run(folder)


def test_the_table_and_the_legend_have_the_fewest_copies(run: RunResults, make_run: MakeRun) -> None:
    table = tables.memorization_table([run])
    assert table[["rs", "rs_lowest", "bs", "bs_lowest"]].to_numpy().tolist() == [[3, "4 copies", 0, "-"]]
    text = " ".join(to_markdown(table).split())
    assert "4 copies" in text
    assert LEGEND in text
    assert text.count("Lowest:") == 1, "that of BS, which found no canary, has the same sentence"
    shares = read_run(make_run({10: {"rs": [1.0] * 9, "bs": [0.0] * 9}}, name="shares"))
    assert "Copies" not in to_markdown(tables.memorization_table([shares]))


MakeSeries = Callable[..., list[RunResults]]


def without(run: RunResults, *indices: int) -> RunResults:
    """Return the run as if these of its nine canaries had replaced no record."""
    drawn = [0 if index in indices else 3 for index in range(9)]
    return replace(run, roster=run.roster.assign(planned_insertions=drawn))


def test_shares_and_means_are_of_planted_canaries(make_series: MakeSeries) -> None:
    """Canary i has 2 + i / 2 bits; RS finds canaries 4 to 8, BS only the last. Canaries 0, 1 and 8 are not planted."""
    [run] = make_series([2.0])
    table = tables.memorization_table([without(run, 0, 1, 8)])
    row = table.iloc[0]
    assert (row["canaries"], row["rs"], row["bs"]) == (6, 4, 0)
    assert row["mean_exposure"] == pytest.approx(np.mean([3, 3.5, 4, 4.5, 5, 5.5]))
    assert (row["controls"], row["rs_controls"], row["bs_controls"]) == (3, 1, 1)
    assert row["false_positive_rate"] == 1 / 10_001
    text = to_markdown(table)
    assert "RS /6" in text
    assert "1/1 of 3" in text
    assert "1 / (|R| + 1), here 0.0001" in " ".join(text.split())


def test_a_run_that_planted_nothing_has_no_share(make_series: MakeSeries) -> None:
    row = tables.memorization_table([without(make_series([2.0])[0], *range(9))]).iloc[0]
    assert (row["canaries"], row["controls"], row["rs_controls"]) == (0, 9, 5)
    assert row[["rs", "rs_share_low", "mean_exposure"]].isna().all()


def test_seeds_that_planted_different_numbers_are_averaged(make_series: MakeSeries) -> None:
    """Seed 0 plants canaries 4 to 8, seed 1 all. RS finds 5 of 5 and 7 of 9, so 12 of 14 pooled."""
    first, second = make_series([2.0, 3.0])
    table = over_seeds([without(first, 0, 1, 2, 3), second])
    row = table.iloc[0]
    assert (row["canaries"], row["rs"], row["controls"], row["rs_controls"]) == (7.0, 6.0, 4, 0)
    assert row["mean_exposure"] == pytest.approx(np.mean([5.0, 5.0]))
    assert row["rs_share_low"] < 12 / 14 < row["rs_share_high"]
    assert "0/0 of 4" in to_markdown(table)


def test_pairs_are_of_canaries_that_both_runs_planted(make_series: MakeSeries) -> None:
    """Neither run planted canary 0, and only one planted canary 1. Exposures are 4 + i / 2 and 2 + i / 2 bits.

    If one run plants none, all planted canaries of the other are compared."""
    [a], [b] = make_series([4.0]), make_series([2.0], name="non-iid")
    a, b = without(a, 0), without(b, 0, 1)
    compared = compare_runs(a, b)
    row = to_wide(compared.table).iloc[0]
    assert (row["n"], row["exposure_difference"]) == (7, 2.0)
    assert compared.excluded == 2
    note = "2 canaries were planted in one of the two runs or in neither, and are excluded from all numbers."
    assert note in " ".join(runs_to_markdown(compared).split())
    assert to_wide(differences([Pair("row", planned([a]), planned([b]))]))["canaries_value_a"].tolist() == [7.0]
    out = compare_runs(a, without(b, *range(9)))
    assert (to_wide(out.table).iloc[0]["n"], out.excluded) == (8, 1)
    with pytest.raises(InputError, match="1 of 9 canaries were planted"):
        compare_runs(without(a, *range(1, 9)), without(b, *range(1, 9)))


FIXED = {"perplexity": 68.5, "epsilon paper": 18.77, "epsilon replace-one-rdp": 152.8, "delta": 1e-7}
POISSON = {"perplexity": 68.5, "epsilon poisson-rdp": 9.304, "delta": 1e-7}
RECORD = {"perplexity": 75.0, "record epsilon poisson-rdp": 2.5, "record delta": 1e-5}


def table_of(make_run: MakeRun, **rounds: dict[int, dict[str, float]]) -> pd.DataFrame:
    made = [make_run(found, name=name, setting=f"{name}, b_u = 5000") for name, found in rounds.items()]
    return tables.memorization_table([read_run(path) for path in made])


def test_both_epsilons_are_shown_with_their_conventions_at_the_round_shown(make_run: MakeRun) -> None:
    early = FIXED | {"epsilon paper": 5.62, "epsilon replace-one-rdp": 28.5}
    plain = table_of(make_run, **{"no-noise": {8: {"perplexity": 58.2}}})
    assert list(plain.columns) == list(tables.COLUMNS)
    table = table_of(make_run, plain={8: {"perplexity": 58.2}}, fixed={4: early, 8: FIXED}, poisson={8: POISSON})
    shown = to_markdown(table, width=130).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in (shown[0], *shown[2:5])]
    assert cells == [["Eps.", "Convention"], ["", ""], ["18.8/153", "replace-one-rdp"], ["-/9.3", "poisson-rdp"]]
    assert any(line.startswith("Eps.: epsilon by the paper's convention / by a sound convention") for line in shown)
    assert table["epsilon_paper"].tolist()[1] == 18.77
    assert pd.isna(table["epsilon_paper"][2])
    assert table["sound_convention"].tolist()[1:] == ["replace-one-rdp", "poisson-rdp"]
    assert "18.8/153" in to_latex(table)


def test_an_epsilon_of_a_record_is_never_in_a_user_s_column(make_run: MakeRun) -> None:
    """Record-level and user-level epsilons are in different columns, and the legend explains both."""
    table = table_of(make_run, user={8: FIXED}, record={9: RECORD}, plain={8: {"perplexity": 58.2}})
    assert table["epsilon_sound"].isna().tolist() == [False, True, True]
    assert table["epsilon_paper"].isna().tolist() == [False, True, True]
    assert table["delta"].isna().tolist() == [False, True, True]
    assert table["record_epsilon"].isna().tolist() == [True, False, True]
    assert [table[name][1] for name in RECORD_PRIVACY] == [2.5, "poisson-rdp", 1e-5]
    shown = to_markdown(table, width=110).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in (shown[0], *shown[2:5])]
    assert cells == [["Eps.", "Rec. eps."], ["18.8/153", ""], ["", "2.5"], ["", ""]]
    assert "Rec. eps.: epsilon of one record, not of a user, by poisson-rdp, delta 1e-05." in shown
    assert r"Record-level $\varepsilon$" in to_latex(table)


WORDS = st.text(st.sampled_from("abc DEF,=_1"), max_size=60).map(str.strip)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Column], list[list[Column]]]:
    """Draw one or two labels of up to 60 characters, and units of up to four columns with different cells."""
    rows = draw(st.integers(1, 3))
    labels = [
        Column(f"L{index}", [draw(WORDS) or "-" for _ in range(rows)], is_number=False)
        for index in range(draw(st.integers(1, 2)))
    ]
    units: list[list[Column]] = []
    for unit in range(draw(st.integers(1, 6))):
        units.append([])
        extra = draw(st.booleans())
        for column in range(draw(st.integers(1, 4))):
            cells = [f"{unit}.{column}.{row}" for row in range(rows)]
            units[-1].append(Column(f"U{unit}C{column}", cells, is_extra=extra and column > 0))
    return labels, units


@settings(max_examples=100)
@given(layouts(), st.integers(60, 120))
def test_columns_are_shown_once_within_the_width(layout: tuple[list[Column], list[list[Column]]], width: int) -> None:
    labels, units = layout
    text = markdown(labels, units, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    parts = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in part] for part in parts]
    headings = [heading for part in cells for heading in part[0]]
    needed = [column.heading for unit in units for column in unit if not column.is_extra]
    extra = [column.heading for unit in units for column in unit if column.is_extra]
    assert sorted(heading for heading in headings if heading in needed) == needed
    found = [heading for heading in headings if heading in extra]
    assert sorted(found) in ([], extra)
    assert sorted(found) == extra or len(parts) == 1  # omitted only if there is one table
    assert ("Omitted for lack of space: " in text) == (sorted(found) != extra)
    for part in cells:
        for row, line in enumerate(part[2:]):
            for heading, cell in zip(part[0], line, strict=True):
                if heading.startswith("U"):
                    assert cell == f"{heading[1]}.{heading[3]}.{row}"
        has_numbers = part[0][0] == "Row"
        for row, line in enumerate(part[2:]):
            assert line[0] == (str(row + 1) if has_numbers else labels[0].cells[row])
    if cells[0][0][0] == "Row":
        listed = " ".join(lines[: lines.index("")])
        for row, words in enumerate(zip(*(label.cells for label in labels), strict=True), 1):
            assert f"{row}. {' '.join(words[0].split())}" in listed


def test_notes_appear_once_and_in_latex_as_comments() -> None:
    columns = [Column("A", ["1"], note="A: a number."), Column("B", ["2"], note="A: a number."), Column("C", ["3"])]
    labels = [Column("Setting", ["x"], is_number=False)]
    assert markdown(labels, [columns], "More.\n").endswith("|\n\nA: a number.\nMore.\n")
    assert "% A: a number.\n% More.\n\\begin{tabular}{lrrr}\n" in latex(labels, [columns], "More.\n")


def test_a_table_is_complete_or_absent(tmp_path: Path) -> None:
    """The write fails after 64 bytes, as on a full disk."""
    table = memorization_table([read_run(write_run(tmp_path / "run"))])
    out = tmp_path / "out"
    out.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            print_or_write(to_markdown(table), out / "table.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(out.iterdir()) == []
    print_or_write(to_markdown(table), out / "table.md")
    assert (out / "table.md").read_text(encoding="utf-8") == to_markdown(table)


NOTE = "Settings were chosen by perplexity on test users alone, never by canaries (search 0123456789ab): a rate 0.4."


@pytest.fixture
def make_sweep(sweep_of: Callable[..., Path]) -> Callable[..., Path]:
    """Write a sweep of one run in each partition, with the text of its file about a search."""
    rounds = {10: {"rs": [1.0] * 9, "exposure": [3.0] * 9, "references": 100.0, "perplexity": 50.0}}
    return partial(sweep_of, {("fedavg", partition): [rounds] for partition in ("iid", "non-iid")})


def test_how_settings_were_chosen_is_shown(make_sweep: Callable[..., Path], flsim: Flsim, tmp_path: Path) -> None:
    make_sweep("sweep", tuned=NOTE)
    runs = ["sweep/runs/fedavg-iid-seed0", "sweep/runs/fedavg-non-iid-seed0"]
    for arguments in (["compare", "sweep"], ["table", *runs]):
        code, text, err = flsim(*arguments)
        assert code == 0, err
        assert " ".join(text.split()).endswith(NOTE), arguments
        assert max(map(len, text.splitlines())) <= 80
    assert json.loads(flsim("compare", *runs, "--json")[1])["tuned"] == [NOTE]
    assert NOTE in " ".join(flsim("compare", "sweep", "--format", "latex")[1].replace("% ", "").split())
    _, csv, err = flsim("compare", "sweep", "--format", "csv")
    assert (NOTE in " ".join(err.split()), NOTE in csv) == (True, False)
    assert NOTE in render(gather([tmp_path / "sweep"]))


def test_sweeps_with_different_searches_are_named(
    make_run: Callable[..., Path], make_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    searched, other, alone = make_sweep("searched", tuned=NOTE), make_sweep("other"), make_run(name="alone")
    assert tuned_notes([searched, other, alone]) == [f"searched: {NOTE}", f"other: {NOT_SEARCHED}"]
    assert tuned_notes([alone, tmp_path / "other" / "runs" / "another"]) == []


CANARIES = [f"c{index:02d}" for index in range(9)]
OWN = [
    Quantity(name="nats", unit="nats", description="Nats of a canary.", format="{:.3f}"),
    Quantity(name="seen", kind="flag", description="Whether it was seen.", heading="Seen"),
]


@pytest.fixture
def partitions(make_run: MakeRun) -> dict[str, list[RunResults]]:
    """Return two seeds of both partitions: in IID, canaries have one nat more, and s more of seed s are seen."""
    found: dict[str, list[RunResults]] = {"iid": [], "non-iid": []}
    for partition in found:
        for seed in (0, 1):
            name, more = f"{partition}-{seed}", partition == "iid"
            setting = {"iid": "IID, FedAvg, b_u=4", "non-iid": "Non-IID, FedAvg, b_u=4"}[partition]
            about = {"seed": seed, "series": partition, "partition": partition, "rounds_per_epoch": 1.0}
            folder = make_run({10: {"references": 1.0}}, name=name, shift=100 * seed, setting=setting, **about)
            rows = [Row(name, 10, "references", "", 10_000.0)]
            for index, canary in enumerate(CANARIES):
                seen = float(index < 3 + more * seed)
                values = {"exposure": index / 2, "nats": index + more + seed / 4, "seen": seen}
                rows += [Row(name, 10, metric, canary, value) for metric, value in values.items()]
            write_rows(folder, 10, rows, OWN)
            found[partition].append(read_run(folder))
    return found


def test_partitions_are_compared_over_seeds(partitions: dict[str, list[RunResults]]) -> None:
    pair = Pair("row", planned(partitions["iid"]), planned(partitions["non-iid"]))
    frame = differences([pair])
    row = to_wide(frame).iloc[0]
    assert (row["nats_difference"], row["over"]) == (1.0, "seeds")
    assert (row["seen_value_a"], row["seen_value_b"]) == (3.5, 3.0)
    assert row["seen_p"] == pytest.approx(row["seen_p_holm"])
    assert "nats, a-b" in table_of_pairs(frame, [pair]).markdown()
    assert "+1.000" in compare_partitions([*partitions["iid"], *partitions["non-iid"]])


def test_text_of_a_description_is_shown_literally(make_run: MakeRun) -> None:
    """The text would be mathematics in a figure, a cell's end in Markdown, a command in LaTeX, and markup in HTML."""
    words = r"a|b $\nothing{$ <i>"
    strange = replace(OWN[0], title=words, heading=words, short=words, unit=words, axis=words)
    folder = make_run({10: {"references": 1.0}}, name="run", seed=0)
    rows = [Row("run", 10, metric, id_, 1.0) for metric in ("exposure", "nats", "seen") for id_ in CANARIES]
    write_rows(folder, 10, [*rows, Row("run", 10, "references", "", 100.0)], [strange, OWN[1]])
    run = read_run(folder)
    draw_rounds([run]).savefig(BytesIO(), format="svg")
    table = memorization_table([run])
    lines = to_markdown(table, width=400).splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[:3]}) == 1
    assert r"\nothing" not in to_latex(table).split(r"\toprule")[1]
    page = render(gather([folder]))
    assert "Seen" in page[page.index('id="answer"') : page.index("<nav")]
    assert "a|b $" in page
    assert "<i>a" not in page
    assert "$ <i>" not in page
