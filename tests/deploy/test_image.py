"""What the image is made of. `make image-check` runs its steps; these are the parts of that which take seconds."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("flsim", "clients", "server", "experiments")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """The files that .dockerignore lets through."""
    for name in re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_the_wheel_has_every_module_and_every_file_of_data(context: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", context, context], check=True, capture_output=True)
    (wheel,) = context.glob("*.whl")
    kinds = {".py", ".toml", ".csv", ".html", ".css", ".typed"}
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {name for name in tracked if Path(name).suffix in kinds and (ROOT / name).exists()}
    assert len(expected) > 100
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_pins_of_the_image_agree_with_the_others_and_with_the_project() -> None:
    ours, more = pins(ROOT / "constraints.txt"), pins(ROOT / "deploy" / "constraints.txt")
    assert {name for name in ours.keys() & more.keys() if ours[name] != more[name]} == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["cluster"] + extras["hdf5"]:
        requirement = Requirement(text)
        version = {**more, **ours}[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text


def test_the_image_runs_as_nobody() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000"]
    assert text.index("USER 1000") > text.rindex("RUN ")
    assert "useradd --create-home --uid 1000" in (ROOT / "deploy" / "install.sh").read_text()


def test_flsim_job_starts_once_and_then_goes_on(tmp_path: Path) -> None:
    """With a `flsim` that says how it was called."""
    (tmp_path / "flsim").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "flsim").chmod(0o755)

    def job() -> str:
        return subprocess.run(
            [ROOT / "deploy" / "flsim-job", "a.toml", "run", "--address", "auto"],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert job() == "run a.toml --out run --address auto\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert job() == "run a.toml --out run --resume --address auto\n"
