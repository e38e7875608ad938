"""Compressed sources and pipes: the same corpus as from the plain file, or one line where they are cut or damaged."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import py7zr
import pytest
from backports import zstd
from dumps import folder_bytes, write_jsonl

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.importing.unpack import is_compressed, unpack

SMALL = ImportHParams(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.0, test=0.0)
POSTS = [(number % 5, f"a b c d{number} e f g h. ") for number in range(40)]


def lzma_alone(content: bytes) -> bytes:
    """What TensorFlow Federated publishes its SQLite files as."""
    return lzma.compress(content, lzma.FORMAT_ALONE)


def seven_zip(content: bytes) -> bytes:
    packed = io.BytesIO()
    with py7zr.SevenZipFile(packed, "w") as archive:
        archive.writef(io.BytesIO(content), "posts.jsonl")
    return packed.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lzma_alone,
    "zst": zstd.compress,
    "7z": seven_zip,
}
packers = pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)


@pytest.fixture
def plain(tmp_path: Path) -> bytes:
    return write_jsonl(tmp_path / "plain.jsonl", POSTS).read_bytes()


def import_file(path: Path, name: str = "corpus") -> Corpus:
    return import_corpus([path], path.parent / name, SMALL)


def but_the_manifest(corpus: Corpus) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(corpus.path).items() if name != "manifest.json"}


@packers
def test_packed_is_as_good_as_plain(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "whatever.name"
    packed.write_bytes(packer(plain))
    corpus = import_file(packed)
    assert but_the_manifest(corpus) == but_the_manifest(import_file(tmp_path / "plain.jsonl", "plain"))
    assert corpus.manifest["sources"] == [
        {
            "name": "whatever.name",
            "format": "jsonl",
            "bytes": packed.stat().st_size,
            "sha256": hashlib.sha256(packed.read_bytes()).hexdigest(),
        }
    ]


@packers
def test_a_file_in_several_streams(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    """As pbzip2 and `cat a.gz b.gz` make them. (LZMA alone and 7z have no such thing.)"""
    if packer in (lzma_alone, seven_zip):
        return
    (tmp_path / "packed").write_bytes(packer(plain[:100]) + packer(plain[100:]))
    unpack(lambda amount: None, tmp_path / "packed", tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == plain


@packers
def test_cut_wherever_it_is_cut(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "packed"
    whole = packer(plain)
    for length in range(6, len(whole)):
        packed.write_bytes(whole[:length])
        assert is_compressed(packed)
        with pytest.raises(InputError, match=r"packed: cut short or damaged \([^\n]*\); fetch it again$"):
            unpack(lambda amount: None, packed, packed, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain.jsonl"]
    with pytest.raises(InputError, match=r"packed: cut short or damaged"):
        import_file(packed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain.jsonl"]


@pytest.mark.parametrize("packer", [gzip.compress, bz2.compress, lzma.compress])
def test_damage_is_noticed(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    """By checksums, which LZMA alone has not. The first bytes tell the format, the last may be padding."""
    packed = tmp_path / "packed"
    whole = packer(plain)
    for place in range(len(whole) // 4, len(whole) - 12):
        packed.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"packed: .*damaged"):
            unpack(lambda amount: None, packed, packed, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain.jsonl"]


def test_progress_is_in_bytes_of_the_packed_file(tmp_path: Path) -> None:
    content = hashlib.shake_256(b"noise").digest(3 * 2**20)
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(content))
    reported: list[float] = []
    described = unpack(reported.append, packed, packed, tmp_path / "out")
    assert len(reported) > 2
    assert sum(reported) == described["bytes"] == packed.stat().st_size
    assert (tmp_path / "out").read_bytes() == content


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_as_good_as_a_file(tmp_path: Path, plain: bytes, pack: Callable[[bytes], bytes]) -> None:
    """The real command at the end of a real pipe."""
    packed = pack(plain)
    options = ["--vocabulary", "8", "--words-per-user", "12", "--heldout", "0", "--test", "0"]
    command = [
        sys.executable,
        "-m",
        "flsim",
        "data",
        "import",
        "/dev/stdin",
        "--out",
        str(tmp_path / "piped"),
        *options,
    ]
    subprocess.run(command, input=packed, check=True, capture_output=True)
    piped = Corpus.open(tmp_path / "piped", verify=True)
    expected = import_corpus(
        [tmp_path / "plain.jsonl"], tmp_path / "corpus", ImportHParams(8, words_per_user=12, heldout=0.0, test=0.0)
    )
    assert but_the_manifest(piped) == but_the_manifest(expected)
    (source,) = piped.manifest["sources"]
    assert source["name"] == "stdin"
    assert source["sha256"] == hashlib.sha256(packed).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "piped", "plain.jsonl"]


def test_standard_input_from_a_file(tmp_path: Path, plain: bytes) -> None:
    """Which other processes cannot open under the name /dev/stdin."""
    options = ["--vocabulary", "8", "--words-per-user", "12", "--heldout", "0", "--test", "0", "--workers", "2"]
    command = [sys.executable, "-m", "flsim", "data", "import", "/dev/stdin", "--out", str(tmp_path / "out"), *options]
    with (tmp_path / "plain.jsonl").open("rb") as file:
        subprocess.run(command, stdin=file, check=True, capture_output=True)
    (source,) = Corpus.open(tmp_path / "out", verify=True).manifest["sources"]
    assert source["sha256"] == hashlib.sha256(plain).hexdigest()


def test_a_named_pipe(tmp_path: Path, plain: bytes) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cp", tmp_path / "plain.jsonl", tmp_path / "pipe"]) as writer:
        piped = import_file(tmp_path / "pipe", "piped")
    assert writer.returncode == 0
    assert but_the_manifest(piped) == but_the_manifest(import_file(tmp_path / "plain.jsonl"))
