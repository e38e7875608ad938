"""The benchmark measures what it says, at a size that a test can afford."""

import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flsim.bench.scale import bench_scale, describe, memory

MEGABYTE = 2**20
HOLD = """
import mmap, subprocess, sys
from pathlib import Path
own = b"x" * (64 * 2**20)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total = sum(mapped[::mmap.PAGESIZE])
below = [subprocess.Popen([sys.executable, *sys.argv[:2]], stdin=subprocess.PIPE)] if sys.argv[2:] else []
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("nested", "processes"), [((), 1), (("nested",), 2)])
def test_memory_is_that_of_all_descendants_and_tells_own_from_mapped(
    tmp_path: Path, nested: tuple[str, ...], processes: int
) -> None:
    """Each holds 64 MB of its own; a file of 32 MB that all of them map counts once."""
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "file").write_bytes(bytes(32 * MEGABYTE))
    before = memory(os.getpid())
    with subprocess.Popen(
        [sys.executable, "hold.py", "file", *nested], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        for _ in range(processes):
            holder.stdout.readline()
        after = memory(os.getpid())
        holder.communicate()
    own, mapped = after.anonymous - before.anonymous, after.file - before.file
    assert 64 * processes <= own / MEGABYTE < 64 * processes + 24 * processes
    assert 30 <= mapped / MEGABYTE < 30 + 24  # libraries, shared with more processes, count less here


def test_a_process_that_has_ended_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert (memory(ended.pid).anonymous, memory(ended.pid).file) == (0, 0)


def test_figures_of_a_small_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    measured = bench_scale(users=30)
    assert not list(tmp_path.iterdir())
    assert measured["users"] == measured["cohort"] == 30
    assert measured["words"] >= 30 * 2_000
    assert measured["canaries"] == 90
    # tokens of two bytes and offsets of eight, of the training users alone
    assert measured["bytes"]["corpus"] > 2 * measured["words"] + 8 * measured["records"]
    assert measured["bytes"]["iid"] - measured["bytes"]["non-iid"] == pytest.approx(4 * measured["records"], abs=8 * 40)
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
