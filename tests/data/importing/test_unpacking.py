"""Compressed sources and archives give the corpus of the plain file, and sites are parts of the names of authors."""

import bz2
import gzip
import hashlib
import io
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import py7zr
import pytest
from backports import zstd
from dumps import dump, folder_bytes, question, write_jsonl
from helpers import Flsim

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats.stackexchange import site_of
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.sources import is_compressed, unpack
from flsim.data.importing.tasks import import_corpus

SMALL = ImportHParams(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.0, test=0.0)
POSTS = [(number % 5, f"a b c d{number} e f g h. ") for number in range(40)]


def seven_zip(files: dict[str, bytes], password: str | None = None) -> bytes:
    packed = io.BytesIO()
    with py7zr.SevenZipFile(packed, "w", password=password) as archive:
        for name, content in files.items():
            archive.writef(io.BytesIO(content), name)
    return packed.getvalue()


# TensorFlow Federated publishes its SQLite files as LZMA without a container.
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".zst": zstd.compress,
    ".7z": lambda content: seven_zip({"Posts.xml": content}),
}

packers = pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)  # each packs a single file


@pytest.fixture
def plain(tmp_path: Path) -> bytes:
    return write_jsonl(tmp_path / "plain.jsonl", POSTS).read_bytes()


def import_file(path: Path, name: str = "corpus") -> Corpus:
    return import_corpus([path], path.parent / name, SMALL)


@packers
def test_a_packed_source_gives_the_same_corpus(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "whatever.name"
    packed.write_bytes(packer(plain))
    corpus = import_file(packed)
    expected = import_file(tmp_path / "plain.jsonl", "plain")
    assert folder_bytes(corpus.path, "manifest.json") == folder_bytes(expected.path, "manifest.json")
    assert corpus.manifest["sources"] == [
        {
            "name": "whatever.name",
            "format": "jsonl",
            "bytes": packed.stat().st_size,
            "sha256": hashlib.sha256(packed.read_bytes()).hexdigest(),
        }
    ]


@pytest.mark.parametrize("packer", [PACKERS[name] for name in (".gz", ".bz2", ".xz", ".zst")])
def test_a_file_in_several_streams(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    """Such files are written by pbzip2 and `cat a.gz b.gz`. Bare LZMA and 7z files do not have several streams."""
    (tmp_path / "packed").write_bytes(packer(plain[:100]) + packer(plain[100:]))
    unpack(lambda amount: None, tmp_path / "packed", tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == plain


@packers
def test_truncated_packed_files_are_refused(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "packed"
    whole = packer(plain)
    for length in range(6, len(whole), 1 if len(whole) < 400 else 5):
        packed.write_bytes(whole[:length])
        assert is_compressed(packed)
        with pytest.raises(InputError, match=r"packed: the .* is truncated or damaged \([^\n]*\); download it again$"):
            unpack(lambda amount: None, packed, packed, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain.jsonl"]
    with pytest.raises(InputError, match=r"packed: the .* is truncated or damaged"):
        import_file(packed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain.jsonl"]


@pytest.mark.parametrize("packer", [gzip.compress, bz2.compress, lzma.compress])
def test_damage_is_noticed(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
    """Checksums detect damage; bare LZMA has none. The first bytes tell the format, and the last may be padding."""
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


# The site of a Stack Exchange dump is a part of each author's name, and does not depend on compression.

HPARAMS = ImportHParams(8, 6, 12, heldout=0.3, test=0.3)
SETTINGS = ("--words-per-user", 12, "--heldout", 0.3, "--test", 0.3, "--vocabulary", 8)
AI, HISTORY = (
    dump(question(str(user), f"{word} b c d e f") for user in range(12) for _ in range(4)).encode() for word in "ah"
)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def authors(corpus: Corpus) -> set[str]:
    return {name.partition("#")[0] for split in ("train", "heldout", "test") for name in corpus.split(split).names}


def test_the_site_is_in_the_name_without_compression_endings() -> None:
    sites = {
        "ai.Posts.xml": "ai",
        "history.meta.Posts.xml": "history.meta",
        "ai.stackexchange.com/Posts.xml": "ai.stackexchange.com",
        "ai/posts.XML": "ai",
        "stackoverflow.com-Posts.xml": "stackoverflow.com",
        "ai_posts.xml": "ai",
    }
    for name, site in sites.items():
        for packing in ("", *PACKERS, ".GZ"):
            assert site_of(Path("dumps") / f"{name}{packing}") == site
    assert site_of(Path("ai.meta.stackexchange.com.7z")) == "ai.meta.stackexchange.com"
    assert site_of(Path("stackoverflow.com-Posts.7z")) == "stackoverflow.com"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (seven_zip({"Posts.xml": AI})[:40] + b"xxxx" + seven_zip({"Posts.xml": AI})[44:], "truncated or damaged"),
        (seven_zip({"Posts.xml": AI}, password="secret"), "encrypted; unpack it first|truncated or damaged"),
        (seven_zip({"a.xml": AI, "b.xml": AI}), "the archive must have 1 file or Posts.xml, found 'a.xml, b.xml'"),
        (seven_zip({}), "found 'none'|truncated or damaged"),
    ],
)
def test_archives_that_cannot_be_read_are_one_line(tmp_path: Path, flsim: Flsim, content: bytes, message: str) -> None:
    archive = write(tmp_path / "ai.7z", content)
    code, _, err = flsim("data", "import", archive, *SETTINGS, "--out", tmp_path / "corpus")
    assert code == 2
    line = err.splitlines()[-1]
    assert line.startswith(f"flsim: {archive}: ")
    assert any(part in line for part in message.split("|")), line
    assert not list(tmp_path.glob("*corpus*"))


def test_without_py7zr_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py7zr", None)  # an import of it fails
    archive = write(tmp_path / "ai.7z", seven_zip({"Posts.xml": AI}))
    with pytest.raises(InputError, match=r"ai\.7z: 7z archives need py7zr, the extra '7z', which is not installed"):
        import_corpus([archive], tmp_path / "corpus", HPARAMS)


def test_zstd_with_the_largest_window(tmp_path: Path) -> None:
    """Dumps of Reddit are compressed with a window of 2 GB, which decoders refuse unless an option allows it."""
    content = b'{"user": "a", "text": "some words of text here"}\n' * 100
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 31,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
    }
    packer = zstd.ZstdCompressor(options=options)
    packed = packer.compress(content) + packer.flush()
    path = write(tmp_path / "RC_2026-01.zst", packed + zstd.compress(content))  # two frames
    hparams = ImportHParams(8, 6, 12, heldout=0, test=0)
    corpus = import_corpus([path], tmp_path / "corpus", hparams)
    assert corpus.manifest["parameters"]["read"]["posts"] == 200
    write(path, packed[:-5])
    with pytest.raises(InputError, match=r"RC_2026-01\.zst: the file is truncated or damaged"):
        import_corpus([path], tmp_path / "cut", hparams)


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    sources = [write(tmp_path / "ai.Posts.xml", AI), write(tmp_path / "other/ai.Posts.xml.gz", gzip.compress(HISTORY))]
    with pytest.raises(InputError, match=r"has the same name 'ai' as .*; rename one of the"):
        import_corpus(sources, tmp_path / "corpus", HPARAMS)
    sources = [write(tmp_path / name, f"some words of {name}\n".encode() * 30) for name in ("a.txt", "other/a.txt")]
    with pytest.raises(InputError, match=r"has the same name 'a\.txt' as .*; rename one of the"):
        import_corpus(sources, tmp_path / "corpus", HPARAMS)


def test_an_archive_of_several_files_is_read_for_its_posts(tmp_path: Path) -> None:
    """The content of the posts goes to one file of the import, for any path in the archive."""
    files = {"Users.xml": b"<users/>", "sub/Posts.xml": AI, "Tags.xml": b"<tags/>"}
    archive = write(tmp_path / "ai.7z", seven_zip(files))
    assert authors(import_corpus([archive], tmp_path / "corpus", HPARAMS)) == {f"ai/{user}" for user in range(12)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ai.7z", "corpus"]
