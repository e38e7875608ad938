import sqlite3
import zlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from dumps import peak_of_reading
from reading import read

from benchmarks.writers import fedjax_client, write_fedjax
from flsim.base.errors import InputError
from flsim.data.formats import fedjax
from flsim.data.formats.posts import Post

FORMAT = "fedjax-sqlite"


def database(path: Path, rows: Iterable[tuple[object, object, object]]) -> Path:
    write_fedjax(path, [])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO federated_data VALUES (?, ?, ?)", rows)
    return path


def strings(*texts: bytes) -> msgpack.ExtType:
    return msgpack.ExtType(4, msgpack.packb(((len(texts),), texts)))


def packed(value: Any) -> bytes:
    return zlib.compress(msgpack.packb(value))


def test_what_is_written_is_what_fedjax_unpacks() -> None:
    """Unpacked in the way of fedjax.core.serialization: extension 1 an array of numbers, 4 one of bytes."""

    def unpack(code: int, data: bytes) -> Any:
        parts = msgpack.unpackb(data, raw=True)
        return np.frombuffer(parts[2], parts[1].decode()).reshape(parts[0]).tolist() if code == 1 else parts[1]

    found = msgpack.unpackb(zlib.decompress(fedjax_client(["a b", "c"])), ext_hook=unpack)
    assert sorted(found) == ["creation_date", "score", "tags", "title", "tokens", "type"]
    assert (found["tokens"], found["score"]) == ([b"a b", b"c"], [-1, -1])


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("stackoverflow_train.sqlite", "train"),
        ("stackoverflow_held_out.sqlite.xz", "heldout"),
        ("stackoverflow_test.sqlite", "test"),
        ("other.sqlite", None),
    ],
)
def test_the_split_is_in_the_name_that_the_user_gave(tmp_path: Path, name: str, split: str | None) -> None:
    path = database(tmp_path / "scratch_train", [(b"8", fedjax_client(["a"]), 1)])
    assert read(path, FORMAT, Path(name))[0] == [Post("8", ["a"], split)]


def test_what_a_client_can_lack(tmp_path: Path) -> None:
    good = fedjax_client(["a", "", "b"])
    bomb = zlib.compress(b"\0" * (2**28 + 1))
    data: list[tuple[object, object]] = [
        (good, 3),
        (good, 2),
        (good, None),
        (good[:-1], 3),
        (b"", 0),
        ("text", 0),
        (7, 0),
        (packed([1]), 1),
        (packed({"title": strings(b"a")}), 1),
        (packed({"tokens": [b"a"]}), 1),
        (packed({"tokens": msgpack.ExtType(1, b"")}), 1),
        (packed({"tokens": msgpack.ExtType(4, msgpack.packb(((1, 1), [b"a"])))}), 1),
        (packed({"tokens": msgpack.ExtType(4, msgpack.packb(((2,), [b"a"])))}), 1),
        (packed({"tokens": msgpack.ExtType(4, msgpack.packb(((1,), [[b"a"]])))}), 1),
        (packed({"tokens": strings(b"c")}), 1),
        (packed({"tokens": strings(b"\xff", b"d", b"x" * (2**20 + 1))}), 3),
        (bomb, 1),
        (good, 3),
    ]
    rows = ((f"{n:02d}".encode(), blob, count) for n, (blob, count) in enumerate(data) if count is not None)
    path = database(tmp_path / "so.sqlite", [*rows, (b"\xff", good, 3)])
    found, dropped = read(path, FORMAT)
    assert found == [Post("00", ["a", "b"]), Post("14", ["c"]), Post("15", ["d"]), Post("17", ["a", "b"])]
    assert dropped == {
        "users_not_fedjax": 12,
        "users_not_utf8": 1,
        "users_too_large": 1,
        "records_not_utf8": 1,
        "records_too_long": 1,
        "records_without_words": 2,
    }


def test_a_million_sentences_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedjax, "USER_RECORDS", 3)
    path = database(tmp_path / "so.sqlite", [(b"a", fedjax_client(["a"] * 3), 3), (b"b", fedjax_client(["a"] * 4), 4)])
    assert read(path, FORMAT) == ([Post("a", ["a"] * 3)], {"users_too_large": 1})


def test_no_client_is_any_good(tmp_path: Path) -> None:
    path = database(tmp_path / "so.sqlite", [(b"a", b"\xff", 1), (b"b", fedjax_client(["a"]), 2)])
    with pytest.raises(InputError, match=r"no client of rowids 1 to 2 contains zlib-compressed msgpack"):
        read(path, FORMAT)


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    path = database(tmp_path / "so.sqlite", [])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE federated_data RENAME COLUMN data TO examples")
    with pytest.raises(InputError, match="no column 'data'; its columns: client_id, examples, num_examples"):
        read(path, FORMAT)


def test_bombs_take_no_more_than_what_is_allowed(tmp_path: Path) -> None:
    """Half a gigabyte of zeros, and lists of lists: 24 MB of msgpack that would be 1.5 GB of Python."""
    small = database(tmp_path / "small.sqlite", [(b"a", fedjax_client(["a"]), 1)])
    compressor = zlib.compressobj(1)
    zeros = b"".join([*(compressor.compress(b"\0" * 2**24) for _ in range(32)), compressor.flush()])
    lists = zlib.compress(b"\x81\xa6tokens\xdd\x01\x80\x00\x00" + b"\x90" * 0x01800000, 1)
    path = database(tmp_path / "so.sqlite", [(b"a", zeros, 1), (b"b", lists, 1), (b"c", fedjax_client(["a"]), 1)])
    assert read(path, FORMAT) == ([Post("c", ["a"])], {"users_too_large": 1, "users_not_fedjax": 1})
    assert (
        peak_of_reading(path, "fedjax-sqlite") < peak_of_reading(small, "fedjax-sqlite") + 3 * 2**18
    )  # three times 256 MB
