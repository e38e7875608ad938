import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from reading import read

from benchmarks.writers import write_pfl
from flsim.base.errors import InputError
from flsim.data.formats.known import FORMATS

FORMAT = "pfl-hdf5"
WORDS = [".", "the", "/", "a/b"]  # PAD 0, words 1 to 4, UNK 5, BOS 6, EOS 7
PAD, UNK, BOS, EOS = 0, 5, 6, 7


def file(path: Path, **datasets: Any) -> Path:
    """One sentence ``the .`` of one user, with other datasets where given; None takes them away."""
    write_pfl(path, [("train", "u", "the .")], WORDS, longest=4)
    with h5py.File(path, "a") as h5:
        for name, value in datasets.items():
            del h5[f"train/u/{name}"]
            if value is not None:
                h5[f"train/u/{name}"] = value
    return path


def test_the_schema_is_the_published_one(tmp_path: Path) -> None:
    """That of benchmarks/dataset/stackoverflow/download_preprocess.py of pfl-research."""
    with h5py.File(file(tmp_path / "a.hdf5")) as h5:
        assert sorted(h5) == ["metadata", "train"]
        assert h5["train/u/inputs"][:].tolist() == [[BOS, 2, 1, EOS]]
        assert h5["train/u/targets"][:].tolist() == [[2, 1, EOS, PAD]]
        assert h5["train/u/targets"].dtype == np.int32
        assert h5["metadata/vocabulary_size"][()] == 8
        assert (h5["metadata/pad_symbol"][()], h5["metadata/unk_symbol"][()]) == (PAD, UNK)
        assert h5['metadata/vocabulary/"a/b"'][()] == 4
        assert isinstance(h5['metadata/vocabulary/"a'], h5py.Group)
        assert json.loads(h5["metadata/num_tokens/train"][()]) == {"u": 4}


def test_sentences_of_every_length(tmp_path: Path) -> None:
    """[BOS, words, EOS][:21] holds all of the first 20 words, the twentieth in the targets only."""
    path = tmp_path / "a.hdf5"
    texts = [" ".join(["the", ".", "/", "a/b", "rare"][: n % 6] + ["the"] * (n - n % 6)) for n in range(25)]
    write_pfl(path, [("heldout", "u", text) for text in texts], WORDS)
    (post,), dropped = read(path, FORMAT)
    assert (post.user, post.split) == ("u", "heldout")
    assert post.sentences == [" ".join(text.replace("rare", "<oov>").split()[:20]) for text in texts[1:]]
    assert dropped == {"records_without_words": 1}


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"targets": None}, "has no inputs and targets"),
        ({"inputs": [[0.5]]}, "are not integers"),
        ({"targets": [[2, 1, 7]]}, r"inputs of shape \(1, 4\), but targets of shape \(1, 3\)"),
        ({"inputs": [6, 2, 1, 7], "targets": [2, 1, 7, 0]}, r"inputs of shape \(4,\)"),
        ({"targets": [[2, 1, 7, 8]]}, "a token id outside of the vocabulary of 8"),
        ({"inputs": [[1, 2, 1, 7]]}, "inputs must be BOS followed by all targets except the last"),
        ({"targets": [[1, 2, 7, 0]]}, "inputs must be BOS followed by all targets except the last"),
        ({"inputs": [[6, 2, 7, 1]], "targets": [[2, 7, 1, 0]]}, "continues after its end"),
        ({"inputs": [[6, 2, 6, 1]], "targets": [[2, 6, 1, 7]]}, "continues after its end"),
    ],
)
def test_inconsistent_users_are_named(tmp_path: Path, datasets: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"a\.hdf5: user 'u'.*{message}"):
        read(file(tmp_path / "a.hdf5", **datasets), FORMAT)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocabulary_size", 9, "not one token for each id below vocabulary_size 9"),
        ("vocabulary_size", 10**9, "vocabulary_size 1,000,000,000"),
        ('vocabulary/"the"', 1, "not one token for each id"),
        ('vocabulary/"the"', b"x", "cannot read it"),
        ("unk_symbol", 0, "lacks BOS, EOS, unk_symbol and pad_symbol as different tokens"),
        ("pad_symbol", None, "cannot read it"),
    ],
)
def test_inconsistent_vocabularies(tmp_path: Path, name: str, value: Any, message: str) -> None:
    path = file(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as h5:
        del h5[f"metadata/{name}"]
        if value is not None:
            h5[f"metadata/{name}"] = value
    with pytest.raises(InputError, match=message):
        FORMATS[FORMAT].parts(path, path, ("", ""))


def test_words_that_are_none_and_groups_without_end(tmp_path: Path) -> None:
    path = file(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as h5:
        h5.move('metadata/vocabulary/"the"', 'metadata/vocabulary/"t he"')
    with pytest.raises(InputError, match="'t he' of the vocabulary is not a word"):
        read(path, FORMAT)
    path = file(tmp_path / "b.hdf5")
    with h5py.File(path, "a") as h5:
        h5["metadata/vocabulary/again"] = h5["metadata/vocabulary"]
    with pytest.raises(InputError, match=r"b\.hdf5"):
        read(path, FORMAT)


def test_users_are_compared_with_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    write_pfl(path, [("train", "a", "the"), ("train", "b", "the"), ("test", "a", "the")], WORDS)
    check = FORMATS[FORMAT].check
    assert check(path, path) == []
    with h5py.File(path, "a") as h5:
        del h5["train/b"]
    assert check(path, path) == [f"{path}: num_tokens counts 2 users of train, but there are 1"]


def test_no_split_is_there(tmp_path: Path) -> None:
    path = file(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as h5:
        del h5["train"]
    with pytest.raises(InputError, match="no group train or val or test; its groups: metadata"):
        read(path, FORMAT)
