from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reading import read

from benchmarks.writers import write_tff_hdf5
from flsim.base.errors import InputError
from flsim.data.formats import hdf5
from flsim.data.formats.posts import Post

FORMAT = "tff-hdf5"


def changed(path: Path, tokens: Any, **options: Any) -> Path:
    """A file of clients a, b and c, with other tokens for b."""
    write_tff_hdf5(path, [("train", client, "x y") for client in "abc"])
    with h5py.File(path, "a") as file:
        del file["examples/b/tokens"]
        file["examples/b"].create_dataset("tokens", data=tokens, **options)
    return path


def test_the_schema_is_the_published_one(tmp_path: Path) -> None:
    for fixed in (False, True):
        path = tmp_path / f"{fixed}.h5"
        write_tff_hdf5(path, [("train", "00000010", "a"), ("train", "00000010", "b c")], fixed)
        with h5py.File(path) as file:
            client = file["examples/00000010"]
            assert list(client) == ["creation_date", "score", "tags", "title", "tokens", "type"]
            assert {dataset.shape for dataset in client.values()} == {(2,)}
            assert client["score"].dtype == np.int64
            assert client["tokens"][:].tolist() == [b"a", b"b c"]
            assert (client["tokens"].dtype.kind == "S") == fixed


@pytest.mark.parametrize(
    ("name", "split"),
    [("stackoverflow_held_out.h5", "heldout"), ("stackoverflow_train.h5.bz2", "train"), ("my.h5", None)],
)
def test_the_split_is_in_the_name_that_the_user_gave(tmp_path: Path, name: str, split: str | None) -> None:
    write_tff_hdf5(tmp_path / "scratch", [("train", "8", "a")])
    assert read(tmp_path / "scratch", FORMAT, Path(name))[0] == [Post("8", ["a"], split)]


def test_names_are_in_the_order_of_the_file_and_may_be_any(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_tff_hdf5(path, [("train", name, "x") for name in ("é", "..", "x" * 10_000, "a\nb")])
    with h5py.File(path, "a") as file:
        file["examples"].copy("é", b"\xff")
    found, dropped = read(path, FORMAT)
    assert [post.user for post in found] == ["..", "a\nb", "x" * 10_000, "é"]
    assert dropped == {"users_not_utf8": 1}


def test_records_that_are_no_sentences(tmp_path: Path) -> None:
    path = changed(tmp_path / "a.h5", [b"\xff", b" ", b"z" * 50_000_000, b"ok"], dtype=h5py.string_dtype())
    assert read(path, FORMAT) == (
        [Post("a", ["x y"]), Post("b", ["ok"]), Post("c", ["x y"])],
        {"records_not_utf8": 1, "records_without_words": 1, "records_too_long": 1},
    )


def test_a_client_without_tokens_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path / "a.h5", [b"x"])
    with h5py.File(path, "a") as file:
        del file["examples/b/tokens"]
    with pytest.raises(InputError, match=r"a\.h5: client 'b' has no dataset 'tokens'"):
        read(path, FORMAT)


@pytest.mark.parametrize("tokens", [np.arange(3), np.array(b"x"), np.array([[b"x"]]), h5py.Empty("S1")])
def test_tokens_that_are_not_strings(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(InputError, match="client 'b': 'tokens' is not one row of strings in this file"):
        read(changed(tmp_path / "a.h5", tokens), FORMAT)


def test_data_in_other_files_is_never_opened(tmp_path: Path) -> None:
    """Links, external storage, virtual datasets: a file may name any other file."""
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
            read(path, FORMAT)


def test_users_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared sizes cost a file nothing."""
    monkeypatch.setattr(hdf5, "USER_RECORDS", 3)
    posts = [Post("a", ["x y"]), Post("c", ["x y"])]
    path = changed(tmp_path / "a.h5", np.array([b"x"] * 4))
    assert read(path, FORMAT) == (posts, {"users_too_large": 1})
    path = changed(tmp_path / "b.h5", np.array([b"x"]), maxshape=(None,), chunks=(2**28 + 1,), compression="gzip")
    assert read(path, FORMAT) == (posts, {"users_too_large": 1})
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("examples/a/tokens", (3,), "S100000000")
    with pytest.raises(InputError, match="client 'a'"):
        read(tmp_path / "c.h5", FORMAT)


def test_a_client_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "SLICE", 2**10)
    texts = [f"sentence {n}" for n in range(200)]
    for fixed in (False, True):
        path = tmp_path / f"{fixed}.h5"
        write_tff_hdf5(path, [("train", "a", text) for text in texts], fixed)
        assert [text for post in read(path, FORMAT)[0] for text in post.sentences] == texts


def test_cut_short_and_without_examples(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_tff_hdf5(path, [("train", "a", "x")])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.h5: libhdf5 cannot read it \(.*truncated file.*\); is it complete\?"):
        read(path, FORMAT)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_group("train")
    with pytest.raises(InputError, match=r"b\.h5: no group examples; its groups: train"):
        read(tmp_path / "b.h5", FORMAT)
