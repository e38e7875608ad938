"""Tests of readers of the SQLite and HDF5 files in which TensorFlow Federated publishes Stack Overflow."""

import hashlib
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dumps import peak_of_reading
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read

from benchmarks.writers import tf_example, write_tff_hdf5, write_tff_sqlite
from flsim.base.errors import InputError
from flsim.data.formats import posts, tff
from flsim.data.formats.known import FORMATS
from flsim.data.formats.posts import Post
from flsim.data.formats.tff import Example

TFF_SQLITE = "tff-sqlite"

GOLDEN: dict[str, bytes | int] = {  # like a published record; serialized with sorted names, it has the digest below
    "creation_date": b"2010-07-15 18:15:58.5 UTC",
    "score": -1,
    "tags": b"android|android-emulator|monkey",
    "title": b"writing to / system / framework in emulator",
    "tokens": b"thanks .",
    "type": b"question",
}
GOLDEN_SHA256 = "596ee7cb830a1694b8767bb4ada35a29bcc31ff571f019fbf7c02e3efffdfda4"


def record(**features: bytes | int) -> bytes:
    example = Example()
    for name, value in features.items():
        kind = example.features.feature[name]
        (kind.bytes_list if isinstance(value, bytes) else kind.int64_list).value.append(value)
    return bytes(example.SerializeToString(deterministic=True))


def database(path: Path, rows: Iterable[tuple[object, object, object]]) -> Path:
    """Write a database with only these rows of examples."""
    write_tff_sqlite(path, [])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    return path


def execute(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def test_faulty_records_are_dropped_and_counted(tmp_path: Path) -> None:
    assert hashlib.sha256(record(**GOLDEN)).hexdigest() == GOLDEN_SHA256
    good = tf_example("the <URL> ,\t it's   so")
    protos: list[object] = [
        good,
        record(**{**GOLDEN, "tokens": b" \n\t"}),
        record(**{**GOLDEN, "tokens": b"\xff"}),
        record(title=b"a"),
        record(tokens=-1),
        b"",
        b"\x0a\xff",
        record(**GOLDEN, zz=b"a").replace(b"zz", b"\xff\xff"),  # a name that is not UTF-8
        "text",
        7,
        tf_example("x" * 2**20),
        good,
    ]
    path = database(tmp_path / "so.sqlite", (("train", "a", proto) for proto in protos))
    found, dropped = read(path, TFF_SQLITE)
    assert found == [Post("a", ["the <URL> , it's so"] * 2, "train")]
    assert dropped == {
        "records_without_words": 1,
        "records_not_utf8": 1,
        "records_without_tokens": 3,
        "records_not_tf_example": 4,
        "records_too_long": 1,
    }


def test_any_text_can_be_a_client_name(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "a\0b", "x" * 10_000, "'; DROP TABLE examples", "é\n", ""]
    path = database(tmp_path / "so.sqlite", (("train", name, tf_example("a")) for name in names))
    execute(path, "INSERT INTO examples SELECT split_name, CAST(x'ff41' AS TEXT), x'' FROM examples LIMIT 1")
    found, dropped = read(path, TFF_SQLITE)
    assert [post.user for post in found] == names
    assert dropped == {"records_without_tokens": 1}
    execute(path, "UPDATE examples SET serialized_example_proto = (SELECT serialized_example_proto FROM examples)")
    assert read(path, TFF_SQLITE) == (found, {"records_not_utf8": 1})


@settings(max_examples=15)
@given(st.sets(st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 60), min_size=1), st.integers(1, 30))
def test_rowids_may_have_gaps(tmp_path_factory: pytest.TempPathFactory, rowids: set[int], records: int) -> None:
    path = database(tmp_path_factory.mktemp("so") / "so.sqlite", [])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT INTO examples (rowid, split_name, client_id, serialized_example_proto) VALUES (?, 'train', ?, ?)",
            [(rowid, str(rowid), tf_example("a")) for rowid in rowids],
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posts, "PART_RECORDS", records)
        assert len(FORMATS[TFF_SQLITE].parts(path, path, ("", ""))) <= path.stat().st_size
        assert [post.user for post in read(path, TFF_SQLITE)[0]] == [str(rowid) for rowid in sorted(rowids)]


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "so.sqlite", [("train", "a", b"\xff")] * 3)
    with pytest.raises(InputError, match=r"no record of rowids 1 to 3 is a tf\.Example .*records_not_tf_example: 3"):
        read(path, TFF_SQLITE)
    path = database(tmp_path / "val.sqlite", [("val", "a", tf_example("a"))])
    with pytest.raises(InputError, match="unknown split_name b'val'; use train, heldout or test"):
        read(path, TFF_SQLITE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"val\.sqlite: SQLite cannot read it"):
        read(path, TFF_SQLITE)


def test_tables_and_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    path = execute(database(tmp_path / "so.sqlite", []), "ALTER TABLE examples RENAME COLUMN split_name TO split")
    with pytest.raises(InputError, match=r"SQLite cannot read it \(no such column: split_name"):
        FORMATS[TFF_SQLITE].parts(path, path, ("", ""))
    execute(path, "ALTER TABLE examples RENAME TO sentences")
    with pytest.raises(InputError, match=r"SQLite cannot read it \(no such table: examples"):
        FORMATS[TFF_SQLITE].parts(path, path, ("", ""))


def test_the_file_is_only_read(tmp_path: Path) -> None:
    folder = tmp_path / "100% #so?mode=rwc"
    folder.mkdir()
    path = database(folder / "so.sqlite", [("train", "a", tf_example("a"))])
    before = path.read_bytes()
    path.chmod(0o400)
    folder.chmod(0o500)
    assert len(read(path, TFF_SQLITE)[0]) == 1
    folder.chmod(0o700)
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]


def test_a_database_with_pending_changes_is_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "so.sqlite", [])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute("INSERT INTO examples VALUES ('train', 'a', x'00')")
        with pytest.raises(InputError, match=r"its last changes are still in so\.sqlite-wal"):
            read(path, TFF_SQLITE)


def test_a_record_of_50_megabytes_is_not_read(tmp_path: Path) -> None:
    small = database(tmp_path / "small.sqlite", [("train", "a", tf_example("a"))])
    path = database(tmp_path / "so.sqlite", [("train", "a", tf_example("a")), ("train", "a", b"x" * 50_000_000)])
    assert read(path, TFF_SQLITE) == ([Post("a", ["a"], "train")], {"records_too_long": 1})
    # Reading the record would add 48,828 kB. A sampled peak can miss parts of a short process on a busy machine.
    assert peak_of_reading(path, "tff-sqlite") < peak_of_reading(small, "tff-sqlite") + 40_000


TFF_HDF5 = "tff-hdf5"


def changed(path: Path, tokens: Any, **options: Any) -> Path:
    """Write a file of clients a, b and c, and replace the tokens of b."""
    write_tff_hdf5(path, [("train", client, "x y") for client in "abc"])
    with h5py.File(path, "a") as file:
        del file["examples/b/tokens"]
        file["examples/b"].create_dataset("tokens", data=tokens, **options)
    return path


@pytest.mark.parametrize(
    ("name", "split"),
    [("stackoverflow_held_out.h5", "heldout"), ("stackoverflow_train.h5.bz2", "train"), ("my.h5", None)],
)
def test_the_split_is_in_the_name_that_the_user_gave(tmp_path: Path, name: str, split: str | None) -> None:
    write_tff_hdf5(tmp_path / "scratch", [("train", "8", "a")])
    assert read(tmp_path / "scratch", TFF_HDF5, Path(name))[0] == [Post("8", ["a"], split)]


def test_names_are_in_the_order_of_the_file_and_may_be_any(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_tff_hdf5(path, [("train", name, "x") for name in ("é", "..", "x" * 10_000, "a\nb")])
    with h5py.File(path, "a") as file:
        file["examples"].copy("é", b"\xff")
    found, dropped = read(path, TFF_HDF5)
    assert [post.user for post in found] == ["..", "a\nb", "x" * 10_000, "é"]
    assert dropped == {"users_not_utf8": 1}


def test_hdf5_records_that_are_not_sentences_are_dropped(tmp_path: Path) -> None:
    path = changed(tmp_path / "a.h5", [b"\xff", b" ", b"z" * 5_000_000, b"ok"], dtype=h5py.string_dtype())
    assert read(path, TFF_HDF5) == (
        [Post("a", ["x y"]), Post("b", ["ok"]), Post("c", ["x y"])],
        {"records_not_utf8": 1, "records_without_words": 1, "records_too_long": 1},
    )
    with h5py.File(path, "a") as file:
        del file["examples/b/tokens"]
    with pytest.raises(InputError, match=r"a\.h5: client 'b' has no dataset 'tokens'"):
        read(path, TFF_HDF5)


@pytest.mark.parametrize("tokens", [np.arange(3), np.array(b"x"), np.array([[b"x"]]), h5py.Empty("S1")])
def test_tokens_that_are_not_strings(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(InputError, match="client 'b': 'tokens' is not a one-dimensional dataset of strings"):
        read(changed(tmp_path / "a.h5", tokens), TFF_HDF5)


def test_data_in_other_files_is_never_opened(tmp_path: Path) -> None:
    """Links, external storage and virtual datasets are refused, because they can name any other file."""
    write_tff_hdf5(tmp_path / "secret.h5", [("train", "b", "hunter2")])
    (tmp_path / "secret").write_bytes(b"hunter2 ")
    layout = h5py.VirtualLayout((1,), "S8")
    layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "examples/b/tokens", (1,), "S8")
    link = h5py.ExternalLink("secret.h5", "examples/b")
    for what in ("link", "soft", "storage", "virtual"):
        path = changed(tmp_path / f"{what}.h5", [b"x"])
        with h5py.File(path, "a") as file:
            examples = file["examples"]
            del examples["b/tokens"]
            if what == "link":
                del examples["b"]
                examples["b"] = link
            elif what == "soft":
                examples["b/tokens"] = h5py.SoftLink("/examples/a/tokens")
            elif what == "storage":
                examples["b"].create_dataset("tokens", (1,), "S8", external=[(str(tmp_path / "secret"), 0, 8)])
            else:
                examples["b"].create_virtual_dataset("tokens", layout)
        with pytest.raises(InputError, match=r"\.h5: (client 'b'|libhdf5 cannot read it \(.*is a link)"):
            read(path, TFF_HDF5)


def test_users_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users that declare too many or too large records are dropped or refused; a small file can declare any size."""
    monkeypatch.setattr(tff, "USER_RECORDS", 3)
    posts = [Post("a", ["x y"]), Post("c", ["x y"])]
    path = changed(tmp_path / "a.h5", np.array([b"x"] * 4))
    assert read(path, TFF_HDF5) == (posts, {"users_too_large": 1})
    path = changed(tmp_path / "b.h5", np.array([b"x"]), maxshape=(None,), chunks=(2**28 + 1,), compression="gzip")
    assert read(path, TFF_HDF5) == (posts, {"users_too_large": 1})
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("examples/a/tokens", (3,), "S100000000")
    with pytest.raises(InputError, match="client 'a'"):
        read(tmp_path / "c.h5", TFF_HDF5)


def test_a_client_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tff, "SLICE", 2**10)
    texts = [f"sentence {n}" for n in range(200)]
    for fixed in (False, True):
        path = tmp_path / f"{fixed}.h5"
        write_tff_hdf5(path, [("train", "a", text) for text in texts], fixed)
        assert [text for post in read(path, TFF_HDF5)[0] for text in post.sentences] == texts


def test_truncated_files_and_files_without_examples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_tff_hdf5(path, [("train", "a", "x")])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.h5: libhdf5 cannot read it \(.*truncated file"):
        read(path, TFF_HDF5)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_group("train")
    with pytest.raises(InputError, match=r"b\.h5: no group examples; its groups: train"):
        read(tmp_path / "b.h5", TFF_HDF5)
