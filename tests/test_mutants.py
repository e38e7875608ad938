"""The mutations of `make mutants`, and its list of equivalent mutants."""

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[1] / ".ci"
LISTED: dict[str, Any] = tomllib.loads((CI / "mutants.toml").read_text(encoding="utf-8"))
SOURCE = '''"""A module."""

LEVEL = 0.05


@decorated(3)
def share(hits: int, trials: "list[1]", prior: bool = True) -> float:
    """Return 1 of 2."""
    if not trials or hits < 2:
        raise InputError(f"needs {2 - hits} more" + "!")
    return min(1.0, hits / trials - 3)  # é
'''


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(CI), *sys.path])
    return importlib.import_module("mutations")


def test_operators_comparisons_constants_and_calls_are_mutated_and_messages_are_not(mutations: Any) -> None:
    changes = {(mutant.before, mutant.after) for site in mutations.mutants_of("share.py", SOURCE) for mutant in site}
    test, value = "if {}:", "return {} # é"
    assert {("LEVEL = 0.05", "LEVEL = 0.1"), ("LEVEL = 0.05", "LEVEL = 0.025")} < changes
    for before, after in (
        (test.format("not trials or hits < 2"), test.format("(not trials and hits < 2)")),
        (test.format("not trials or hits < 2"), test.format("not trials or (hits <= 2)")),
        (value.format("min(1.0, hits / trials - 3)"), value.format("min(1.0, (hits / trials + 3))")),
        (value.format("min(1.0, hits / trials - 3)"), value.format("max(1.0, hits / trials - 3)")),
    ):
        assert (before, after) in changes
    assert not any("InputError" in before or "Return" in before for before, _ in changes)


def test_mutants_are_python_and_know_their_function(mutations: Any) -> None:
    found = [mutant for site in mutations.mutants_of("share.py", SOURCE) for mutant in site]
    for mutant in found:
        compile(mutant.source, "share.py", "exec")
        assert mutant.source != SOURCE
        assert mutant.covers(6)  # where the function begins, with its decorators
        assert mutant.covers(20) == (mutant.place == 3)  # outside of functions every function is concerned


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
