"""Records in batches and windows, as loops over lists have them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flsim.data.corpus import memory_map
from flsim.data.records import Records, batch, windows
from flsim.data.vocabulary import Layout

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


@pytest.mark.parametrize(
    ("record", "inputs", "targets"),
    [
        ([3, 1], [10, 3, 1], [3, 1, 11]),
        ([], [10], [11]),
        ([1, 2, 3, 4, 5], [10, 1, 2, 3, 4], [1, 2, 3, 4, 5]),  # full: no EOS
    ],
)
def test_a_record_as_tff_lays_it_out(record: list[int], inputs: list[int], targets: list[int]) -> None:
    """PAD 0, 8 words, OOV 9, BOS 10, EOS 11."""
    made = batch(Records.from_lists([record]), np.array([0]), LAYOUT)
    assert (made.inputs.tolist(), made.targets.tolist()) == ([inputs], [targets])


@given(records)
def test_records_are_what_they_were_made_of(records: list[list[int]]) -> None:
    made = Records.from_lists(records)
    assert [record.tolist() for record in made] == records
    assert (len(made), made.words) == (len(records), sum(map(len, records)))


@given(count=st.integers(0, 30), size=st.integers(1, 12), overlap=st.integers(0, 4))
def test_pieces_cover_an_array(count: int, size: int, overlap: int) -> None:
    values = np.arange(count)
    pieces = list(windows(values, size, overlap))
    assert [start for start, _ in pieces] == list(range(0, count, size))
    for start, piece in pieces:
        assert piece.tolist() == values[start : start + size + overlap].tolist()


@pytest.mark.parametrize(("dtype", "overlap"), [("<u2", 0), ("<u4", 3), ("<i8", 1)])
def test_of_a_mapped_file_they_are_read(tmp_path: Path, dtype: str, overlap: int) -> None:
    values = np.arange(1_000, dtype=dtype)
    values.tofile(tmp_path / "values")
    mapped = memory_map(tmp_path / "values", dtype)
    for (start, piece), (at, expected) in zip(windows(mapped, 77, overlap), windows(values, 77, overlap), strict=True):
        assert (start, piece.dtype) == (at, expected.dtype)
        assert not np.shares_memory(piece, mapped)
        np.testing.assert_array_equal(piece, expected)
