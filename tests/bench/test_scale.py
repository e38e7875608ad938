"""The benchmark measures what it says, at a size that a test can afford."""

import json
import mmap
import tempfile
from pathlib import Path

import pytest

from flsim.bench.scale import bench_scale, describe


def test_figures_of_a_small_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    measured = bench_scale(users=30)
    assert not list(tmp_path.iterdir())
    assert measured["users"] == measured["cohort"] == 30
    assert measured["words"] >= 30 * 2_000
    assert measured["canaries"] == 90
    # tokens of two bytes and offsets of eight, of the training users alone
    assert measured["bytes"]["corpus"] > 2 * measured["words"] + 8 * measured["records"]
    # a number of four bytes for each record, of eight for each user; and two digests
    order = measured["bytes"]["iid"] - measured["bytes"]["non-iid"]
    assert order == pytest.approx(4 * measured["records"] + 8 * 31 + 2 * 84, abs=30)
    steps = measured["steps"]
    worlds = [name for name in steps if name.startswith("iid")]
    assert [name.replace("iid", "non-iid") for name in worlds] == [name for name in steps if name.startswith("non")]
    assert steps["iid: read a cohort warm"]["rounds"] == 7
    for step in steps.values():
        assert step["seconds"] > 0
        assert min(step["peak_anonymous_bytes"], step["peak_file_bytes"]) > mmap.PAGESIZE
    assert json.loads(json.dumps(measured)) == measured
    text = describe(measured)
    assert all(name in text for name in steps)
    assert max(map(len, text.splitlines())) <= 120
