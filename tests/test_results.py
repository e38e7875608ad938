"""Pages show the numbers of the files in experiments/results, and each value with an interval is in one file."""

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import summaries

ROOT = Path(__file__).parents[1]
RESULTS: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "result_tables.py"))
FRAMES = sorted(path.stem for path in RESULTS["FRAMES"].glob("*.csv"))
PAGES: list[Path] = RESULTS["pages"]()


def test_pages_show_what_the_files_state() -> None:
    """Writing a page again changes nothing. If this fails, run: python .ci/result_tables.py."""
    assert len(PAGES) > 15
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert RESULTS["written"](page, text) == text, page


def test_a_changed_number_is_replaced_by_that_of_the_file() -> None:
    page = ROOT / "docs" / "result-table1.md"
    text = page.read_text(encoding="utf-8")
    changed = text.replace("| 72.2 |", "| 72.3 |")
    assert changed != text == RESULTS["written"](page, changed)


def test_each_file_has_one_source_and_is_on_a_page() -> None:
    """One section of sources.toml has the file; a page shows its table or names it, for example in its commands."""
    owned = Counter(name for source in RESULTS["sources"]().values() for name in source.get("frames", ()))
    assert owned == Counter(FRAMES)
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in owned if not re.search(rf"table: {name}\b(?!-)|(?<![\w-]){name}\.csv", text)] == []


def intervals() -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield each file with each of its values that has an interval; negative values have their signs changed."""
    for frame in FRAMES:
        rows = RESULTS["rows_of"](frame)
        for column in [name.removesuffix("_low") for name in rows[0] if name.endswith("_low")]:
            for row in rows:
                if row.get(column) and row[f"{column}_low"]:
                    value, low, high = (float(row[f"{column}{end}"]) for end in ("", "_low", "_high"))
                    yield frame, (value, low, high) if value >= 0 else (-value, -high, -low)


def test_a_value_with_an_interval_is_in_one_file() -> None:
    """Other files refer to this file. Numbers below 0.1 have at most two significant digits, and are equal by chance.

    The files in `computed` have differences that a tested command computes, which can also be equal by chance.
    """
    computed = {
        "dp-ftrl-differences",
        "dp-ftrl-clip",
        "table1-partitions",
        "table1-techniques",
        "secret-sharer-layers",
        "secret-sharer-units",
        "shadows-users",
        "table2-refined",
        "four-settings-refined",
        "table3-half",
        "table4-half",
    }
    files: dict[tuple[float, ...], set[str]] = {}
    for frame, figure in intervals():
        if frame not in computed and all(abs(number) >= 0.1 for number in figure):
            files.setdefault(figure, set()).add(frame)
    assert len(files) > 150
    assert {figure: names for figure, names in files.items() if len(names) > 1} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_sentences_are_in_the_files(page: Path) -> None:
    """Each decimal number is in a file, and the two ends of each interval belong to one value of a file."""
    text = re.sub(r"<!-- table:.*?<!-- end -->|^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    text = re.sub(r"[Ss]ection \S+", "", " ".join(text.split()))
    stated = {
        number
        for frame in FRAMES
        for row in RESULTS["rows_of"](frame)
        for cell in row.values()
        for number in re.findall(r"\d+\.\d+", cell)
    }
    assert set(re.findall(r"(?<![\w.:/])(\d+\.\d+)(?![\w.])", text)) <= stated
    known = {figure[1:] for _, figure in intervals()}
    for low, high in re.findall(r"\(95% CI (?:over \w+ )?(-?[\d.]+) to (-?[\d.]+)\)", text):
        assert {(float(low), float(high)), (-float(high), -float(low))} & known, (low, high)


def test_claims_that_hold_have_intervals_over_seeds_that_exclude_zero() -> None:
    for row in RESULTS["rows_of"]("claims"):
        effect = RESULTS["value_of"](row, "effect")
        if row["verdict"] != "open":
            assert effect.over == "seeds"
            assert float(effect.low) * float(effect.high) > 0, row["claim"]
        if row["verdict"] == "holds":
            assert float(effect.low) > 0, row["claim"]


@pytest.mark.parametrize(
    "cell", ["=table1-settings/no such row/exposure", "=table1-partitions/FedAvg, mean/unheard_of"]
)
def test_a_reference_to_nothing_is_refused(cell: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        RESULTS["value_of"]({"effect": cell}, "effect")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_published_shares_are_those_of_the_paper(number: int) -> None:
    """Shares by Random Sampling are those of Thakkar et al. (2020), as percentages of 90 canaries."""
    rows = RESULTS["rows_of"](f"table{number}-settings")
    shares = [share for row in rows for column, share in row.items() if column.endswith("paper_rs_percent")]
    paper = pd.read_csv(ROOT / "experiments" / "thakkar2020.csv").query("table == @number")
    assert Counter(shares) == Counter(f"{found / 90:.1%}"[:-1] for found in paper["rs"])


PUBLISHED = {1: ("table1", r"paper_exposure"), 2: ("table2-paper", r"units_\d+"), 7: ("table7", r"paper_exposure")}


@pytest.mark.parametrize("number", PUBLISHED)
def test_published_exposure_is_that_of_the_paper(number: int) -> None:
    """Exposures are those of Carlini et al. (2018), in experiments/carlini2018.csv."""
    frame, columns = PUBLISHED[number]
    rows = RESULTS["rows_of"](f"secret-sharer-{frame}")
    exposure = [float(row[name]) for row in rows for name in row if re.fullmatch(columns, name) and row[name]]
    paper = pd.read_csv(ROOT / "experiments" / "carlini2018.csv").query("table == @number")
    assert len(exposure) >= 7
    assert Counter(exposure) <= Counter(paper["mean_exposure"])  # the paper's Table 1 has two more networks


@pytest.mark.parametrize(
    ("experiment", "stored"),
    [
        ("ten-times", "ten-times"),
        ("table1-edge", "table1-search"),
        ("table1", "table1-runs"),
        ("table2-edge", "table2-search"),
        ("table2", "table2-runs"),
        ("four-settings-edge", "four-settings-search"),
        ("four-settings", "four-settings-runs"),
        ("table3", "table3-runs"),
        ("table4", "table4-runs"),
        ("table3-half", "table3-half-runs"),
        ("table4-half", "table4-half-runs"),
        ("dp-ftrl", "dp-ftrl"),
        ("dp-ftrl-attacks", "dp-ftrl-attacks"),
        ("user-level", "user-level"),
        ("lora", "lora*"),
        ("demo", "demo"),
        ("dp-small", "dp-seeds"),
        ("layers", "secret-sharer-layers-runs"),
        ("units", "secret-sharer-units-runs"),
        ("shadows-users", "shadows-users"),
    ],
)
def test_tables_are_computed_again(
    experiment: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that are computed again from the stored rows equal the files byte for byte."""
    results = summaries.RESULTS
    monkeypatch.setattr(summaries, "RESULTS", tmp_path)
    for path in results.glob(f"{stored}.parquet"):
        (tmp_path / path.name).symlink_to(path)
    summaries.SUMMARIES[experiment]([])
    written = sorted(tmp_path.glob("*.csv"))
    assert written
    for path in written:
        assert path.read_bytes() == (results / path.name).read_bytes()
