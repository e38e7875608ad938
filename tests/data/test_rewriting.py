"""Rewritten corpora hold the records that were kept, of the same users, whatever the size of the blocks."""

from pathlib import Path

import numpy as np
import pytest
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data import rewriting
from flsim.data.corpus import Corpus
from flsim.data.manifest import SPLITS
from flsim.data.rewriting import blocks, rewrite_corpus


def test_it_holds_what_is_kept(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """Twenty masks of random shares, none and all among them, each with another size of blocks."""
    rng = stream(0, "test", "rewriting")
    users = [[rng.integers(1, 9, rng.integers(0, 5)).tolist() for _ in range(rng.integers(0, 6))] for _ in range(15)]
    corpus = make_corpus(users, test=users[:3], heldout=users[5:])
    records = sum(map(len, users))
    for number, share in enumerate([0.0, 1.0, *rng.random(18)]):
        kept = rng.random(records) < share
        rest = iter(kept.tolist())
        expected = [[record for record in user if next(rest)] for user in users]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rewriting, "BLOCK", number + 1)
            made = rewrite_corpus(corpus, tmp_path / f"{number}", {"step": "test"}, kept=kept, dropped={"records_x": 4})
        train = Corpus.open(made.path, verify=True).split("train")
        assert [[record.tolist() for record in train[user]] for user in range(len(train))] == expected
        assert train.names == corpus.split("train").names
        for split in SPLITS[1:]:
            for file in (corpus.path / split).iterdir():
                assert (made.path / split / file.name).read_bytes() == file.read_bytes()
        assert made.manifest["dropped"] == {"records_x": 4}
        assert made.manifest["parameters"]["read"] == {"records": records}


def test_steps_notes_and_drops_add_up(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    corpus = make_corpus([[[1], [2], [3]]])
    kept = np.array([True, True, False])
    first = rewrite_corpus(corpus, tmp_path / "1", {"step": "a"}, kept=kept, dropped={"records_x": 1}, notes=["one"])
    second = rewrite_corpus(
        first, tmp_path / "2", {"step": "b"}, kept=kept[1:], dropped={"records_x": 1, "records_y": 0}, notes=["two"]
    )
    manifest = second.manifest
    assert manifest["dropped"] == {"records_x": 2, "records_y": 0}
    assert manifest["notes"] == ["one", "two"]
    assert manifest["parameters"]["steps"] == [
        {"step": "a", "corpus": corpus.digest},
        {"step": "b", "corpus": first.digest},
    ]
    assert manifest["parameters"]["read"] == {"records": 3}
    with pytest.raises(InputError, match="already exists"):
        rewrite_corpus(corpus, tmp_path / "2", {})


@given(st.lists(st.integers(0, 7), max_size=30), st.integers(1, 20))
def test_blocks_are_all_users_in_order(sizes: list[int], size: int) -> None:
    """None has more records than asked for, unless it is a single user's."""
    found = list(blocks(np.cumsum([0, *sizes]), size))
    assert [user for first, last in found for user in range(first, last)] == list(range(len(sizes)))
    assert all(last - first == 1 or sum(sizes[first:last]) <= size for first, last in found)
