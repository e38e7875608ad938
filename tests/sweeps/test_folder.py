"""A sweep's folder: what may be there, and what is said where something else is. Nothing is trained."""

import json
from pathlib import Path

import pytest

from flsim import cli
from flsim.base.errors import InputError
from flsim.results.sweeps import FILE, read_sweep, run_folders
from flsim.sweeps.definition import load, planned_runs
from flsim.sweeps.folder import SweepFolder, open_corpus

TABLE = Path(__file__).parents[2] / "experiments" / "table1.toml"


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
    only = type(definition)("t", "q", definition.grids[1:], definition.tiers)
    planned = planned_runs(definition, definition.tiers["smoke"], folder.path / "corpus", str(TABLE), only=["fedavg"])
    folder.write(TABLE, only, "smoke", planned, "flsim sweep")
    assert [run.grid for run in read_sweep(folder.path).runs] == ["fedavg"] * 8 + ["sgd"] * 8


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
    with pytest.raises(InputError, match="no run of this sweep has begun"):
        run_folders([folder.path])
