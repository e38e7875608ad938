"""Experiments load; documents name only files, commands, options and settings that exist; marked commands run."""

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import click
import pytest
import typer
from documents import (
    NOT_RUN,
    ROOT,
    RUNS,
    RUNS_IN,
    SAVED_AS,
    WHOLE_PAGE,
    Block,
    blocks_of,
    commands_of,
    inline_commands,
    written_documents,
)
from helpers import Flsim
from power.resuming import without_ray
from runs.test_config import train_split

import flsim
from flsim.base.errors import InputError
from flsim.cli import app
from flsim.runs.config import load, toml

RUN_FILES = [path for path in sorted((ROOT / "experiments").glob("*.toml")) if "tiers" not in toml.read(path)]
DOCUMENTS = written_documents()
SHELL = [block for document in DOCUMENTS for block in blocks_of(document) if block.is_shell]
DIRECTIVES = {"index.md": {"{toctree}"}, "developers.md": {"{toctree}"}, "api.md": {"{eval-rst}"}}  # by page


def by_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", RUN_FILES, ids=by_name)
def test_every_experiment_loads(path: Path) -> None:
    assert load(path).rounds_over(train_split(1_000, 50)) > 0


def test_every_file_that_the_documents_name_exists() -> None:
    for document in [*DOCUMENTS, ROOT / "deploy" / "README.md", ROOT / "deploy" / "flower" / "README.md"]:
        text = document.read_text(encoding="utf-8")
        linked = [document.parent / name for name in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text)]
        named = [ROOT / name for name in re.findall(r"\b(?:experiments/[\w-]+\.toml|tests/[\w/]+\.py)", text)]
        assert [path for path in [*linked, *named] if not path.exists()] == [], document


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_block_of_commands_runs_or_has_a_reason(block: Block) -> None:
    """A block runs in this file, or in the test file that its mark names and that names the page, or has a reason."""
    if block.mark.startswith(RUNS_IN):
        tests = (ROOT / block.mark.removeprefix(RUNS_IN)).read_text(encoding="utf-8")
        assert f'"{block.document.name}"' in tests
    else:
        reason = block.mark.removeprefix(NOT_RUN).removeprefix(WHOLE_PAGE)
        assert block.mark == RUNS or reason not in ("", block.mark), "put <!-- runs --> or <!-- not run: why --> above"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_in_blocks_are_ones_that_exist(block: Block) -> None:
    """The real command line parses each command with its options; the configuration that it names has its settings."""
    check_commands(block)


@pytest.mark.parametrize(
    "text",
    [
        "flsim unheard-of",
        "for partition in mars iid; do\n    flsim run experiments/demo.toml --set data.partition=$partition\ndone",
        "X=1 make unheard-of",
        "python -m flsim.unheard_of",
    ],
)
def test_wrong_commands_are_refused(text: str) -> None:
    with pytest.raises((AssertionError, click.UsageError, InputError)):
        check_commands(Block(ROOT / "README.md", 1, "sh", text, RUNS))


def check_commands(block: Block) -> None:
    """Raise an error if a command, target, extra, module or file that a block names does not exist."""
    for program, *words in commands_of(block):
        if program == "flsim":
            command, rest = resolve(words)
            with command.make_context("flsim", rest) as context:
                refuse_unknown_settings(context.params)
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in words if "=" not in word} <= set(targets)
        elif program == "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = ",".join(re.findall(r"\[([\w,-]+)\]", " ".join(words))).split(",")
            assert {*named} - {""} <= extras.keys()
        elif program in {"python", "pytest", ".venv/bin/python"}:
            if words[0] == "-m":
                assert importlib.util.find_spec(words[1]), words
            assert [word for word in words if re.match(r"(\.ci|tests)/", word) and not (ROOT / word).exists()] == []


def refuse_unknown_settings(arguments: dict[str, object]) -> None:
    """Raise an error for settings that a configuration does not have, and for tiers that a sweep does not have."""
    path = ROOT / str(arguments.get("config") or arguments.get("file") or "")
    if path.name == "CONFIG":  # a configuration of the reader
        path = ROOT / "experiments" / "demo.toml"
    if path.suffix != ".toml" or path.parent != ROOT / "experiments":
        return
    if "tiers" in toml.read(path):
        assert arguments["tier"] in toml.read(path)["tiers"]
    else:
        load(path, arguments.get("set_") or ())  # type: ignore[arg-type]


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_commands_in_sentences_are_ones_that_exist(document: Path) -> None:
    """A sentence may omit arguments, but names only commands and options that exist."""
    for words in inline_commands(document):
        command, rest = resolve(words[1:])
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= options | {"--help", "--version"}, words


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that the first words name, and the words after the name."""
    command = root_command()
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    return command, words


@cache
def root_command() -> click.Command:
    return typer.main.get_command(app)


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\.\. auto\w+:: flsim\.(\w+)$", page, re.MULTILINE)) == sorted(flsim.__all__)


@pytest.mark.slow
def test_the_site_is_built_strictly_and_its_pages_fetch_nothing(tmp_path: Path) -> None:
    """Pages load nothing from other hosts; only links, which a reader follows, may lead to other hosts."""
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-d", str(tmp_path / ".doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(DOCUMENTS)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:link|script|img|iframe)\b[^>]*?\b(?:href|src)=\"?([^\"\s>]+)", text)
        assert len(fetched) > 3
        assert [address for address in fetched if re.match(r"(https?:)?//", address)] == [], page.name
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_pages_are_plain_markdown(document: Path) -> None:
    """Pages have directives only for the navigation, and for the reference of Python names."""
    directives = {block.language for block in blocks_of(document) if block.language.startswith("{")}
    assert directives <= DIRECTIVES.get(document.name, set())


def test_prose_against_the_rules_is_found() -> None:
    """`.ci/prose.py` finds violations on pages, and in docstrings, comments and messages of code."""
    findings = runpy.run_path(str(ROOT / ".ci" / "prose.py"))["findings_in"]
    page = [
        "A thing beside `where 1 2 3`.",
        "<!-- beside -->",
        "",
        "The values are 1, 2 and 3.",
        "",
        "word " * 31 + ".",
    ]
    code = [
        '"""Return a value beside `beside`."""',
        "value = 1  # where it is set",
        "raise ValueError('one two {value} is left')",
    ]
    found = [*findings(ROOT / "docs" / "page.md", "\n".join(page), 20)]
    found += findings(ROOT / "flsim" / "file.py", "\n".join(code), None)
    places = [*(f"docs/page.md:{line}" for line in (1, 1, 4, 6)), *(f"flsim/file.py:{line}" for line in (1, 2, 3))]
    assert sorted(line.partition(": ")[0] for line in found) == places


def test_every_command_has_a_guide() -> None:
    """The page of the command line names, for each command, a page that contains this command."""
    guides = runpy.run_path(str(ROOT / ".ci" / "reference.py"))["GUIDES"]
    assert guides.keys() == {" ".join(path[1:]) for path in paths_of(root_command(), ("flsim",))}
    for command, page in guides.items():
        assert f"flsim {command}" in (ROOT / "docs" / page).read_text(encoding="utf-8"), command


def paths_of(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield path
        return
    for name, child in command.commands.items():
        yield from paths_of(child, (*path, name))


# The blocks of a page that are marked to run are executed in order, in a new folder for each page.
#
# Commands run in this process. Runs also train and evaluate in this process, without Ray
# (`power.resuming.without_ray`), and for fewer rounds than on the page.

SLOW = {"tutorial-language-model.md"}
PAGES = [
    pytest.param(path, marks=pytest.mark.slow if path.name in SLOW else (), id=path.name)
    for path in written_documents()
    if any(block.mark == RUNS for block in blocks_of(path))
]
DEMO = "flsim demo --out runs/demo"
SMALL = ("canaries.count=1", "training.cohort=8", "evaluation.every_epochs=0.04", "evaluation.references=100")
SHORTER: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "count=12": "count=1",
        "cohort=20": "cohort=8",
        "rounds=200": "rounds=2",
        "every=200": "every=2",
        "20_000": "100",
    },
    "first-run.md": {
        DEMO: f"{DEMO} --set training.rounds=4 {' '.join(f'--set {setting}' for setting in SMALL)}",
        "round-000200": "round-000004",
        "c43": "c3",
        "--round 200": "--round 4",
        "--also space": "--also space --samples 20 --nodes 20",
    },
    "dp.md": {
        "--rounds 7840": "--rounds 100",
        "--epsilon 8 --delta 1e-5 --sampler poisson": "--epsilon 8 --delta 1e-5 --sampler fixed-size",
        "--rounds 300": "--rounds 30",
    },
    "dp-ftrl.md": {"--rounds 160": "--rounds 20", "--epsilon 8": "--noise-multiplier 4.5"},
    "participation.md": {
        "--rounds 160 --epsilon 8": "--rounds 16 --noise-multiplier 1",
        "seed=0)": "seed=0, users=60)",
    },
    "tutorial-language-model.md": {"epochs = 3": "epochs = 1", "rounds = 40": "rounds = 4", "every = 20": "every = 2"},
    "own-data.md": {"rounds = 40": "rounds = 4", "every = 20": "every = 2", "references = 2000": "references = 100"},
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flsim: Flsim) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "experiments", "experiments")
    shorter = dict(SHORTER.get(page.name, {}))
    used = set()
    for block in blocks_of(page):
        if block.mark != RUNS and not block.mark.startswith(SAVED_AS):
            continue
        text = block.text
        for old, new in shorter.items():
            used |= {old} if old in text else set()
            text = text.replace(old, new)
        if block.mark.startswith(SAVED_AS):
            Path(block.mark.removeprefix(SAVED_AS)).write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(text, str(block), "exec"), {"__name__": "__main__"})
        else:
            for command in commands_of(type(block)(block.document, block.line, "sh", text, RUNS)):
                assert command[0] == "flsim", command
                with without_ray():
                    code, _, err = flsim(*command[1:])
                assert code == 0, err
    assert used == set(shorter)
