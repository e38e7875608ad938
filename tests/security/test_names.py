"""Names that files of data give lead nowhere but into their folder, whoever wrote them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st
from reported import write_run, write_sweep
from sweeps.test_definition import MINIMAL

from flsim.base.errors import InputError
from flsim.base.files import file_digest, inside, new_file
from flsim.data.corpus import Corpus
from flsim.report.page import write_report
from flsim.results.frames import frames
from flsim.results.published import published_rows
from flsim.results.rows import failures
from flsim.results.sweeps import published_of, read_sweep, run_folders
from flsim.runs.sweeps.definition import load, planned_runs, tier_of

SECRET = "secret"
OUTSIDE = "/etc/hostname"
HOSTILE: dict[str, Any] = {
    "absolute": OUTSIDE,
    "climbing": f"../{SECRET}",
    "climbing late": f"train/../../{SECRET}",
    "the folder above": "..",
    "the folder": ".",
    "empty": "",
    "zero byte": "tokens\0.u16",
    "too long": "a" * 5_000,
    "too deep": "a/" * 5_000 + "a",
    "half a character": "\ud800",
    "link": "link",
    "link to a folder": f"elsewhere/{SECRET}",
    "link to itself": "loop",
    "no text": 7,
    "nothing": None,
}
IN_TOML = ("absolute", "climbing", "climbing late", "the folder above", "the folder", "empty", "zero byte", "too long")


def lay_links(folder: Path) -> None:
    """Links that lead out of a folder, to a file that is there."""
    secret = folder.parent / SECRET
    secret.write_text("{}")
    (folder / "link").symlink_to(secret)
    (folder / "elsewhere").symlink_to(folder.parent)
    (folder / "loop").symlink_to("loop")


def refused(work: Callable[[], object]) -> None:
    """One line, and not a long one."""
    with pytest.raises(InputError) as caught:
        work()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert len(message) < 600, message


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lay_links(folder)
    refused(lambda: inside(folder, name))


def test_a_name_that_stays_inside_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "tokens").write_text("")
    (folder / "inner").symlink_to("train/tokens")
    linked = tmp_path / "as-others-call-it"
    linked.symlink_to(folder)
    for name in ("train/tokens", "inner", "not-there", "..hidden", "a..b", "train/tokens/not-there", "ü"):
        assert inside(folder, name) == folder / name
        assert inside(linked, name) == linked / name


@given(st.text(max_size=40) | st.text("./a\0", max_size=12))
def test_what_is_taken_is_below_the_folder(name: str) -> None:
    """The oracle is os.path: a path's text, with its dots worked out."""
    folder = Path("/no/such/folder")
    try:
        found = inside(folder, name)
    except InputError:
        return
    assert os.path.normpath(f"{folder}/{name}").startswith(f"{folder}/")
    assert not name.startswith("/")
    assert found == folder / name


def test_a_manifest_cannot_name_files_elsewhere(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([[[1, 2]]])
    lay_links(corpus.path)
    there = corpus.path.parent / SECRET
    about = {"bytes": there.stat().st_size, "sha256": file_digest(there)}
    for name in HOSTILE.values():
        manifest = corpus.manifest | {"files": corpus.manifest["files"] | {name: about}}
        (corpus.path / "manifest.json").write_text(json.dumps(manifest))
        for verify in (False, True):
            refused(lambda verify=verify: Corpus.open(corpus.path, verify))  # type: ignore[misc]


@pytest.mark.parametrize("what", ["train", "train/tokens.u16", "vocabulary.tsv"])
def test_files_of_a_corpus_that_are_links_to_elsewhere_are_refused(make_corpus: MakeCorpus, what: str) -> None:
    corpus = make_corpus([[[1, 2]]])
    moved = corpus.path.parent / "moved"
    shutil.move(corpus.path / what, moved)
    (corpus.path / what).symlink_to(moved)
    refused(lambda: Corpus.open(corpus.path))


def test_a_corpus_may_itself_be_a_link(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """To a larger disk, say."""
    corpus = make_corpus([[[1, 2]]])
    (tmp_path / "here").symlink_to(corpus.path)
    assert Corpus.open(tmp_path / "here", verify=True).digest == corpus.digest


def test_every_file_that_is_read_must_be_sealed(make_corpus: MakeCorpus) -> None:
    """Else a changed one would pass as what was imported."""
    corpus = make_corpus([[[1, 2]]])
    for name in corpus.manifest["files"]:
        left = {other: about for other, about in corpus.manifest["files"].items() if other != name}
        (corpus.path / "manifest.json").write_text(json.dumps(corpus.manifest | {"files": left}))
        refused(lambda: Corpus.open(corpus.path, verify=True))


def test_a_sweep_cannot_name_runs_elsewhere(tmp_path: Path) -> None:
    """There is a run at each of these places that can be."""
    made = write_sweep(tmp_path / "sweep", tmp_path / "corpus")
    write_run(tmp_path / "sweep" / SECRET)
    for link, to in (("link", made.path / SECRET), ("elsewhere", made.path), ("loop", "loop")):
        (made.path / "runs" / link).symlink_to(to)
    about = json.loads((made.path / "sweep.json").read_text())
    for name in HOSTILE.values():
        about["runs"][0]["name"] = name
        (made.path / "sweep.json").write_text(json.dumps(about))
        for work in (read_sweep, lambda path: run_folders([path]), lambda path: published_of([path]), frames, report):
            refused(lambda work=work: work(made.path))  # type: ignore[misc]
    assert not (tmp_path / "report.html").exists()


def report(sweep: Path) -> None:
    write_report([sweep], sweep.parent / "report.html")


def test_a_checkpoint_that_a_log_names_leads_nowhere(tmp_path: Path) -> None:
    """Such lines are passed over, as one that was cut short."""
    run, good = write_run(tmp_path / "run"), "round-000040.safetensors"
    line = {"outcome": "failed", "attempt": 1, "seconds": 1.0, "ended": 1.0, "reason": "x"}
    lines = [json.dumps(line | {"checkpoint": name}) + "\n" for name in (*HOSTILE.values(), good)]
    (run / "evaluations.jsonl").write_text("".join(lines))
    assert failures(run) == dict.fromkeys(("link", "loop", good), "x")


@pytest.mark.parametrize("name", ["a/b", ".a", "a\n", *(HOSTILE[name] for name in IN_TOML)])
@pytest.mark.parametrize("what", ["grid", "tier"])
def test_a_sweep_file_cannot_name_folders_elsewhere(tmp_path: Path, name: str, what: str) -> None:
    definition = json.loads(json.dumps(MINIMAL))
    if what == "grid":
        definition["grids"][0]["name"] = name
        definition["tiers"]["tiny"]["grids"] = {}
    else:
        definition["tiers"][name] = definition["tiers"]["tiny"]
    path = tmp_path / "sweep.toml"
    path.write_text(tomli_w.dumps(definition))
    refused(lambda: load(path))


@pytest.mark.parametrize(
    "axes", [{"canaries.p_u": [[share / 1_000 for share in range(1, 99)]]}, {"training.rounds": [5, 5]}]
)
def test_a_run_has_a_folder_of_its_own(tmp_path: Path, axes: dict[str, Any]) -> None:
    definition = MINIMAL | {"grids": [{"name": "a", "axes": axes}]}
    definition["tiers"] = {"tiny": MINIMAL["tiers"]["tiny"] | {"grids": {}}}
    path = tmp_path / "sweep.toml"
    path.write_text(tomli_w.dumps(definition))
    found = load(path)
    refused(lambda: planned_runs(found, tier_of(found, "tiny", "x"), tmp_path, str(path)))


def test_published_numbers_are_of_experiments_alone() -> None:
    for name in HOSTILE.values():
        refused(lambda name=name: published_rows(name, "1"))  # type: ignore[misc]


def test_a_partial_file_is_written_through_nobodys_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be one that others write to, such as /tmp, and somebody has guessed its name."""
    monkeypatch.setattr("secrets.token_hex", lambda _bytes: "guessed")
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / ".report.html.partial-guessed").symlink_to(theirs)
    with pytest.raises(FileExistsError), new_file(tmp_path / "report.html"):
        pass
    assert theirs.read_text() == "theirs"
    assert not (tmp_path / "report.html").exists()
