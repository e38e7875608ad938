"""Tests of a sweep's folder: what may be in this folder, and what is refused. No test trains."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_refused

from flsim.base.errors import InputError
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.results.sweeps import FILE, read_sweep
from flsim.runs.sweeps.definition import Planned, load, planned_runs
from flsim.runs.sweeps.folder import SweepFolder, open_corpus, refuse_impossible_runs, shared_settings

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
    """Write the sweep SMALL with the planned runs of grid sgd, as `flsim sweep` does; no run has begun."""
    path = tmp_path_factory.mktemp("written")
    (path / "small.toml").write_text(SMALL)
    made = SweepFolder(path / "out")
    with made.hold_lock():
        add(made, "flsim sweep small.toml --only sgd", only=["sgd"])
    return made


@pytest.fixture
def folder(written: SweepFolder, tmp_path: Path) -> SweepFolder:
    """Return a copy of the written sweep, which a test may change."""
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


def test_an_unusable_folder_is_refused_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for arguments, message in (
        (["--out", "file"], "this folder cannot be written (File exists); name another --out"),
        (["--out", "mine"], "this folder has files that do not belong to a sweep; name a new folder with --out"),
        (["--set", "data.corpus=there"], "--set data.corpus: in a sweep, use --corpus"),
    ):
        assert_refused(tmp_path, ["sweep", "small.toml", *arguments], message)


def test_a_shorter_sweep_is_refused_before_anything_is_written(folder: SweepFolder) -> None:
    (planned,) = add(folder, "flsim sweep", only=["sgd"], overrides=["training.steps=10"])[:1]
    run = folder.run(planned.name)
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"round": 11}))
    train = open_corpus(load(folder.path.parent / "small.toml").tiers["smoke"], folder.path / "corpus", folder.path)
    with pytest.raises(InputError, match="11 rounds are trained already, and this command has 10; a run can only"):
        folder.refuse_shorter([planned], train.split("train"))


def test_a_heading_names_the_grids_that_were_trained(folder: SweepFolder) -> None:
    assert read_sweep(folder.path).heading == "t (sgd only)"
    add(folder, "flsim sweep")
    assert read_sweep(folder.path).heading == "t"


def test_a_second_sweep_of_one_folder_is_refused(folder: SweepFolder) -> None:
    with (
        folder.hold_lock(),
        pytest.raises(InputError, match="another `flsim sweep` uses this folder"),
        folder.hold_lock(),
    ):
        pass
    (folder.path / FILE).unlink()  # as after a sweep that was killed before it wrote this file
    with folder.hold_lock():
        pass


def test_a_sweep_makes_only_the_corpus_in_its_folder(folder: SweepFolder, tmp_path: Path) -> None:
    tier = load(tmp_path / "small.toml").tiers["smoke"]
    with pytest.raises(InputError, match="not a corpus"):
        open_corpus(tier, tmp_path / "mistyped" / "corpus", folder.path)
    assert open_corpus(tier, tmp_path / "corpus", tmp_path).path == tmp_path / "corpus"


def test_runs_of_a_removed_grid_come_last(folder: SweepFolder, tmp_path: Path) -> None:
    planned = add(folder, "flsim sweep")
    definition = load(tmp_path / "small.toml")
    only = replace(definition, grids=definition.grids[1:])
    folder.write(tmp_path / "small.toml", only, "smoke", planned[2:], "flsim sweep")
    assert [run.grid for run in read_sweep(folder.path).runs] == ["fedavg"] * 2 + ["sgd"] * 2


@pytest.mark.parametrize(("key", "value"), [("axes", 3), ("seed", None), ("sessions", [3])])
def test_a_damaged_description_is_named(folder: SweepFolder, key: str, value: object) -> None:
    about = json.loads((folder.path / FILE).read_text())
    (about if key in about else about["runs"][0])[key] = value
    (folder.path / FILE).write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"sweep\.json: does not describe a sweep; restore it"):
        read_sweep(folder.path)


def test_runs_with_other_settings_or_another_corpus_are_not_added(folder: SweepFolder, tmp_path: Path) -> None:
    tier = load(tmp_path / "small.toml").tiers["smoke"]
    open_corpus(tier, tmp_path / "other" / "corpus", tmp_path / "other", seed=1)
    command = ["sweep", "small.toml", "--out", "out", "--only", "fedavg"]
    for arguments, edit, message in (
        (["--set", "canaries.count=3"], ("", ""), "canaries.count = 4, and this command has 3"),
        ([], ("about =", "set = { canaries = { p_e = [1.0] } }\nabout ="), "canaries.p_e = [0.5], and this"),
        (["--corpus", "other/corpus"], ("", ""), "its runs were trained on another corpus than that of this command"),
    ):
        (tmp_path / "small.toml").write_text(SMALL.replace(*edit))
        assert_refused(tmp_path, [*command, *arguments], message)


def test_lengths_seeds_and_grids_can_be_added_and_each_command_is_listed_with_its_runs(folder: SweepFolder) -> None:
    longer = ["training.steps=20", "system.threads=2", "evaluation.every=5"]
    add(folder, "longer", only=["sgd"], overrides=longer)
    add(folder, "longer", only=["sgd"], overrides=["training.steps=20"])
    add(folder, "seeds", only=["sgd"], seeds=[0, 1])
    add(folder, "fedavg", only=["fedavg"], overrides=["model.units=670"])  # the default
    partitions = ["iid", "non-iid"]
    assert [tuple(command.values()) for command in read_sweep(folder.path).commands] == [
        ("flsim sweep small.toml --only sgd", [f"sgd-{partition}-seed0" for partition in partitions]),
        ("longer", []),
        ("seeds", [f"sgd-{partition}-seed1" for partition in partitions]),
        ("fedavg", [f"fedavg-{partition}-seed0" for partition in partitions]),
    ]


def test_runs_can_be_added_to_a_folder_of_an_older_version(folder: SweepFolder) -> None:
    about = json.loads((folder.path / FILE).read_text())
    del about["shared"], about["commands"]
    (folder.path / FILE).write_text(json.dumps(about))
    planned = add(folder, "flsim sweep --only fedavg", only=["fedavg"], overrides=["canaries.count=3"])
    first, second = read_sweep(folder.path).commands
    assert first["command"] == "flsim sweep small.toml --only sgd"
    assert second == {"command": "flsim sweep --only fedavg", "runs": [run.name for run in planned]}


SWEEP = """
title = "t"
[base]
canaries = { p_u = [0.1], p_e = [0.5], count = 4 }
[[grids]]
name = "fedavg"
axes = { "data.partition" = ["iid", "non-iid"] }
set = { training = { rounds = 1, cohort = 4 } }
[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 600 }
[tiers.smoke.set]
"""
TUNE = """
sweep = "sweep.toml"
seeds = [7]
[tiers.smoke.grids.fedavg]
"local.learning_rate" = { low = 0.1, high = 10.0 }
"""
REFERENCES = "evaluation.references=99999999999999"
COHORT = "training.cohort=13"
IMPOSSIBLE = {
    REFERENCES: "fedavg-iid-seed0: evaluation.references = 99,999,999,999,999 needs",
    "model.embedding=1000000000": "set a smaller model.embedding or model.units",
    "canaries.count=1000": "1,000 canaries would replace about 7,200 records, and the training users have 144",
    COHORT: "fedavg-iid-seed0: cohort must be between 1 and the 12 users, found 13",
}


@pytest.mark.parametrize(("setting", "message"), IMPOSSIBLE.items())
def test_a_sweep_is_refused_before_its_corpus_is_made(tmp_path: Path, setting: str, message: str) -> None:
    """12 users with 60 words have at most 12 records of 5 words each: 144. A canary expects 0.1 x 0.5 of them: 7.2."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    assert_refused(tmp_path, ["sweep", "sweep.toml", "--set", setting], message)


def test_a_sweep_over_a_corpus_is_refused_before_it_has_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    sizes = SyntheticHParams(users=12, test_users=2, heldout_users=0, words_per_user=60, vocabulary_size=600)
    make_synthetic(tmp_path / "mine", sizes, 0)
    for setting in (REFERENCES, COHORT):
        arguments = ("sweep.toml", "--corpus", "mine", "--set", setting)
        assert_refused(tmp_path, ["sweep", *arguments], IMPOSSIBLE[setting])
        assert_refused(tmp_path, ["plan", "--no-calibration", *arguments], IMPOSSIBLE[setting])


def test_a_search_is_refused_before_its_corpus_is_made(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP + REFERENCES)
    (tmp_path / "tune.toml").write_text(TUNE)
    assert_refused(tmp_path, ["tune", "tune.toml"], "evaluation.references = 99,999")


def test_the_memory_of_this_machine_does_not_bound_runs_on_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    definition = load(tmp_path / "sweep.toml")
    tier = definition.tiers["smoke"]
    planned = planned_runs(definition, tier, tmp_path / "corpus", str(tmp_path / "sweep.toml"), overrides=[REFERENCES])
    assert tier.corpus.synthetic
    refuse_impossible_runs(planned, tier.corpus.synthetic, is_trained_here=False)
