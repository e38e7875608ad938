"""Tables beside published values in every format: LaTeX that compiles, a terminal, CSV and Parquet that read back."""

import io
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from ninety import PRIVATE, PublishedRow, fedavg, paper
from shown import from_csv, over_seeds, to_latex, to_markdown

from flsim.results import tables
from flsim.results.against_published import AGAINST, against
from flsim.results.published import published_rows
from flsim.results.rows import WHOLE_TEST_USERS
from flsim.results.store import RunResults
from flsim.show.table import to_csv, write_parquet

HOSTILE = r"*[x]\input{x} & 100% $b_x$ #1 {~^} <|> `--é漢"


@pytest.fixture
def everything(make: Callable[..., RunResults]) -> dict[RunResults, PublishedRow]:
    """Runs with every kind of column, and names that LaTeX would obey or does not know."""
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
    """The run, as if no record had been drawn for its last canaries."""
    planned = [3] * (len(run.roster) - count) + [0] * count
    return replace(run, roster=run.roster.assign(planned_insertions=planned))


def frames(published: dict[RunResults, PublishedRow]) -> list[tuple[pd.DataFrame, str]]:
    """Both tables of the runs, and each as LaTeX."""
    runs = against(tables.memorization_table(list(published), published=published))
    seeds = against(over_seeds(list(published), published=published))
    return [(runs, to_latex(runs)), (seeds, to_latex(seeds))]


def compiled(bodies: list[str], folder: Path) -> str:
    """What pdflatex says of tables that are pasted into an article."""
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


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_of_a_sweep_fits_a_page(four: dict[RunResults, PublishedRow], tmp_path: Path) -> None:
    assert "Overfull" not in compiled([text for _, text in frames(four)], tmp_path)


def test_markdown_of_everything_fits_the_terminal(everything: dict[RunResults, PublishedRow]) -> None:
    """Long settings and names are in a list above, by the rows' numbers."""
    table = frames(everything)[0][0]
    lines = to_markdown(table).splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[: lines.index("")]).count("(dp-fedavg-iid-cohort16-seed0)") == 1
    assert re.split(r" *\| *", lines[lines.index("") + 1])[1:3] == ["Row", "RS %"]
    assert lines[lines.index("") + 3].split("|")[1].strip() == "1"


def test_everything_reads_back_from_csv_and_parquet(everything: dict[RunResults, PublishedRow], tmp_path: Path) -> None:
    for table, _ in frames(everything):
        pd.testing.assert_frame_equal(from_csv(to_csv(table)), table, check_exact=True)
        write_parquet(table, tmp_path / "table.parquet")
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table, check_exact=True)
        plain = pd.read_csv(io.StringIO(to_csv(table)))
        assert list(plain.columns) == list(table.columns)
