"""A sweep's folder: what may be there, and what is said where something else is. Nothing is trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from flsim import cli
from flsim.base.errors import InputError
from flsim.results.sweeps import FILE, read_sweep, run_folders
from flsim.sweeps.definition import load, planned_runs
from flsim.sweeps.folder import SweepFolder, open_corpus, shared_settings

TABLE = Path(__file__).parents[2] / "experiments" / "table1.toml"

SMALL = """
title = "t"
question = "?"

[base]
canaries = { p_u = [0.2], p_e = [0.5], count = 4, length = 3 }

[[grids]]
name = "sgd"
axes = { "data.world" = ["iid", "non-iid"] }
set = { training = { kind = "central", steps = 10 } }

[[grids]]
name = "fedavg"
axes = { "data.world" = ["iid", "non-iid"] }
set = { training = { rounds = 1, cohort = 13 } }

[tiers.smoke]
about = "tiny"

[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """A sweep of which no run has begun."""
    made, definition = SweepFolder(tmp_path / "out"), load(TABLE)
    planned = planned_runs(definition, definition.tiers["smoke"], made.path / "corpus", str(TABLE))
    with made.hold_lock():
        made.write(TABLE, definition, "smoke", planned, "flsim sweep")
    return made


def test_where_a_sweep_cannot_be_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        (["--out", "file"], "no folder that can be written (File exists); name another --out"),
        (["--out", "mine"], "holds other things than a sweep; name a new folder with --out"),
        (["--set", "data.corpus=there"], "--set data.corpus: of a sweep that is for --corpus"),
    ):
        monkeypatch.setattr("sys.argv", ["flsim", "sweep", str(TABLE), *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        said = capsys.readouterr().err
        assert (stop.value.code, said.count("\n")) == (2, 1)
        assert message in said
        assert sorted(tmp_path.rglob("*")) == before


def test_a_heading_says_which_blocks_were_trained(folder: SweepFolder) -> None:
    definition, part = load(TABLE), SweepFolder(folder.path.with_name("part"))
    planned = planned_runs(definition, definition.tiers["smoke"], part.path / "corpus", str(TABLE), only=["sgd"])
    with part.hold_lock():
        part.write(TABLE, definition, "smoke", planned, "flsim sweep --only sgd")
    assert read_sweep(folder.path).heading == definition.title
    assert read_sweep(part.path).heading == f"{definition.title} (sgd only)"


def test_two_do_not_sweep_one_folder(folder: SweepFolder) -> None:
    with folder.hold_lock(), pytest.raises(InputError, match="another `flsim sweep` is at work"), folder.hold_lock():
        pass
    (folder.path / FILE).unlink()  # as where it was killed before it had written that
    with folder.hold_lock():
        pass


def test_only_a_sweeps_own_corpus_is_made(tmp_path: Path) -> None:
    tier = load(TABLE).tiers["smoke"]
    with pytest.raises(InputError, match="not a corpus"):
        open_corpus(tier, tmp_path / "mistyped" / "corpus", tmp_path / "out")
    assert open_corpus(tier, tmp_path / "corpus", tmp_path).path == tmp_path / "corpus"


def test_runs_of_a_grid_that_is_no_more_come_last(folder: SweepFolder) -> None:
    definition = load(TABLE)
    only = type(definition)("t", definition.grids[1:], definition.tiers)
    planned = planned_runs(definition, definition.tiers["smoke"], folder.path / "corpus", str(TABLE), only=["fedavg"])
    folder.write(TABLE, only, "smoke", planned, "flsim sweep")
    assert [run.grid for run in read_sweep(folder.path).runs] == ["fedavg"] * len(planned) + ["sgd"] * len(planned)


@pytest.mark.parametrize(
    ("key", "value"), [("axes", 3), ("published", "x"), ("seed", None), ("sessions", [3]), ("versions", 1), ("runs", 3)]
)
def test_a_damaged_description_is_named(folder: SweepFolder, key: str, value: object) -> None:
    about = json.loads((folder.path / FILE).read_text())
    (about if key in about else about["runs"][0])[key] = value
    (folder.path / FILE).write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"sweep\.json: does not describe a sweep; restore it"):
        read_sweep(folder.path)


def test_a_sweep_that_did_not_begin_has_no_run_folders(folder: SweepFolder) -> None:
    with pytest.raises(InputError, match="no run of this sweep has started"):
        run_folders([folder.path])


def small_sweep(path: Path, *overrides: str) -> SweepFolder:
    """Write the folder of the sweep SMALL with the planned runs of grid sgd, as `flsim sweep` writes it."""
    source, made = path / "small.toml", SweepFolder(path / "out")
    source.write_text(SMALL)
    definition = load(source)
    tier = definition.tiers["smoke"]
    with made.hold_lock():
        opened = open_corpus(tier, made.path / "corpus", made.path)
        planned = planned_runs(
            definition, tier, made.path / "corpus", str(source), only=["sgd"], overrides=list(overrides)
        )
        shared = shared_settings(definition, tier, overrides, opened.digest)
        made.write(source, definition, "smoke", planned, "flsim sweep small.toml --only sgd", shared=shared)
    return made


@pytest.mark.parametrize(
    ("before", "arguments", "edit", "message"),
    [
        ((), ["--set", "canaries.count=3"], ("", ""), "canaries.count = 4, and this command gives 3"),
        (("canaries.count=3",), [], ("", ""), "canaries.count = 3, and this command gives 4"),
        ((), ["--set", "model.units=7"], ("", ""), "model.units = 670, and this command gives 7"),
        ((), [], ("length = 3", "length = 4"), "canaries.length = 3, and this command gives 4"),
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
    made = small_sweep(tmp_path, *before)
    (tmp_path / "small.toml").write_text(SMALL.replace(*edit))
    monkeypatch.chdir(tmp_path)
    written = (made.path / FILE).read_bytes()
    capsys.readouterr()  # the making of the corpus
    monkeypatch.setattr("sys.argv", ["flsim", "sweep", "small.toml", "--out", "out", "--only", "fedavg", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    told = capsys.readouterr().err
    assert (stop.value.code, told.count("\n")) == (2, 1)
    assert f"{made.path}: its runs have {message}" in told
    assert "runs of one sweep share it: give the same, or name another --out" in told
    assert (made.path / FILE).read_bytes() == written


def test_another_corpus_is_not_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_sweep(tmp_path)
    tier = load(tmp_path / "small.toml").tiers["smoke"]
    open_corpus(tier, tmp_path / "other" / "corpus", tmp_path / "other", seed=1)
    monkeypatch.chdir(tmp_path)
    command = ["flsim", "sweep", "small.toml", "--out", "out", "--only", "fedavg", "--corpus", "other/corpus"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "its runs were trained on another corpus than this command names" in capsys.readouterr().err


def test_length_machines_seeds_and_grids_can_be_added_with_a_command_each(tmp_path: Path) -> None:
    made = small_sweep(tmp_path)
    definition = load(tmp_path / "small.toml")
    tier, corpus = definition.tiers["smoke"], made.path / "corpus"
    digest = open_corpus(tier, corpus, made.path).digest
    cases: list[tuple[str, dict[str, Any]]] = [
        ("longer", {"only": ["sgd"], "overrides": ["training.steps=20", "system.threads=2", "evaluation.every=5"]}),
        ("longer", {"only": ["sgd"], "overrides": ["training.steps=20"]}),
        ("seeds", {"only": ["sgd"], "seeds": [0, 1]}),
        ("fedavg", {"only": ["fedavg"], "overrides": ["model.units=670"]}),  # the default
    ]
    for command, options in cases:
        planned = planned_runs(definition, tier, corpus, str(tmp_path / "small.toml"), **options)
        shared = shared_settings(definition, tier, options.get("overrides", []), digest)
        made.write(tmp_path / "small.toml", definition, "smoke", planned, command, shared=shared)
    worlds = ["iid", "non-iid"]
    assert list(read_sweep(made.path).commands) == [
        ("flsim sweep small.toml --only sgd", [f"sgd-{world}-seed0" for world in worlds]),
        ("longer", []),
        ("seeds", [f"sgd-{world}-seed1" for world in worlds]),
        ("fedavg", [f"fedavg-{world}-seed0" for world in worlds]),
    ]


def test_a_folder_of_an_older_version_takes_runs_as_before(tmp_path: Path) -> None:
    made = small_sweep(tmp_path)
    about = json.loads((made.path / FILE).read_text())
    del about["shared"], about["commands"]
    (made.path / FILE).write_text(json.dumps(about))
    definition, source = load(tmp_path / "small.toml"), tmp_path / "small.toml"
    tier, more = definition.tiers["smoke"], ["canaries.count=3"]
    planned = planned_runs(definition, tier, made.path / "corpus", str(source), only=["fedavg"], overrides=more)
    shared = shared_settings(definition, tier, more, "digest")
    made.write(source, definition, "smoke", planned, "flsim sweep --only fedavg", shared=shared)
    first, second = read_sweep(made.path).commands
    assert first[0] == "flsim sweep small.toml --only sgd"
    assert second == ("flsim sweep --only fedavg", [run.name for run in planned])
