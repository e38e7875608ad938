"""Tests of Triton kernels in Triton's interpreter; other files test the kernels on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
@pytest.mark.parametrize("name", ["interpreted.py", pytest.param("interpreted_positions.py", marks=pytest.mark.slow)])
def test_the_kernels_in_the_interpreter(name: str) -> None:
    """The tests pass in a separate process, because TRITON_INTERPRET must be set before Triton is imported."""
    tests = Path(__file__).with_name(name)
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", str(tests)]
    done = subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
