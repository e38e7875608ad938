"""A small corpus and a sweep over it, for all tests of reports."""

from pathlib import Path

import pytest
from htmlpage import Page
from reported import Made, write_sweep

from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.report.gather import gather
from flsim.report.page import render


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpora") / "small"
    make_synthetic(path, SyntheticHParams(users=12, test_users=2, heldout_users=2, words_per_user=40), 0)
    return path


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Made:
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "table9", corpus)


@pytest.fixture(scope="session")
def page(sweep: Made) -> Page:
    return Page(render(gather([sweep.path])))
