"""The help of every command: examples, panels, whole sentences, 80 columns, and pages of docs/ that are current."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import typer
from helpers import Flsim
from rich.text import Text

from flsim.cli import app
from flsim.cli.options import PANELS
from flsim.models.language_model import LoraHParams
from flsim.runs.config import CentralConfig, DataHParams, FederatedConfig
from flsim.runs.config.files import Section, sections

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command by its path, groups included."""
    yield path, command
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from commands(part, (*path, name))


COMMANDS = dict(commands(GROUP))


def name_of(path: tuple[str, ...]) -> str:
    return " ".join(("flsim", *path))


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_help_has_an_example_and_fits_80_columns(path: tuple[str, ...], flsim: Flsim) -> None:
    code, out, err = flsim(*path, "--help")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    example = name_of(path) if path else "flsim demo"
    assert re.search(rf"(Example|Start with): .*{example}", out)
    for parameter in COMMANDS[path].params:
        text = getattr(parameter, "help", None) or ""
        assert re.fullmatch(r"[A-Z].*\.", text), (parameter.name, text)
        assert Text.from_markup(text).plain == text  # brackets would be read as markup


def test_the_first_page_groups_all_commands_and_fits_a_terminal(flsim: Flsim) -> None:
    _, out, _ = flsim("--help")
    lines = out.splitlines()
    assert len(lines) <= 50
    assert [match[1] for line in lines if (match := re.match(r"╭─ ([\w ]+?) ─", line))] == ["Options", *PANELS]
    assert {path[0] for path in COMMANDS if path} == set(re.findall(r"^│ (\w+) ", out, re.MULTILINE))


def test_version_names_the_main_packages_without_importing_them(flsim: Flsim) -> None:
    code, out, _ = flsim("--version")
    assert (code, out.splitlines()[0]) == (0, f"flsim {version('flsim-memorization')}")
    assert f"torch {version('torch')}" in out
    loads = "import sys, flsim.cli as cli; cli._version('torch'); print({'flwr', 'ray', 'torch'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", loads], text=True, cwd=ROOT) == "set()\n"


def test_the_pages_that_are_made_from_the_code_are_current() -> None:
    """Where this fails, run: python .ci/reference.py."""
    for page, text in runpy.run_path(str(ROOT / ".ci" / "reference.py"))["documents"]().items():
        assert page.read_text(encoding="utf-8") == text, page


SECTIONS = sections()
DATA = DataHParams(Path("corpus"))


def keys_of(listed: list[Section]) -> set[str]:
    return {f"{section.name}.{setting.name}" for section in listed for setting in section.settings}


@pytest.mark.parametrize(("kind", "config"), [("federated", FederatedConfig(DATA)), ("central", CentralConfig(DATA))])
def test_all_keys_of_a_configuration_are_listed(kind: str, config: FederatedConfig | CentralConfig) -> None:
    values = asdict(config)
    values["model.lora"] = asdict(LoraHParams())
    del values["model"]["lora"]
    keys = {f"{name}.{key}" for name, section in values.items() if isinstance(section, dict) for key in section}
    assert keys_of([section for section in SECTIONS if section.kind in ("", kind)]) == keys | {".seed"}


def test_every_setting_has_whole_sentences_and_every_number_a_unit() -> None:
    for section in SECTIONS:
        for setting in section.settings:
            assert re.fullmatch(r'["A-Z].*\.', setting.description), setting
            assert "Unit:" not in setting.description, setting
            assert not setting.unit.endswith("."), setting
    numbers = [key for section in SECTIONS for key in section.settings if re.search("integer|number", key.type)]
    without = {key.name for key in numbers if not key.unit and not key.name.endswith("_options")}
    names = """seed options config alpha max_epsilon clip_learning_rate learning_rate momentum proximal weight_decay
    server_learning_rate server_momentum server_beta2 server_tau milestone_factor server_milestone_factor"""
    assert without == {*names.split(), "windows", "injections"}  # fractions of training, or rounds


def test_the_list_fits_80_columns_and_can_be_of_one_section_or_setting(flsim: Flsim) -> None:
    _, whole, _ = flsim("settings")
    assert max(map(len, whole.splitlines())) <= 80
    _, section, _ = flsim("settings", "model")
    assert section in whole
    assert "[model]: architectures" in section
    _, setting, _ = flsim("settings", "training.cohort")
    assert "cohort" in setting
    assert "server_optimizer" not in setting


def test_an_unknown_name_is_refused_with_a_close_one(flsim: Flsim) -> None:
    code, out, err = flsim("settings", "training.round")
    assert (code, out) == (2, "")
    assert err == "flsim: training.round: no such section or setting; did you mean training.rounds?\n"


@pytest.mark.parametrize(("words", "completed"), [("flsim swe", "sweep"), ("flsim sweep --ti", "--tier")])
def test_tab_completes_commands_and_options(words: str, completed: str) -> None:
    """The script for bash, which `_FLSIM_COMPLETE=source_bash flsim` prints, asks in this way."""
    asked = {"_FLSIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = Path(sys.executable).parent / "flsim"
    done = subprocess.run([script], env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (completed, "")
