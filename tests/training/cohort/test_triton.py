"""Triton's kernels: by its interpreter here, on a GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
@pytest.mark.parametrize("name", ["interpreted.py", pytest.param("interpreted_positions.py", marks=pytest.mark.slow)])
def test_the_kernels_by_the_interpreter(name: str) -> None:
    """In a process of its own, since Triton must know before it is imported, and no other test should meet it."""
    tests = Path(__file__).with_name(name)
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", str(tests)]
    done = subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
