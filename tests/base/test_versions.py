"""What must be equal for equal numbers: what is said of it changes when it does."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from raynodes import older_release

from flsim.base.machine import PACKAGES, code_digest, versions

ROOT = Path(__file__).parents[2]


def digest_in(folder: Path) -> str:
    """Of the code in a folder, as a process that imports it says."""
    done = subprocess.run(
        [sys.executable, "-c", "from flsim.base import versions; print(versions.__file__, versions.code_digest())"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    where, digest = done.stdout.split()
    assert Path(where).is_relative_to(folder)
    return digest


def test_versions_are_those_that_are_imported(tmp_path: Path) -> None:
    here = versions()
    assert here["python"] == platform.python_version()
    assert here["numpy"] == np.__version__
    assert here["torch"] == torch.__version__
    assert here["flsim"] == code_digest()
    code = "from flsim.base.machine import versions; print(versions()['scipy'])"
    environment = {**os.environ, "PYTHONPATH": f"{older_release(tmp_path, 'scipy')}:{ROOT}"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "0.1\n"


def test_a_digest_is_of_names_and_source_wherever_they_lie(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    first = digest_in(tmp_path)
    (tmp_path / "server" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "server" / "__pycache__" / "left.pyc").touch()
    assert digest_in(tmp_path) == first  # what Python leaves is no source
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in PACKAGES:
        (tmp_path / name).rename(moved / name)
    assert digest_in(moved) == first
    source = moved / "clients" / "app.py"
    source.write_text(source.read_text() + "\n")
    changed = digest_in(moved)
    assert changed != first
    source.rename(source.with_name("other.py"))
    assert digest_in(moved) not in {first, changed}
