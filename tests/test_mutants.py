"""The mutations of `make mutants`, and its list of equivalent mutants."""

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[1] / ".ci"
LISTED: dict[str, Any] = tomllib.loads((CI / "mutants.toml").read_text(encoding="utf-8"))


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(CI), *sys.path])
    return importlib.import_module("mutations")


@pytest.mark.parametrize("entry", LISTED["equivalent"], ids=lambda entry: entry["before"][:60])
def test_equivalent_mutants_are_ones_of_the_current_source(entry: dict[str, str], mutations: Any) -> None:
    """An entry whose line has changed must be judged again."""
    assert set(entry) <= {"file", "before", "after", "reason"}
    assert entry["reason"]
    source = (CI.parent / entry["file"]).read_text(encoding="utf-8")
    mutants = [mutant for site in mutations.mutants_of(entry["file"], source) for mutant in site]
    assert any(mutant.is_like(entry) for mutant in mutants)


def test_listed_modules_exist(mutations: Any) -> None:
    mutants = importlib.import_module("mutants")
    for folder, names in LISTED["modules"].items():
        assert (CI.parent / mutants.tests_of(Path(folder))).is_dir()
        for name in names:
            assert (CI.parent / "flsim" / folder / f"{name}.py").exists()
