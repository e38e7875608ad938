from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import read

from flsim.base.errors import InputError
from flsim.data.formats import parquet, posts
from flsim.data.formats.known import FORMATS
from flsim.data.formats.posts import Post

FORMAT = "parquet"


def write(path: Path, row_group_size: int = 2, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("user", [pa.string(), pa.large_string(), pa.string_view(), pa.int8(), pa.uint64()])
@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view()])
def test_kinds_of_columns(tmp_path: Path, user: Any, text: Any) -> None:
    names = pa.array(["7", "8", "7"], pa.string()).cast(pa.int64()).cast(user) if "int" in str(user) else None
    users = names if names is not None else pa.array(["7", "8", "7"], user)
    path = write(tmp_path / "a.parquet", user=users, text=pa.array(["A b. C", "d", ""], text), other=[1, 2, 3])
    assert read(path, FORMAT)[0] == [Post("7", ["a b .", "c"]), Post("8", ["d"])]


def test_dictionaries(tmp_path: Path) -> None:
    users = pa.array([7, 8, 7]).dictionary_encode()
    texts = pa.array(["a", "b", "b"]).dictionary_encode()
    path = write(tmp_path / "a.parquet", user=users, text=texts)
    assert read(path, FORMAT)[0] == [Post("7", ["a"]), Post("8", ["b"]), Post("7", ["b"])]


def test_nulls_and_long_texts_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "a.parquet", user=["a", None, None, "b", "c"], text=["x", "x", None, None, "y" * 50_000_000]
    )
    found, dropped = read(path, FORMAT)
    assert found == [Post("a", ["x"])]
    assert dropped == {"posts_without_user": 2, "posts_without_text": 1, "posts_too_long": 1}


def test_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", author=["a"], body=["b"], n=[0.5])
    assert read(path, FORMAT, columns=("author", "body"))[0] == [Post("a", ["b"])]
    with pytest.raises(InputError, match=r"a\.parquet: no column 'user'; its columns are author, body, n"):
        read(path, FORMAT)
    with pytest.raises(InputError, match=r"column 'n' must be a string or an integer, found 0\.5"):
        read(path, FORMAT, columns=("n", "body"))
    with pytest.raises(InputError, match="column 'n' has double, not strings or lists of strings"):
        read(path, FORMAT, columns=("author", "n"))


def test_row_groups_make_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", row_group_size=10, user=[str(n) for n in range(95)], text=["a"] * 95)
    for size, parts in ((1, 10), (10, 10), (11, 5), (30, 4), (1_000, 1)):
        monkeypatch.setattr(posts, "PART_RECORDS", size)
        assert len(FORMATS[FORMAT].parts(path, path, ("user", "text"))) == parts
        assert [post.user for post in read(path, FORMAT)[0]] == [str(n) for n in range(95)]
    nothing = pa.array([], pa.string())
    assert read(write(tmp_path / "b.parquet", user=nothing, text=nothing), FORMAT) == ([], {})


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 1, raw.buffers())
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as Parquet \('utf-8' codec"):
        read(write(tmp_path / "a.parquet", user=["a"], text=text), FORMAT)


def test_cut_short_and_not_parquet(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=["a"], text=["b"])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as Parquet \(.*\); check that it is complete"):
        read(path, FORMAT)
    assert path.read_bytes()[:4] == parquet.MAGIC
