"""A sweep's folder: what may be there, and what is said where something else is. Nothing is trained."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_refused

from flsim.base.errors import InputError
from flsim.results.sweeps import FILE, read_sweep
from flsim.runs.sweeps.definition import Planned, load, planned_runs
from flsim.runs.sweeps.folder import SweepFolder, open_corpus, shared_settings

SMALL = """
title = "t"
question = "?"

[base]
canaries = { p_u = [0.2], p_e = [0.5], count = 4, length = 3 }

[[grids]]
name = "sgd"
axes = { "data.partition" = ["iid", "non-iid"] }
set = { training = { kind = "central", steps = 10 } }

[[grids]]
name = "fedavg"
axes = { "data.partition" = ["iid", "non-iid"] }
set = { training = { rounds = 1, cohort = 12 } }

[tiers.smoke]
about = "tiny"

[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """The sweep SMALL with the planned runs of grid sgd, as `flsim sweep` writes it; no run has begun."""
    return small_sweep(tmp_path_factory.mktemp("written"))


@pytest.fixture
def folder(written: SweepFolder, tmp_path: Path) -> SweepFolder:
    """A copy of it, which a test may change."""
    shutil.copytree(written.path.parent, tmp_path, dirs_exist_ok=True)
    return SweepFolder(tmp_path / "out")


def add(folder: SweepFolder, command: str, **options: Any) -> list[Planned]:
    """Add runs to the folder as `flsim sweep` does, and return them."""
    source = folder.path.parent / "small.toml"
    definition = load(source)
    tier, corpus = definition.tiers["smoke"], folder.path / "corpus"
    planned = planned_runs(definition, tier, corpus, str(source), **options)
    digest = open_corpus(tier, corpus, folder.path).digest
    settings = shared_settings(definition, tier, options.get("overrides", ()), digest)
    folder.write(source, definition, "smoke", planned, command, shared=settings)
    return planned


def small_sweep(path: Path, *overrides: str) -> SweepFolder:
    (path / "small.toml").write_text(SMALL)
    made = SweepFolder(path / "out")
    with made.hold_lock():
        add(made, "flsim sweep small.toml --only sgd", only=["sgd"], overrides=list(overrides))
    return made


def test_where_a_sweep_cannot_be_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for arguments, message in (
        (["--out", "file"], "this folder cannot be written (File exists); name another --out"),
        (["--out", "mine"], "this folder has files that do not belong to a sweep; name a new folder with --out"),
        (["--set", "data.corpus=there"], "--set data.corpus: in a sweep, use --corpus"),
    ):
        assert_refused(tmp_path, monkeypatch, capsys, ["sweep", "small.toml", *arguments], message)


def test_a_heading_names_the_grids_that_were_trained(folder: SweepFolder) -> None:
    assert read_sweep(folder.path).heading == "t (sgd only)"
    add(folder, "flsim sweep")
    assert read_sweep(folder.path).heading == "t"


def test_two_do_not_sweep_one_folder(folder: SweepFolder) -> None:
    with (
        folder.hold_lock(),
        pytest.raises(InputError, match="another `flsim sweep` uses this folder"),
        folder.hold_lock(),
    ):
        pass
    (folder.path / FILE).unlink()  # as where it was killed before it had written that
    with folder.hold_lock():
        pass


def test_only_a_sweeps_own_corpus_is_made(folder: SweepFolder, tmp_path: Path) -> None:
    tier = load(tmp_path / "small.toml").tiers["smoke"]
    with pytest.raises(InputError, match="not a corpus"):
        open_corpus(tier, tmp_path / "mistyped" / "corpus", folder.path)
    assert open_corpus(tier, tmp_path / "corpus", tmp_path).path == tmp_path / "corpus"


def test_runs_of_a_grid_that_is_no_more_come_last(folder: SweepFolder, tmp_path: Path) -> None:
    planned = add(folder, "flsim sweep")
    definition = load(tmp_path / "small.toml")
    only = replace(definition, grids=definition.grids[1:])
    folder.write(tmp_path / "small.toml", only, "smoke", planned[2:], "flsim sweep")
    assert [run.grid for run in read_sweep(folder.path).runs] == ["fedavg"] * 2 + ["sgd"] * 2


@pytest.mark.parametrize(
    ("key", "value"), [("axes", 3), ("published", "x"), ("seed", None), ("sessions", [3]), ("versions", 1), ("runs", 3)]
)
def test_a_damaged_description_is_named(folder: SweepFolder, key: str, value: object) -> None:
    about = json.loads((folder.path / FILE).read_text())
    (about if key in about else about["runs"][0])[key] = value
    (folder.path / FILE).write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"sweep\.json: does not describe a sweep; restore it"):
        read_sweep(folder.path)


@pytest.mark.parametrize(
    ("before", "arguments", "edit", "message"),
    [
        ((), ["--set", "canaries.count=3"], ("", ""), "canaries.count = 4, and this command has 3"),
        (("canaries.count=3",), [], ("", ""), "canaries.count = 3, and this command has 4"),
        ((), [], ("about =", "set = { canaries = { p_e = [1.0] } }\nabout ="), "canaries.p_e = [0.5], and this"),
    ],
)
def test_runs_with_other_settings_are_not_added(
    before: tuple[str, ...],
    arguments: list[str],
    edit: tuple[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small_sweep(tmp_path, *before)
    (tmp_path / "small.toml").write_text(SMALL.replace(*edit))
    capsys.readouterr()  # the making of the corpus
    command = ["sweep", "small.toml", "--out", "out", "--only", "fedavg", *arguments]
    assert_refused(tmp_path, monkeypatch, capsys, command, f"out: its runs have {message}")


def test_another_corpus_is_not_added(
    folder: SweepFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = load(tmp_path / "small.toml").tiers["smoke"]
    open_corpus(tier, tmp_path / "other" / "corpus", tmp_path / "other", seed=1)
    capsys.readouterr()  # the making of the corpus
    command = ["sweep", "small.toml", "--out", "out", "--only", "fedavg", "--corpus", "other/corpus"]
    message = "its runs were trained on another corpus than that of this command"
    assert_refused(tmp_path, monkeypatch, capsys, command, message)


def test_length_machines_seeds_and_grids_can_be_added_with_a_command_each(folder: SweepFolder) -> None:
    longer = ["training.steps=20", "system.threads=2", "evaluation.every=5"]
    add(folder, "longer", only=["sgd"], overrides=longer)
    add(folder, "longer", only=["sgd"], overrides=["training.steps=20"])
    add(folder, "seeds", only=["sgd"], seeds=[0, 1])
    add(folder, "fedavg", only=["fedavg"], overrides=["model.units=670"])  # the default
    partitions = ["iid", "non-iid"]
    assert list(read_sweep(folder.path).commands) == [
        ("flsim sweep small.toml --only sgd", [f"sgd-{partition}-seed0" for partition in partitions]),
        ("longer", []),
        ("seeds", [f"sgd-{partition}-seed1" for partition in partitions]),
        ("fedavg", [f"fedavg-{partition}-seed0" for partition in partitions]),
    ]


def test_a_folder_of_an_older_version_takes_runs_as_before(folder: SweepFolder) -> None:
    about = json.loads((folder.path / FILE).read_text())
    del about["shared"], about["commands"]
    (folder.path / FILE).write_text(json.dumps(about))
    planned = add(folder, "flsim sweep --only fedavg", only=["fedavg"], overrides=["canaries.count=3"])
    first, second = read_sweep(folder.path).commands
    assert first[0] == "flsim sweep small.toml --only sgd"
    assert second == ("flsim sweep --only fedavg", [run.name for run in planned])
