"""Authors: regrouped on disk by hash, cut into balanced users, kept out; and names that stand for many people."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dumps import write_jsonl
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st

from flsim.data.authors import largest_authors
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import cut, split_of, written
from flsim.data.importing.scratch import cuts, hash_of, ranges_of, read_lines, write_lines

lengths = st.lists(st.integers(0, 20), max_size=60)


def users_of(lengths: list[int], words_per_user: int) -> tuple[list[list[int]], list[int]]:
    """The records of each user, by their lengths, and the remainder."""
    ends = cut(np.array(lengths, np.int64), words_per_user).tolist()
    users = [lengths[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    return users, lengths[ends[-1] if ends else 0 :]


@given(lengths, st.integers(1, 60))
def test_cutting_loses_nothing_and_keeps_order(lengths: list[int], words_per_user: int) -> None:
    users, remainder = users_of(lengths, words_per_user)
    assert [record for user in [*users, remainder] for record in user] == lengths


@given(lengths, st.integers(1, 60))
def test_users_are_balanced(lengths: list[int], words_per_user: int) -> None:
    """A user ends with the record that brings it to `words_per_user`: one record less would not do."""
    users, remainder = users_of(lengths, words_per_user)
    for user in users:
        assert sum(user) >= words_per_user > sum(user[:-1])
    assert sum(remainder) < words_per_user


@pytest.mark.parametrize(
    ("token", "is_word"),
    [
        ("don't", True),
        ("7", True),
        ("c++", True),
        ("<URL>", True),
        ("é", True),
        (".", False),
        ("<", False),
        ("_", False),
    ],
)
def test_written_words_have_a_letter_or_a_digit(token: str, is_word: bool) -> None:
    assert written([token]).tolist() == [is_word]


def test_splits_have_the_shares_that_were_asked_for() -> None:
    """4,000 authors: a share's standard deviation is below 0.8%."""
    splits = Counter(split_of(f"author{index}", heldout=0.1, test=0.3, seed=7) for index in range(4_000))
    assert abs(splits["heldout"] / 4_000 - 0.1) < 0.03
    assert abs(splits["test"] / 4_000 - 0.3) < 0.03
    assert splits.total() == 4_000


def test_splits_depend_on_the_seed_and_nothing_else() -> None:
    def splits(seed: int) -> list[str]:
        return [split_of(f"author{index}", 0.2, 0.2, seed) for index in range(100)]

    assert splits(0) == splits(0) != splits(1)
    assert {split_of(name, 0.0, 0.0, 3) for name in "abc"} == {"train"}


# Lines on disk, regrouped by hash: like a dictionary, whatever the number of files and ranges.


some_files = st.lists(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "ä", "xyz"]), st.binary(max_size=4)), max_size=12),
    min_size=1,
    max_size=5,
)


@given(some_files, st.integers(1, 9))
def test_regroups_like_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[tuple[str, bytes]]], ranges: int
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    paths = []
    expected: dict[str, list[bytes]] = {}
    for number, content in enumerate(files):
        lines = sorted(((key, value.hex().encode()) for key, value in content), key=lambda line: hash_of(line[0]))
        paths.append(folder / str(number))
        write_lines(paths[-1], [hash_of(key) for key, _ in lines], (b"%s=%b\n" % (k.encode(), v) for k, v in lines))
        for key, value in lines:
            expected.setdefault(key, []).append(value)
    bounds = cuts(paths, ranges)
    assert bounds[:, 0].tolist() == [0] * len(files)
    found: dict[str, list[bytes]] = {}
    for index in range(ranges):
        for line in read_lines(ranges_of(paths, bounds, index)):
            key = line.partition(b"=")[0].decode()
            found.setdefault(key, []).append(line.partition(b"=")[2])
            assert hash_of(key) * ranges >> 64 == index  # ranges are equal, and a hash is in one of them
    assert found == expected


def test_hashes_order_texts_as_sha256_does() -> None:
    """The sha256 of "abc" is published: FIPS 180-2, appendix B.1."""
    assert hash_of("abc") == 0xBA7816BF8F01CFEA


def test_the_largest_hash_is_in_the_last_range(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    write_lines(path, [0, 2**63, 2**64 - 1], [b"first\n", b"middle\n", b"last\n"])
    bounds = cuts([path], 2)
    assert bounds.dtype == np.int64
    assert [list(read_lines(ranges_of([path], bounds, index))) for index in range(2)] == [
        [b"first"],
        [b"middle", b"last"],
    ]


# Names that stand for many people: reported by an import and by `inspect`, and dropped on request.


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
        assert (
            f"WARNING author '{name}' has 33.3% of all words, and is a placeholder for many people or for nobody"
            in line
        )
        assert f"import again with --drop-authors '{name}'" in line
    options = ("--drop-authors", f"{name},nobody")
    code, out, err = flsim("data", "import", source, *SETTINGS, *options, "--out", tmp_path / "without")
    assert code == 0, err
    assert "--drop-authors: no post of 'nobody'\n" in err
    assert "80 posts 33.3% by authors in --drop-authors" in " ".join(out.split())
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
    assert warning.startswith("author '[removed]' has 2.4% of all words, and is a placeholder for many people")


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
