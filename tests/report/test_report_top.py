"""The first screen of a report: its title, its figure and its table, against what was written."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from htmlpage import Page, described
from reported import Made, write_run
from simulated_report import gathered_of, table_1

from flsim.base.statistics import t_interval
from flsim.report.blocks import number
from flsim.report.figures import overview
from flsim.report.gather import gather
from flsim.report.page import title_of
from flsim.results.run_file import WORLDS
from flsim.results.store import read_run
from flsim.runs.config import CentralConfig, CentralTrainingHParams, DataHParams, FederatedConfig, TrainingHParams
from flsim.show.figure import page_style


def test_the_figure_at_the_top_has_each_setting(page: Page, sweep: Made) -> None:
    """FedAvg has two seeds and so an interval; the others have one seed."""
    told = described(page, "Mean exposure")
    for world, name in (("iid", "IID"), ("non-iid", "Non-IID")):
        runs = [read_run(sweep.path / "runs" / f"fedavg-{world}-{seed}") for seed in (0, 1)]
        means = [float(run.of_canaries("exposure", 30).mean()) for run in runs]  # type: ignore[union-attr]
        low, high = (number(end) for end in t_interval(np.array(means)))
        assert f"{name}, FedAvg, b_u=4: {np.mean(means):.1f} ({low} to {high})." in told
        assert f"{name}, SGD, b_r=32: 5.1." in told
    assert "b_u=6" not in told
    assert page.html.index("overview-0-t") < page.html.index("<table")


def test_the_first_table_has_the_differences_of_each_factor(page: Page, sweep: Made) -> None:
    """Partition within FedAvg is a mean over FedAvg and DP-FedAvg, which has no effect and seed 0 only."""
    a, b = (read_run(sweep.path / "runs" / f"fedavg-{world}-0").of_canaries("exposure", 30) for world in WORLDS)
    mean = (float((a - b).mean()) + 0.0) / 2  # type: ignore[operator]
    answer = page.section("answer")
    assert "exposure, bits" in answer
    assert re.search(rf"IID − non-IID Partition, FedAvg, 2 pairs [\d.]+ [\d.]+ \{mean:+.2f} – 1 ", answer)
    assert "FedAvg − SGD Technique, IID data, 1 pair" in answer


def test_many_settings_share_rows_of_their_technique() -> None:
    """Seven cohort sizes and six batch sizes in both partitions: 13 rows are more than a figure has."""
    data = {world: DataHParams(Path("corpus"), world) for world in ("iid", "non-iid")}
    federated = [TrainingHParams(rounds=50, cohort=size) for size in range(2, 9)]
    central = [CentralTrainingHParams(steps=99, batch_size=size) for size in range(2, 8)]
    configs = [FederatedConfig(data[world], training=each) for each in federated for world in data]
    configs += [CentralConfig(data[world], training=each) for each in central for world in data]  # type: ignore[misc]
    gathered = gathered_of(configs, lambda config, _: 4.0 + (config.data.world == "iid"), seeds=2)
    with page_style():
        (figure,) = overview(gathered)
    words = str(figure.panels[0][1])
    for row in ("IID, FedAvg: 5.0", "Non-IID, FedAvg: 4.0", "IID, SGD: 5.0", "Non-IID, SGD: 4.0"):
        assert row in words
    assert "b_u" not in words


@pytest.mark.parametrize(
    ("worlds", "cohorts", "title"),
    [
        (("iid", "non-iid"), (4,), "FedAvg, b_u=4, IID against non-IID: 2 runs"),
        (("non-iid",), (4, 8), "FedAvg, b_u=4, FedAvg, b_u=8, Non-IID: 2 runs"),
        (("iid", "non-iid"), (4, 8, 16, 32), "FedAvg, IID against non-IID: 8 runs"),
    ],
)
def test_a_title_says_what_was_compared(
    worlds: tuple[str, ...], cohorts: tuple[int, ...], title: str, tmp_path: Path
) -> None:
    names = {"iid": "IID", "non-iid": "Non-IID"}
    paths = [
        write_run(tmp_path / f"{world}-{size}", setting=f"{names[world]}, FedAvg, b_u={size}")
        for world, size in product(worlds, cohorts)
    ]
    assert title_of(gather(paths)) == title


def test_the_figure_leaves_a_seed_that_diverged_out_of_both_partitions() -> None:
    configs = [config for config in table_1() if config.label == "FedAvg, b_u=4"]
    gathered = gathered_of(configs, lambda config, seed: 4.0 + seed + (config.data.world == "iid"))
    runs = gathered.settings[0].runs
    runs[2] = replace(runs[2], results=replace(runs[2].results, status="diverged"))
    with page_style():
        (figure,) = overview(gathered)
    assert "IID, FedAvg, b_u=4: 5.5" in str(figure.panels[0][1])  # seeds 0 and 1 of both
    assert "Non-IID, FedAvg, b_u=4: 4.5" in str(figure.panels[0][1])
