"""Comparisons of two runs: audits and stored attacks on membership, side by side."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import TESTED, Flsim, Trained

import flsim as api


@pytest.fixture
def both(trained_here: Trained, tmp_path: Path) -> tuple[Path, Path]:
    """A run without noise whose membership was attacked, and one with noise and canary users."""
    for name, run in (("plain", trained_here()), ("noisy", trained_here(*TESTED))):
        shutil.copytree(run, tmp_path / name)
    return tmp_path / "plain", tmp_path / "noisy"


def test_a_comparison_has_the_bounds_and_the_stored_attacks(both: tuple[Path, Path], flsim: Flsim) -> None:
    rows = api.infer_membership(both[0], attacks=["loss", "zlib"])
    code, out, err = flsim("compare", *both)
    assert code == 0, err
    section = out.partition("## Evidence from audits and attacks\n")[2]
    lines = {cells[0]: cells[1:] for line in section.splitlines() if len(cells := _cells(line)) == 3}
    loss = rows.to_dict("records")[0]
    area = f"{loss['auroc']:.3f} ({loss['auroc_low']:.3f}-{loss['auroc_high']:.3f})"
    assert lines["records: loss"][0].startswith(area)
    assert lines["records: loss"][1] == ""
    audited = api.audit(*both)
    first, second = (part.set_index("method") for _, part in audited.groupby("run", sort=False))
    assert lines["epsilon"] == [f">= {float(part['low']['epsilon']):.2f}" for part in (first, second)]
    estimate = float(second["estimate"]["epsilon, canary users"])
    assert lines["epsilon, canary users"] == ["", f"about {estimate:.2f}"]
    assert lines["ledger, canary users by coins"] == ["", "cannot be tested"]
    refutable = float(second["refutable"]["trade-off, canary users by coins"])
    assert lines["limit, canary users by coins"] == ["", f"{refutable:.2f}"]
    proof = json.loads(flsim("compare", *both, "--json")[1])["proof"]
    assert [row["attack"] for row in proof["a"]["membership"]] == ["loss", "zlib"]
    assert proof["b"]["membership"] == []
    assert [row["method"] for row in proof["b"]["rows"]] == audited["method"].tolist()[len(first) :]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
