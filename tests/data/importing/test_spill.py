"""Lines on disk, regrouped by hash: like a dictionary, whatever the number of files and ranges."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.data.importing.scratch import cuts, hash_of, ranges_of, read_lines, write_lines

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
