from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.data.corpus import memory_map
from flsim.data.records import windows


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
