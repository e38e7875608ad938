"""Five real dumps, where they lie beside the repository (CC BY-SA; no part of them is in it)."""

import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from flsim.data.corpus import Corpus
from flsim.data.formats.stackexchange import site_of
from flsim.data.importing.gather import ImportHParams, split_of
from flsim.data.importing.run import import_corpus
from flsim.data.inspect import inspect
from flsim.data.manifest import SPLITS, WHOLE

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "stackexchange"
DUMPS = sorted(FOLDER.glob("*.Posts.xml"))
NAIVE_USERS = 417  # of 2,000 words, with tags stripped and words split at white space

pytestmark = pytest.mark.skipif(not DUMPS, reason="no real dumps in ../shared/data/stackexchange")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return import_corpus(DUMPS, tmp_path_factory.mktemp("real") / "corpus", ImportHParams())


def test_about_as_many_users_as_a_naive_count_finds(corpus: Corpus) -> None:
    """Within 5%: code blocks and bare symbols are words to the naive count, and not to ours."""
    users = sum(corpus.manifest["splits"][split]["users"] for split in SPLITS)
    assert 0.95 < users / NAIVE_USERS < 1.05


def test_drops_are_those_a_tree_counts(corpus: Corpus) -> None:
    reasons: Counter[str] = Counter()
    authors = set()
    for path in DUMPS:
        for row in ET.parse(path).getroot():
            owner = row.get("OwnerUserId")
            if row.get("PostTypeId") not in ("1", "2"):
                reasons["posts_of_other_types"] += 1
            elif owner is None:
                reasons["posts_without_owner"] += 1
            elif owner == "-1":
                reasons["posts_of_community_user"] += 1
            else:
                authors.add(f"{site_of(path)}/{owner}")
            reasons["all"] += 1
    read, dropped = corpus.manifest["parameters"]["read"], corpus.manifest["dropped"]
    assert read["posts"] == reasons.pop("all")
    assert {reason: dropped[reason] for reason in reasons} == reasons
    assert len(authors) - dropped["posts_without_words"] <= read["users"] <= len(authors)
    names = {name.rsplit("#", 1)[0] for split in SPLITS for name in corpus.split(split).names}
    assert names < authors
    assert len(names) + dropped["users_too_short"] == read["users"]


def test_whole_authors_are_those_a_tree_finds(corpus: Corpus) -> None:
    """All of them, but those who wrote no word; the authors of balanced users are a tenth of them."""
    authors = {
        f"{site_of(path)}/{row.get('OwnerUserId')}"
        for path in DUMPS
        for row in ET.parse(path).getroot()
        if row.get("PostTypeId") in ("1", "2") and row.get("OwnerUserId") not in (None, "-1")
    }
    wordless = corpus.manifest["dropped"]["posts_without_words"]
    for split, whole in WHOLE.items():
        expected = {author for author in authors if split_of(author, 0.1, 0.1, 0) == split}
        names = corpus.split(whole).names
        assert set(names) <= expected
        assert len(expected) - wordless <= len(names) == len(set(names))
        balanced = {name.rsplit("#", 1)[0] for name in corpus.split(split).names}
        assert balanced < set(names)
        assert len(balanced) < 0.2 * len(names)


def test_every_word_is_somewhere(corpus: Corpus) -> None:
    read, dropped = corpus.manifest["parameters"]["read"], corpus.manifest["dropped"]
    kept = {unit: sum(corpus.manifest["splits"][split][unit] for split in SPLITS) for unit in ("records", "words")}
    assert read["records"] == kept["records"] + dropped["records_of_short_users"] + dropped["remainder_records"]
    assert read["words"] == kept["words"] + sum(
        dropped[reason] for reason in ("words_truncated", "words_of_short_users", "remainder_words")
    )


def test_records_are_cut_and_words_known(corpus: Corpus) -> None:
    for split in SPLITS:
        users = corpus.split(split)
        assert max(len(record) for index in range(len(users)) for record in users[index]) == 20
        assert inspect(corpus)["splits"][split]["oov_share"] < 0.06
    head = set(corpus.vocabulary.words[:10])
    assert {"the", ".", ",", "to", "a", "of"} <= head
    assert "<URL>" in corpus.vocabulary.words
