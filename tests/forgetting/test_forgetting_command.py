"""`flsim forgetting` of real runs of both arms: what it prints, and what it says without arm OUT."""

import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Flsim, Trained

import flsim as api
from flsim.attacks.forgetting.tables import time_text
from flsim.base.errors import InputError
from flsim.results.store import read_run
from flsim.runs.folder import Run, participation

WINDOWED = (
    "training.rounds=8",
    "canaries.windows=[[0, 4]]",
    "canaries.p_u=[0.1]",
    "canaries.p_e=[0.5]",
    "canaries.count=12",
)


@pytest.fixture
def arms(trained_here: Trained) -> tuple[Path, Path]:
    """Both arms of one seed: 12 canaries in rounds 1 to 4 of 8, evaluated every second round."""
    return trained_here(*WINDOWED), trained_here(*WINDOWED, "canaries.arm='out'")


def test_json_is_what_pandas_makes_of_rows(arms: tuple[Path, Path], flsim: Flsim) -> None:
    """The median exposure and the scores of the last k, from the rows and the rounds of participation themselves."""
    code, out, _ = flsim("forgetting", *arms, "--json", "--pool")
    assert code == 0
    printed = json.loads(out)
    (group,) = printed["times"]
    run, results, twin = Run.open(arms[0]), read_run(arms[0]), read_run(arms[1])
    last = participation(run, 8).groupby("canary")["round"].max()
    assert last.max() <= 4
    used = [canary for canary in results.planted["canary"] if canary in last.index]
    assert group["canaries"] - group["never_used"] == len(used)
    *_, before, of_last = printed["success"]
    assert of_last["k"] == group["k_max"] == int(np.sort(8 - last[used])[(len(used) - 1) // 2])
    at_k = {
        canary: at
        for at in (2, 4, 6, 8)  # the last one stays
        for canary in used
        if before["k"] < at - last[canary] <= of_last["k"]
    }
    exposures = {at: results.of_canaries("exposure", at) for at in (2, 4, 6, 8)}
    values = [of_round[canary] for canary, at in at_k.items() if (of_round := exposures[at]) is not None]
    assert of_last["canaries"] == len(values) > 0
    assert of_last["bits_in"] == pytest.approx(np.median(values))
    measured = api.measure_forgetting(*arms, pool=True)
    at_8 = measured.observations[measured.observations["round"] == 8].set_index("canary")
    clean, end = (twin.of_canaries("log_perplexity", at) for at in (4, 8))
    assert clean is not None
    assert end is not None
    assert at_8["score_out"].to_dict() == pytest.approx((clean - end)[at_8.index].to_dict())


def test_text_csv_and_figure(arms: tuple[Path, Path], flsim: Flsim, tmp_path: Path) -> None:
    figure = tmp_path / "forgetting.png"
    code, out, _ = flsim("forgetting", *arms, "--out", figure)
    assert code == 0
    assert figure.stat().st_size > 10_000
    assert "rounds 1-4, 1/10, 50%" in out
    code, out, _ = flsim("forgetting", *arms, "--csv")
    table = pd.read_csv(io.StringIO(out))
    assert len(table) == len(api.measure_forgetting(*arms).success)


def test_a_report_of_windowed_runs_has_a_section(arms: tuple[Path, Path], flsim: Flsim, tmp_path: Path) -> None:
    """With the same times as the command, and a figure."""
    page = tmp_path / "report.html"
    assert flsim("report", *arms, "--out", page)[0] == 0
    (section,) = re.findall(r'<section aria-labelledby="forgetting".*?</section>', page.read_text(), re.DOTALL)
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", section.split("</thead>")[1].split("</table>")[0])
    (about,) = api.measure_forgetting(*arms).times.to_dict("records")
    assert cells[:3] == ["1-4", "1/10, 50%", str(about["canaries"] - about["never_used"])]
    assert cells[4] == str(about["k_max"])
    assert pd.isna(about["left"]) or f"{100 * about['left']:.0f}" in cells[8:]
    assert html.unescape(cells[7]) == time_text(about["median_time"], about["median_is_censored"])
    assert "rounds since last use" in section
    assert section.count("<figure") == 2  # exposure, and what training added


@pytest.mark.parametrize("alpha", [0.5, 1.0, float("nan")])
def test_impossible_alphas_are_refused(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha must be above"):
        api.measure_forgetting("nowhere", alpha=alpha)
