"""Tests of `make gpu` at a small size on a CPU: each part is a process, and a part that is stopped keeps figures."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import profiles

ROOT = Path(__file__).parents[2]
FIGURES = {  # some figures of each part
    "env": {"Triton", "copy in memory", "product in bf16", "product in float32"},
    "engine": {"float32, 1 at once", "bf16, 2 at once", "bf16, 2 at once: memory by StackedTrainer.memory"},
    "tests": {"test_stacked_cuda.py", "test_central_stacked_cuda.py"},
    "central": {"ours", "ours, bf16", "plain", "ours: distance from the plain loop's model"},
    "repeat": {"bf16: the same round again", "float32: central training after a resume"},
    "lora": {"tiny, one at a time", "tiny, blocks of 2: ratio"},
    "ranks": {"decisions of 10 canaries, |R| 500", "memorized canaries"},
    "recurrence": {"tiles"},
    "profile": {"a step of 2 users", *profiles.KINDS},
}


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.nightly
def test_every_part_on_a_cpu(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "gpu.json").read_text())
    assert measured.keys() == FIGURES.keys() == program.LIMITS.keys()
    for name, part in measured.items():
        figures = {figure["name"]: figure for figure in part["figures"]}
        assert part["status"] == "done"
        assert figures.keys() >= FIGURES[name], name
        assert {figure["predicted"] for figure in figures.values()} == {""}  # predictions are for the full sizes
        assert json.loads((tmp_path / f"{name}.json").read_text())["figures"] == part["figures"]
    assert {figure["value"] for figure in measured["repeat"]["figures"]} == {"the same bits"}
    assert measured["profile"]["details"][0]["text"].count("\n") > 5
    assert (tmp_path / "gpu.md").read_text() == done.stdout.removesuffix("\n")


def in_place_of_python(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Replace Python by a shell script, which parts run in the folder of the results."""
    script = folder / "script"
    script.write_text("\n".join(["#!/bin/sh", f"cd {folder}", *lines, ""]))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_figures_of_a_part_that_is_stopped_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part measures one figure and then does not end; no time remains for the next part."""
    figure = {"name": "bf16, 264 at once", "value": 2345.6, "unit": "users/s", "predicted": "2,300 ± 400 users/s"}
    content = json.dumps({"figures": [figure], "details": []})
    lines = ["echo $$ > pid", "echo a step is slow", f"echo '{content}' > engine.json", "exec sleep 600"]
    in_place_of_python(tmp_path, monkeypatch, *lines)
    monkeypatch.setattr(program, "SHORTEST", 1.0)
    chosen = Namespace(out=tmp_path, device="cpu", quick=True, parts=["engine", "ranks"], minutes=4 / 60)
    assert program._measure_all(chosen) == 1
    measured = json.loads((tmp_path / "gpu.json").read_text())
    assert re.fullmatch(r"stopped after \d s: a step is slow", measured["engine"]["status"])
    assert measured["engine"]["figures"] == [figure]
    assert measured["ranks"]["status"].startswith("not started")
    assert "| bf16, 264 at once | 2,346 users/s | 2,300 ± 400 users/s |" in (tmp_path / "gpu.md").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    done = run("--parts", "env")
    assert done.returncode == 2
    assert "torch finds no NVIDIA GPU on this machine" in done.stderr.splitlines()[-1]
