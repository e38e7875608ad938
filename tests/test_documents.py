"""Every experiment loads, and the documents name nothing that is not there."""

import re
from pathlib import Path

import pytest
from runs.test_config import train_split

from flsim.runs.config import load, toml

ROOT = Path(__file__).parents[1]


RUNS = [path for path in sorted((ROOT / "experiments").glob("*.toml")) if "tiers" not in toml.read(path)]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_experiment_loads(path: Path) -> None:
    assert load(path).rounds_over(train_split(1_000, 50)) > 0


def test_every_file_that_the_documents_name_is_there() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        linked = [document.parent / name for name in re.findall(r"\]\(([^):#]+)\)", text)]
        named = [ROOT / name for name in re.findall(r"\bexperiments/[\w-]+\.toml", text)]
        assert [path for path in [*linked, *named] if not path.exists()] == [], document
