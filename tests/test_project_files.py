"""Files about the project agree with each other and with the source; `make lint` checks their formats."""

import importlib
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import Experiment, assert_same, wait_for_round
from packaging.requirements import Requirement

import flsim

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_hooks_of_pre_commit_are_programs_of_the_environment() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    hooks = [hook for repository in yaml.safe_load(path.read_text())["repos"] for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}  # others fetch versions that nothing pins
    programs = [Path(hook["entry"].split()[0]) for hook in hooks]
    assert [program for program in programs if not (BIN / program.name).exists()] == []
    assert {program.parent for program in programs} == {Path(".venv/bin")}


def test_the_version_is_written_in_one_place_and_read_everywhere(tmp_path: Path) -> None:
    assert flsim.__version__ == version("flsim-memorization") == PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)[0] == PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == PROJECT["version"]
    # Source that is not installed, such as source that Flower unpacks, has no version. -S hides installed packages.
    shutil.copytree(ROOT / "flsim", tmp_path / "flsim", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import flsim; print(flsim.__version__)"
    command = [sys.executable, "-S", "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed == "0+unknown\n"


def test_versions_of_python_are_the_same_everywhere() -> None:
    classified = [text.split()[-1] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    latest = int(classified[-1].removeprefix("3."))
    assert PROJECT["requires-python"] == f">={classified[0]},<3.{latest + 1}"
    makefile = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"shell for name in (.*); do", makefile)
    assert [name.removeprefix("python") for name in names.split()] == classified
    matrices = {
        path.name: yaml.safe_load(path.read_text())["jobs"][path.stem.replace("ci", "run")]["strategy"]["matrix"]
        for path in WORKFLOWS
    }
    assert matrices["ci.yml"]["python"] == classified
    assert set(matrices["newest.yml"]["python"]) <= set(classified)


def test_ci_runs_the_script_and_pins_its_actions() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["run"]["steps"]
    assert {"run": ".ci/run"} in steps
    actions = [step["uses"] for path in WORKFLOWS for step in steps_of(path) if "uses" in step]
    assert actions
    assert [name for name in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def test_newest_py_lists_all_dependencies_without_upper_limits() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "newest.py"), "--list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    extras = PROJECT["optional-dependencies"].values()
    own = [Requirement(line) for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]]
    newest = {(line.name, str(line.marker), *line.extras): line.specifier for line in map(Requirement, lines)}
    limited = {(line.name, str(line.marker), *line.extras): line.specifier for line in own}
    assert newest.keys() == {key for key in limited if key[0] != PROJECT["name"]}
    for key, specifiers in newest.items():
        assert {str(one) for one in specifiers} == {str(one) for one in limited[key] if one.operator == ">="}


def test_every_file_that_documents_about_the_project_name_exists() -> None:
    for document in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / ".github" / "pull_request_template.md"):
        text = document.read_text(encoding="utf-8")
        named = re.findall(r"(?<![\w/])(?:\.?[\w-]+/)+[\w.-]+\.(?:py|md|toml|yml)\b", text)
        linked = re.findall(r"\]\(([^):#]+)\)", text)
        assert [name for name in {*named, *linked} if not (ROOT / name).exists()] == [], document


CI = Path(__file__).parents[1] / ".ci"
LISTED: dict[str, Any] = tomllib.loads((CI / "mutants.toml").read_text(encoding="utf-8"))


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(CI), *sys.path])
    return importlib.import_module("mutations")


@pytest.mark.parametrize("entry", LISTED["equivalent"], ids=lambda entry: entry["before"][:60])
def test_equivalent_mutants_are_mutants_of_the_current_source(entry: dict[str, str], mutations: Any) -> None:
    """If the line of an entry has changed, the mutant must be judged again."""
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


DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"my_model": "models", "my_measure": "measures", "my_algorithm": "algorithms", "my_optimizers": "optimizers"}


def block_of(name: str, language: str) -> str:
    """Return the first block of code of a language in a document."""
    return (DOCS / name).read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


@pytest.mark.nightly
def test_custom_components_of_every_kind_work_from_a_dump_to_a_report(tmp_path: Path) -> None:
    for file, page in {**PAGES, "my_corpus": "corpora"}.items():
        (tmp_path / f"{file}.py").write_text(block_of(f"{page}.md", "python"))
    (tmp_path / "all.toml").write_text(block_of("extending.md", "toml"))
    subprocess.run([sys.executable, "-c", block_of("extending.md", "python")], cwd=tmp_path, check=True)
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    commands = [line.split() for line in re.findall(r"^    flsim (.*)$", text, re.MULTILINE)]
    by_name = {" ".join(command[:1]): command for command in commands if "--resume" not in command}
    place = Experiment(tmp_path)

    place.flsim(*by_name["data"])
    command = [sys.executable, "-m", "flsim", *by_name["run"]]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "runs" / "all"
    assert len(wait_for_round(run, 3)) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    changed = (tmp_path / "my_algorithm.py").read_text()
    (tmp_path / "my_algorithm.py").write_text(changed.replace("+ 1", "+ 2"))
    refused = place.flsim(*by_name["run"], "--resume", check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "was started with another version of" in refused.stderr
    (tmp_path / "my_algorithm.py").write_text(changed)
    (resume,) = (command for command in commands if "--resume" in command)
    place.flsim(*resume)
    place.flsim("run", "all.toml", "--out", "runs/whole")
    assert_same(run, tmp_path / "runs" / "whole")

    said = place.flsim(*by_name["table"]).stdout
    assert all(part in said for part in ("Counting+normalized", "TwistedGRU", "Surpr.")), said
    for name in ("plot", "report"):
        place.flsim(*by_name[name])
    assert (tmp_path / "all.png").stat().st_size > 10_000
    assert "Log-perplexity of a canary, per word that is not known." in (tmp_path / "all.html").read_text()
