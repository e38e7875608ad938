"""The top of a report: its title, its figure, and the sentences on factors, against what was written."""

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
from flsim.report.gather import gather
from flsim.report.overview import overview
from flsim.report.page import render
from flsim.results.run_file import WORLDS
from flsim.results.store import read_run
from flsim.runs.config import CentralConfig, CentralTrainingHParams, DataHParams, FederatedConfig, TrainingHParams


@pytest.fixture(scope="module")
def page(sweep: Made) -> Page:
    return Page(render(gather([sweep.path])))


def test_the_figure_at_the_top_has_a_row_for_each_setting(page: Page, sweep: Made) -> None:
    """FedAvg has two seeds and so an interval; the others have one seed."""
    of_world: dict[str, list[float]] = {}
    for world in ("iid", "non-iid"):
        runs = [read_run(sweep.path / "runs" / f"fedavg-{world}-{seed}") for seed in (0, 1)]
        of_world[world] = [float(run.of_canaries("exposure", 30).mean()) for run in runs]  # type: ignore[union-attr]
        low, high = (number(end) for end in t_interval(np.array(of_world[world])))
        told = described(page, f"Mean exposure, {sweep.settings[f'fedavg-{world}-0']}")
        memorized = 7.5 if world == "iid" else 3.5
        assert f"{np.mean(of_world[world]):.1f} bits ({low} to {high}) · RS {memorized / 16:.0%}" in told
    assert "bits · RS 25%. From 0.0 to 10.0 bits." in described(page, f"Mean exposure, {sweep.settings['sgd-iid']}")
    assert f"Mean exposure, {sweep.settings['hot']}" not in page.html
    assert page.html.index("overview-0-t") < page.html.index('class="lead"')


def test_each_factor_has_a_sentence(page: Page, sweep: Made) -> None:
    """World within FedAvg is a mean over FedAvg and DP-FedAvg, which has no effect and seed 0 alone."""
    a, b = (read_run(sweep.path / "runs" / f"fedavg-{world}-0").of_canaries("exposure", 30) for world in WORLDS)
    mean = (float((a - b).mean()) + 0.0) / 2  # type: ignore[operator]
    answer = page.section("answer")
    assert f"World, with FedAvg: IID less non-IID is {mean:+.2f} bits (one seed, so no interval over seeds" in answer
    assert "World, with SGD: IID less non-IID is +0.00 bits" in answer
    assert "Technique, with IID data: FedAvg less SGD is" in answer
    assert "of the canaries are at the ceiling." in answer


def test_several_techniques_in_both_worlds_share_rows(tmp_path: Path, corpus: Path) -> None:
    paths = []
    for world, size in product(WORLDS, (2, 4)):
        data = DataHParams(corpus, world)  # type: ignore[arg-type]
        steps = CentralTrainingHParams(steps=30, batch_size=size)
        configs = (
            CentralConfig(data, training=steps),
            FederatedConfig(data, training=TrainingHParams(rounds=30, cohort=size)),
        )
        for config in configs:
            name = f"{config.label}-{world}".replace(", ", "-")
            paths.append(write_run(tmp_path / name, config, setting=config.setting, memorized=size))
    page = Page(render(gather(paths)))
    assert re.findall(r">Mean exposure, ([^<]+)</title>", page.html) == [
        "IID, SGD", "Non-IID, SGD", "IID, FedAvg", "Non-IID, FedAvg",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("worlds", "cohorts", "title"),
    [
        (("iid", "non-iid"), (4,), "FedAvg, b_u=4, IID against non-IID: 2 runs"),
        (("non-iid",), (4, 8), "FedAvg, b_u=4 and FedAvg, b_u=8, Non-IID: 2 runs"),
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
    assert f"<title>{title}</title>" in render(gather(paths))


def test_the_figure_leaves_a_seed_that_diverged_out_of_both_worlds() -> None:
    configs = [config for config in table_1() if config.label == "FedAvg, b_u=4"]
    gathered = gathered_of(configs, lambda config, seed: 4.0 + seed + (config.data.world == "iid"))
    runs = gathered.settings[0].runs
    runs[2] = replace(runs[2], results=replace(runs[2].results, status="diverged"))
    ((iid, _, of_iid), (other, _, of_other)) = overview(gathered)[0].rows
    assert (str(iid).startswith("IID"), str(other).startswith("Non-IID")) == (True, True)
    assert (of_iid.split()[0], of_other.split()[0]) == ("5.5", "4.5")  # seeds 0 and 1 of both
    counts = ("<small>2 of 3 seeds, 1 diverged</small>", "<small>2 of 3 seeds</small>")
    assert tuple(str(words)[str(words).index("<small>") :] for words in (of_iid, of_other)) == counts
    assert "A seed that diverged in one world is left out of both" in str(overview(gathered)[0].caption)
