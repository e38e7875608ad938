"""Names that stand for many people: reported by an import and by `inspect`, and dropped on request."""

import json
from pathlib import Path

import pytest
from dumps import write_jsonl
from helpers import Flsim

from flsim.data.authors import largest_authors
from flsim.data.corpus import Corpus

SETTINGS = ("--words-per-user", 8, "--vocabulary", 9)
TEXT = "some words are here now"


def posts(name: str, deleted: int) -> list[tuple[str | int, str]]:
    """Return posts of 40 accounts, and of so many more with one name."""
    rows = [(f"user{user}", TEXT) for user in range(40) for _ in range(4)]
    return [*rows, *((name, TEXT) for _ in range(deleted) for _ in range(4))]


@pytest.mark.parametrize("name", ["[deleted]", "nan", "None", "AutoModerator"])
def test_a_stand_in_is_reported_and_dropped(tmp_path: Path, flsim: Flsim, name: str) -> None:
    """20 of 60 accounts have the name, so that it has a third of all words."""
    source = write_jsonl(tmp_path / "a.jsonl", posts(name, 20))
    code, imported, err = flsim("data", "import", source, *SETTINGS, "--out", tmp_path / "corpus")
    assert code == 0, err
    code, inspected, _ = flsim("data", "inspect", tmp_path / "corpus")
    for out in (imported, inspected):
        line = " ".join(out.split())
        assert f"largest authors by their share of all words: {name} 33.3%, user0 1.7%, user1 1.7%" in line
        assert f"WARNING author '{name}' has 33.3% of all words, and stands for many people or for none" in line
        assert f"import again with --drop-authors '{name}'" in line
    options = ("--drop-authors", f"{name},nobody")
    code, out, err = flsim("data", "import", source, *SETTINGS, *options, "--out", tmp_path / "without")
    assert code == 0, err
    assert "--drop-authors: no post of 'nobody'\n" in err
    assert "80 posts 33.3% by authors whom --drop-authors names" in " ".join(out.split())
    assert "author '" not in out
    manifest = Corpus.open(tmp_path / "without").manifest
    assert manifest["dropped"]["posts_of_dropped_authors"] == 80
    assert manifest["parameters"]["read"]["posts"] == 240
    assert manifest["parameters"]["drop_authors"] == [name, "nobody"]


def test_a_stand_in_of_a_small_share_is_reported_too(tmp_path: Path, flsim: Flsim) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", posts("zz", 0) + posts("[removed]", 1)[160:])
    code, out, err = flsim("data", "import", source, *SETTINGS, "--json", "--out", tmp_path / "corpus")
    assert code == 0, err
    (warning,) = json.loads(out)["author_warnings"]
    assert warning.startswith("author '[removed]' has 2.4% of all words, and stands for many people")


def test_shares_and_warnings() -> None:
    """The largest of 40 authors has 6 of 45 words, and 2 of 40 authors' shares are 5%."""
    users = [("train", "big#0", 4), ("train", "big#1", 2), *(("heldout", f"u{n}", 1) for n in range(39))]
    authors, warnings = largest_authors(users)
    assert authors[0] == {"author": "big", "split": "train", "users": 2, "words": 6, "share": 6 / 45}
    assert [author["author"] for author in authors] == ["big", "u0", "u1", "u10", "u11"]
    (warning,) = warnings
    assert warning.startswith("author 'big' has 13.3% of all words, which is unusual for one person; to leave")


def test_few_equal_authors_are_no_reason_to_warn() -> None:
    assert largest_authors([("train", f"u{n}", 10 + n) for n in range(6)])[1] == []
    assert largest_authors([]) == ([], [])
