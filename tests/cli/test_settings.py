"""The list of settings: all keys, each with a sentence, and each number with a unit."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers import Flsim

from flsim.cli.settings import marked
from flsim.runs.config import CentralConfig, DataHParams, FederatedConfig
from flsim.runs.config.listing import Section, architectures, sections

SECTIONS = sections()
DATA = DataHParams(Path("corpus"))


def keys_of(listed: list[Section]) -> set[str]:
    return {f"{section.name}.{setting.name}" for section in listed for setting in section.settings}


@pytest.mark.parametrize(("kind", "config"), [("federated", FederatedConfig(DATA)), ("central", CentralConfig(DATA))])
def test_all_keys_of_a_configuration_are_listed(kind: str, config: FederatedConfig | CentralConfig) -> None:
    values = asdict(config)
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
    assert without == {
        *("seed", "options", "clip_learning_rate", "learning_rate", "momentum", "proximal", "weight_decay"),
        *("server_learning_rate", "server_momentum", "server_beta2", "server_tau"),
        *("milestone_factor", "server_milestone_factor"),
        *("windows", "injections"),  # fractions of training, or rounds
    }


def test_types_defaults_and_choices_follow_from_the_code() -> None:
    keys = {(section.kind, section.name, key.name): key for section in SECTIONS for key in section.settings}
    assert (keys["", "data", "corpus"].type, keys["", "data", "corpus"].default) == ("text", "required")
    assert keys["", "canaries", "p_e"].default == "[0.01, 0.1, 1]"
    assert keys["", "evaluation", "decide"].type == "true or false"
    assert keys["", "evaluation", "test_users"].default == "not set"
    assert keys["federated", "evaluation", "every"].default == "100"
    assert keys["central", "evaluation", "every"].default == "10000"
    assert keys["central", "training", "order"].description.endswith("One of: iid, sequence.")
    assert keys["federated", "local", "optimizer"].description.endswith("or your own as path/to/file.py:NAME.")


def test_the_list_fits_80_columns_and_can_be_of_one_section_or_setting(flsim: Flsim) -> None:
    _, whole, _ = flsim("settings")
    assert max(map(len, whole.splitlines())) <= 80
    _, section, _ = flsim("settings", "model")
    assert section in whole
    assert all(network.name in section for network in architectures())
    _, setting, _ = flsim("settings", "training.cohort")
    assert "cohort" in setting
    assert "server_optimizer" not in setting


def test_parameters_are_those_of_the_network() -> None:
    """The CIFG of Thakkar et al. (2020): E [V, D], two weights [D, 3H], a bias [3H], P [H, D] and a bias [V]."""
    size, width, units = 10_000, 96, 670
    cifg = architectures()[0]
    assert cifg.parameters == size * width + 2 * width * 3 * units + 3 * units + units * width + size
    assert {network.name: network.sizes for network in architectures()} == {
        "cifg": ("embedding", "units"),
        "lstm": ("embedding", "units", "layers"),
        "gru": ("embedding", "units", "layers"),
        "transformer": ("embedding", "units", "layers", "heads"),
        "convolutional": ("embedding", "units", "layers", "filter_width"),
    }


def test_an_unknown_name_is_refused_with_a_close_one(flsim: Flsim) -> None:
    code, out, err = flsim("settings", "training.round")
    assert (code, out) == (2, "")
    assert err == "flsim: training.round: neither a section nor a setting; did you mean training.rounds?\n"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Folder, e.g. runs/iid; with --resume an old one.", "Folder, e.g. `runs/iid`; with `--resume` an old one."),
        ("Number |R| of references (training.kind).", r"Number \|R\| of references (`training.kind`)."),
        ("Each pair of p_u and p_e, or [0.5, 0.6].", r"Each pair of `p_u` and `p_e`, or \[0.5, 0.6\]."),
        ('"iid" trains on s3://bucket/corpus.', '"iid" trains on `s3://bucket/corpus`.'),
    ],
)
def test_a_sentence_of_the_help_is_markdown_with_values_as_code(text: str, written: str) -> None:
    assert marked(text) == written
