"""Tests that names in data files, such as manifests and sweeps, cannot lead to a file outside their folder."""

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
    """Create links from a folder to an existing file outside it, to its parent folder, and to themselves."""
    secret = folder.parent / SECRET
    secret.write_text("{}")
    (folder / "link").symlink_to(secret)
    (folder / "elsewhere").symlink_to(folder.parent)
    (folder / "loop").symlink_to("loop")


def refused(work: Callable[[], object]) -> None:
    """Check that `work` raises an InputError of one short line."""
    with pytest.raises(InputError) as caught:
        work()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert len(message) < 600, message


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_name_outside_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lay_links(folder)
    refused(lambda: inside(folder, name))


def test_a_name_inside_the_folder_is_accepted(tmp_path: Path) -> None:
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
def test_accepted_names_are_below_the_folder(name: str) -> None:
    """The oracle is `os.path.normpath`, which resolves the dots in the text of a path."""
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
    """For example, the link may lead to a larger disk."""
    corpus = make_corpus([[[1, 2]]])
    (tmp_path / "here").symlink_to(corpus.path)
    assert Corpus.open(tmp_path / "here", verify=True).digest == corpus.digest


def test_every_file_of_a_corpus_must_have_a_digest(make_corpus: MakeCorpus) -> None:
    """Without a digest in the manifest, a changed file could pass as the imported file."""
    corpus = make_corpus([[[1, 2]]])
    for name in corpus.manifest["files"]:
        left = {other: about for other, about in corpus.manifest["files"].items() if other != name}
        (corpus.path / "manifest.json").write_text(json.dumps(corpus.manifest | {"files": left}))
        refused(lambda: Corpus.open(corpus.path, verify=True))


def test_a_sweep_cannot_name_runs_elsewhere(tmp_path: Path) -> None:
    """The names are refused although runs exist at those of these paths that are possible."""
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


def test_log_lines_with_a_checkpoint_outside_the_folder_are_skipped(tmp_path: Path) -> None:
    """Readers skip such lines, as they skip truncated lines."""
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
def test_runs_whose_names_are_too_long_or_equal_are_refused(tmp_path: Path, axes: dict[str, Any]) -> None:
    definition = MINIMAL | {"grids": [{"name": "a", "axes": axes}]}
    definition["tiers"] = {"tiny": MINIMAL["tiers"]["tiny"] | {"grids": {}}}
    path = tmp_path / "sweep.toml"
    path.write_text(tomli_w.dumps(definition))
    found = load(path)
    refused(lambda: planned_runs(found, tier_of(found, "tiny", "x"), tmp_path, str(path)))


def test_published_numbers_come_only_from_the_folder_of_experiments() -> None:
    for name in HOSTILE.values():
        refused(lambda name=name: published_rows(name, "1"))  # type: ignore[misc]


def test_a_partial_file_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the folder, such as /tmp, and guess the name of the partial file."""
    monkeypatch.setattr("secrets.token_hex", lambda _bytes: "guessed")
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / ".report.html.partial-guessed").symlink_to(theirs)
    with pytest.raises(FileExistsError), new_file(tmp_path / "report.html"):
        pass
    assert theirs.read_text() == "theirs"
    assert not (tmp_path / "report.html").exists()
