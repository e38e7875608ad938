"""The sentences on how settings were chosen stand below tables and comparisons for people, and in no CSV."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import Flsim

from flsim.report.gather import gather
from flsim.report.page import render
from flsim.results.sweeps import NOT_SEARCHED, tuned_notes

NOTE = "Settings were chosen by perplexity on test users alone, never by canaries (search 0123456789ab): a rate 0.4."


@pytest.fixture
def make_sweep(sweep_of: Callable[..., Path]) -> Callable[..., Path]:
    """Write a sweep of one run in each partition, and what its file has about a search."""
    rounds = {10: {"rs": [1.0] * 9, "exposure": [3.0] * 9, "references": 100.0, "perplexity": 50.0}}
    return partial(sweep_of, {("fedavg", partition): [rounds] for partition in ("iid", "non-iid")})


def test_how_settings_were_chosen_is_said(make_sweep: Callable[..., Path], flsim: Flsim, tmp_path: Path) -> None:
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


def test_sweeps_that_differ_are_named(
    make_run: Callable[..., Path], make_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    searched, other, alone = make_sweep("searched", tuned=NOTE), make_sweep("other"), make_run(name="alone")
    assert tuned_notes([searched, other, alone]) == [f"searched: {NOTE}", f"other: {NOT_SEARCHED}"]
    assert tuned_notes([alone, tmp_path / "other" / "runs" / "another"]) == []
