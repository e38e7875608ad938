import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import h5py
import pytest

from flsim.base.errors import InputError
from flsim.data.formats.known import FORMATS, format_of

ROOT = Path(__file__).parents[3]


def test_the_names() -> None:
    names = [
        "tff-sqlite",
        "tff-hdf5",
        "fedjax-sqlite",
        "pfl-hdf5",
        "parquet",
        "jsonl",
        "json",
        "csv",
        "stackexchange",
        "text",
    ]
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
        ("a.txt", b" aer banknote", "text"),
        ("a.txt", b'{"user": 1}', "jsonl"),
        ("a.csv", b"user,text\n", "csv"),
        ("a.csv", b'{"user": 1}', "jsonl"),
        ("a.tsv", b"user\ttext\n", "csv"),
        ("a", b' [\n{"user": 1}]', "json"),
        ("a.json", b"[]", "json"),
        ("a.txt", b"[deleted] is text", "text"),
        ("a.jsonl", b'{\n"user": 1}', "json"),
        ("a.jsonl", b'{"user": 1,\n{"user": 2}', "jsonl"),
        ("a.json", b'{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": []}}}', "json"),
        ("a.json", b'{"users": 3, "text": "a"}', "jsonl"),
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
    (tmp_path / "a.log").write_text("user text\n")
    with pytest.raises(InputError, match=r"a\.log: begins with b'user text\\n', which no known format does; known are"):
        format_of(tmp_path / "a.log", tmp_path / "a.log")
    with closing(sqlite3.connect(tmp_path / "b")) as connection, connection:
        connection.execute("CREATE TABLE images (x)")
    with pytest.raises(InputError, match=r"b: SQLite with the tables images; known are"):
        format_of(tmp_path / "b", tmp_path / "b")
    with h5py.File(tmp_path / "c", "w") as file:
        file.create_group("images")
    with pytest.raises(InputError, match=r"c: HDF5 with the groups images; known are"):
        format_of(tmp_path / "c", tmp_path / "c")


def test_without_h5py_only_hdf5_files_are_refused(tmp_path: Path) -> None:
    """A module that cannot be imported comes before the installed h5py, also in the processes that read a file."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "h5py.py").write_text("raise ModuleNotFoundError('hidden')\n")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("examples")
    (tmp_path / "a.jsonl").write_text("".join(f'{{"user": "{user}", "text": "a b c d e f"}}\n' for user in range(4)))
    common = ["--words-per-user", "6", "--vocabulary", "5", "--out", "corpus"]

    def imported(name: str, *options: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "flsim", "data", "import", name, *common, *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{hidden}:{ROOT}"},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    for options in ([], ["--format", "tff-hdf5"], ["--format", "pfl-hdf5"]):
        code, message = imported("a.h5", *options)
        assert code == 2
        assert message.splitlines()[-1] == (
            "flsim: a.h5: HDF5 files need h5py, the extra 'hdf5', which is not installed; pip install h5py"
        )
        assert not (tmp_path / "corpus").exists()
    assert imported("a.jsonl", "--test", "0")[0] == 0
