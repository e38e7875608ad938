"""Records in batches and windows, as loops over lists have them."""

from pathlib import Path

import numpy as np
import pytest
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data import withheld
from flsim.data.corpus import Corpus, memory_map
from flsim.data.manifest import SPLITS
from flsim.data.records import Records, batch, windows
from flsim.data.vocabulary import Layout
from flsim.data.withheld import rewrite_corpus

RECORD_WORDS = 5
LAYOUT = Layout(vocabulary_size=12, record_words=RECORD_WORDS)
records = st.lists(st.lists(st.integers(1, LAYOUT.oov), max_size=RECORD_WORDS), min_size=1, max_size=9)


def naive_batch(records: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """BOS, words, EOS where shorter than `RECORD_WORDS`; inputs without the last token, targets without the first."""
    sequences = [[LAYOUT.bos, *record, *([LAYOUT.eos] if len(record) < RECORD_WORDS else [])] for record in records]
    time = max(len(sequence) - 1 for sequence in sequences)
    inputs, targets = (
        [part + [LAYOUT.pad] * (time - len(part)) for part in parts]
        for parts in ([s[:-1] for s in sequences], [s[1:] for s in sequences])
    )
    return np.array(inputs), np.array(targets)


@given(records, st.data())
def test_batch_is_what_a_loop_over_records_makes(records: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=12))
    made = batch(Records.from_lists(records), np.array(chosen), LAYOUT)
    inputs, targets = naive_batch([records[index] for index in chosen])
    np.testing.assert_array_equal(made.inputs, inputs)
    np.testing.assert_array_equal(made.targets, targets)
    assert made.inputs.dtype == made.targets.dtype == np.int64


@pytest.mark.parametrize(("dtype", "count", "overlap"), [("<u2", 1_000, 0), ("<u4", 1_001, 3), ("<i8", 154, 1)])
def test_pieces_cover_an_array_and_are_copies_of_a_mapped_file(
    tmp_path: Path, dtype: str, count: int, overlap: int
) -> None:
    values = np.arange(count, dtype=dtype)
    values.tofile(tmp_path / "values")
    mapped = memory_map(tmp_path / "values", dtype)
    pieces = list(windows(mapped, 77, overlap))
    assert [start for start, _ in pieces] == list(range(0, count, 77))
    for start, piece in pieces:
        assert piece.dtype == dtype
        assert not np.shares_memory(piece, mapped)
        assert piece.tolist() == values[start : start + 77 + overlap].tolist()


# Rewritten corpora hold the records that were kept, of the same users, whatever the size of the blocks.


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
            patch.setattr(withheld, "BLOCK", number + 1)
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
