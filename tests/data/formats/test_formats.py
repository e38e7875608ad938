import sqlite3
from contextlib import closing
from pathlib import Path

import h5py
import pytest

from flsim.base.errors import InputError
from flsim.data.formats.known import FORMATS, format_of


def test_the_names() -> None:
    names = ["tff-sqlite", "tff-hdf5", "fedjax-sqlite", "pfl-hdf5", "parquet", "jsonl", "stackexchange"]
    assert sorted(FORMATS) == sorted(names)
    assert all(format.name == name for name, format in FORMATS.items())


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a", b"PAR1...", "parquet"),
        ("a.json", b" \n<posts>", "stackexchange"),
        ("a.xml", b'\xef\xbb\xbf{"user": 1}', "jsonl"),
        ("a", "\ufeff<posts>".encode("utf-16-le"), "stackexchange"),
        ("a.xml", b"", "stackexchange"),
        ("a.ndjson", b"", "jsonl"),
    ],
)
def test_content_goes_before_names(tmp_path: Path, name: str, content: bytes, format: str) -> None:
    (tmp_path / "scratch").write_bytes(content)
    assert format_of(tmp_path / "scratch", Path(name)) is FORMATS[format]


@pytest.mark.parametrize("content", [b"7z\xbc\xaf\x27\x1c\0\4", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"])
def test_compressed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=r"so\.7z: compressed; unpack it first"):
        format_of(tmp_path / "a", Path("so.7z"))


def test_what_was_found_and_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,text\n")
    with pytest.raises(InputError, match=r"a\.csv: begins with b'user,text\\n', which no known format does; known are"):
        format_of(tmp_path / "a.csv", tmp_path / "a.csv")
    with closing(sqlite3.connect(tmp_path / "b")) as connection, connection:
        connection.execute("CREATE TABLE images (x)")
    with pytest.raises(InputError, match=r"b: SQLite with the tables images; known are"):
        format_of(tmp_path / "b", tmp_path / "b")
    with h5py.File(tmp_path / "c", "w") as file:
        file.create_group("images")
    with pytest.raises(InputError, match=r"c: HDF5 with the groups images; known are"):
        format_of(tmp_path / "c", tmp_path / "c")
