"""Compressed sources, archives and pipes give the corpus of the plain file; sites are parts of names of authors."""

import bz2
import gzip
import hashlib
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd
from dumps import PACKERS, dump, folder_bytes, question, seven_zip, write_jsonl
from helpers import Flsim

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats.stackexchange import site_of
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.importing.unpack import is_compressed, unpack

SMALL = ImportHParams(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.0, test=0.0)
POSTS = [(number % 5, f"a b c d{number} e f g h. ") for number in range(40)]


packers = pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)  # each file is of one content


@pytest.fixture
def plain(tmp_path: Path) -> bytes:
    return write_jsonl(tmp_path / "plain.jsonl", POSTS).read_bytes()


def import_file(path: Path, name: str = "corpus") -> Corpus:
    return import_corpus([path], path.parent / name, SMALL)


@packers
def test_packed_is_as_good_as_plain(tmp_path: Path, plain: bytes, packer: Callable[[bytes], bytes]) -> None:
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
    """As pbzip2 and `cat a.gz b.gz` make them. (LZMA alone and 7z have no such thing.)"""
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
        with pytest.raises(InputError, match=r"packed: the .* is truncated or damaged \([^\n]*\); download it again$"):
            unpack(lambda amount: None, packed, packed, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "plain.jsonl"]
    with pytest.raises(InputError, match=r"packed: the .* is truncated or damaged"):
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


def test_a_pipe_is_as_good_as_a_file(tmp_path: Path, plain: bytes) -> None:
    """The real command at the end of a real pipe."""
    packed = gzip.compress(plain)
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
    assert folder_bytes(piped.path, "manifest.json") == folder_bytes(expected.path, "manifest.json")
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


@pytest.mark.parametrize("packing", ["", *PACKERS, ".GZ", ".Bz2"])
@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("ai.Posts.xml", "ai"),
        ("history.meta.Posts.xml", "history.meta"),
        ("ai.stackexchange.com/Posts.xml", "ai.stackexchange.com"),
        ("ai/posts.XML", "ai"),
        ("stackoverflow.com-Posts.xml", "stackoverflow.com"),
        ("ai_posts.xml", "ai"),
    ],
)
def test_compression_changes_no_site(name: str, site: str, packing: str) -> None:
    assert site_of(Path("dumps") / f"{name}{packing}") == site


def test_the_site_of_an_archive_of_the_internet_archive() -> None:
    assert site_of(Path("ai.meta.stackexchange.com.7z")) == "ai.meta.stackexchange.com"
    assert site_of(Path("stackoverflow.com-Posts.7z")) == "stackoverflow.com"


def test_two_sources_of_one_site_are_refused_unless_named(tmp_path: Path, flsim: Flsim) -> None:
    one, two = (
        write(tmp_path / "ai.Posts.xml", AI),
        write(tmp_path / "other" / "ai.Posts.xml.gz", gzip.compress(HISTORY)),
    )
    out = ("--out", tmp_path / "corpus")
    code, _, err = flsim("data", "import", one, two, *SETTINGS, *out)
    assert code == 2
    assert err.splitlines()[-1] == (
        f"flsim: {two}: has the same name 'ai' as {one}, so two authors would become one author; "
        "add --site NAME once for each dump, in their order"
    )
    assert not list(tmp_path.glob("*corpus*"))
    code, _, err = flsim("data", "import", one, two, "--site", "ai", "--site", "history", *SETTINGS, *out)
    assert code == 0, err
    corpus = Corpus.open(tmp_path / "corpus")
    assert {name.partition("/")[0] for name in authors(corpus)} == {"ai", "history"}
    assert [source["site"] for source in corpus.manifest["sources"]] == ["ai", "history"]
    code, _, err = flsim(
        "data", "import", one, two, "--site", "ai", "--site", "ai", *SETTINGS, "--out", tmp_path / "one"
    )
    assert code == 0, err
    assert "--site ai: of 2 dumps, so equal user numbers in these dumps count as the same person" in err
    assert authors(Corpus.open(tmp_path / "one")) == {f"ai/{user}" for user in range(12)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (seven_zip({"Posts.xml": AI})[:-9], "truncated or damaged"),
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
    monkeypatch.setattr("flsim.data.importing.unpack.py7zr", None)
    archive = write(tmp_path / "ai.7z", seven_zip({"Posts.xml": AI}))
    with pytest.raises(
        InputError, match=r"ai\.7z: 7z archives need py7zr, the extra '7z', which is not installed; pip"
    ):
        import_corpus([archive], tmp_path / "corpus", HPARAMS)


def test_zstd_with_the_largest_window(tmp_path: Path) -> None:
    """Dumps of Reddit are compressed with a window of 2 GB, which decoders refuse unless they are told."""
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


@pytest.mark.parametrize(
    ("names", "sites", "message"),
    [
        (("a.Posts.xml", "b.Posts.xml"), ("ai",), "found 1 --site for 2 Stack Exchange dumps"),
        (("a.Posts.xml",), (" ",), "--site ' ': not a site; name a site, such as ai.stackexchange.com"),
        (("a.jsonl",), ("ai",), "a.jsonl: no source is a Stack Exchange dump; remove --site"),
        (("a.txt", "other/a.txt"), (), "has the same name 'a.txt' as"),
    ],
)
def test_wrong_sites_are_one_line(tmp_path: Path, names: tuple[str, ...], sites: tuple[str, ...], message: str) -> None:
    contents = {".xml": AI, ".jsonl": b'{"user": 1, "text": "a"}', ".txt": b"some words of text\n" * 30}
    sources = [
        write(tmp_path / name, contents[Path(name).suffix] + b"\n" * number) for number, name in enumerate(names)
    ]
    with pytest.raises(InputError) as caught:
        import_corpus(sources, tmp_path / "corpus", HPARAMS, sites=sites)
    assert message in str(caught.value)


def test_a_pipe_needs_a_site(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flsim", "data", "import", "/dev/stdin", "--out", str(tmp_path / "corpus")]
    refused = subprocess.run([*command, *map(str, SETTINGS)], input=AI, capture_output=True)
    assert refused.returncode == 2
    assert b"flsim: /dev/stdin: the site of a dump cannot be detected from a pipe; add --site NAME\n" in refused.stderr


def test_an_archive_of_several_files_is_read_for_its_posts(tmp_path: Path) -> None:
    """The content goes to one file of the import, whatever path the archive calls it by."""
    files = {"Users.xml": b"<users/>", "sub/Posts.xml": AI, "Tags.xml": b"<tags/>"}
    archive = write(tmp_path / "ai.7z", seven_zip(files))
    assert authors(import_corpus([archive], tmp_path / "corpus", HPARAMS)) == {f"ai/{user}" for user in range(12)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ai.7z", "corpus"]
