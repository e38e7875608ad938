"""The site of a Stack Exchange dump is a part of each author's name, and does not depend on compression."""

import bz2
import gzip
import io
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import py7zr
import pytest
from backports import zstd
from dumps import dump, folder_bytes, question
from helpers import Flsim

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats.stackexchange import site_of
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus

HPARAMS = ImportHParams(8, 6, 12, heldout=0.3, test=0.3)
SETTINGS = ("--words-per-user", 12, "--heldout", 0.3, "--test", 0.3, "--vocabulary", 8)
AI, HISTORY = (
    dump(question(str(user), f"{word} b c d e f") for user in range(12) for _ in range(4)).encode() for word in "ah"
)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".zst": zstd.compress,
    ".7z": lambda content: seven_zip({"Posts.xml": content}),
}


def seven_zip(files: dict[str, bytes], password: str | None = None) -> bytes:
    packed = io.BytesIO()
    with py7zr.SevenZipFile(packed, "w", password=password) as archive:
        for name, content in files.items():
            archive.writef(io.BytesIO(content), name)
    return packed.getvalue()


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


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("ai.stackexchange.com.7z", "ai.stackexchange.com"),
        ("stackoverflow.com-Posts.7z", "stackoverflow.com"),
        ("ai.meta.stackexchange.com.7z", "ai.meta.stackexchange.com"),
    ],
)
def test_the_site_of_an_archive_of_the_internet_archive(name: str, site: str) -> None:
    assert site_of(Path(name)) == site


@pytest.mark.parametrize("packing", PACKERS)
def test_two_sites_stay_two_however_they_are_packed(tmp_path: Path, packing: str) -> None:
    """Each site has users of the same numbers."""
    plain = [write(tmp_path / site / "Posts.xml", content) for site, content in (("ai", AI), ("history", HISTORY))]
    packed = [write(path.with_name(f"Posts.xml{packing}"), PACKERS[packing](path.read_bytes())) for path in plain]
    expected = import_corpus(plain, tmp_path / "plain", HPARAMS)
    corpus = import_corpus(packed, tmp_path / "packed", HPARAMS)
    assert authors(corpus) == authors(expected)
    assert len(authors(corpus)) == 24
    files = [folder_bytes(made.path) for made in (expected, corpus)]
    for made in files:
        del made["manifest.json"]  # has the sources' names and digests
    assert files[0] == files[1]


def test_two_sources_of_one_site_are_refused_unless_named(tmp_path: Path, flsim: Flsim) -> None:
    one, two = (
        write(tmp_path / "ai.Posts.xml", AI),
        write(tmp_path / "other" / "ai.Posts.xml.gz", gzip.compress(HISTORY)),
    )
    out = ("--out", tmp_path / "corpus")
    code, _, err = flsim("data", "import", one, two, *SETTINGS, *out)
    assert code == 2
    assert err.splitlines()[-1] == (
        f"flsim: {two}: has the same name 'ai' as {one}, so two authors would become one; "
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
    assert "--site ai: of 2 dumps, so users of equal numbers in them are taken as the same people" in err
    assert authors(Corpus.open(tmp_path / "one")) == {f"ai/{user}" for user in range(12)}


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (("ai",), "found 1 --site for 2 Stack Exchange dumps"),
        (("ai", " "), "--site ' ': not a site; name one, such as ai.stackexchange.com"),
    ],
)
def test_wrong_sites_are_one_line(tmp_path: Path, sites: tuple[str, ...], message: str) -> None:
    sources = [write(tmp_path / f"{name}.Posts.xml", content) for name, content in (("a", AI), ("b", HISTORY))]
    with pytest.raises(InputError) as caught:
        import_corpus(sources, tmp_path / "corpus", HPARAMS, sites=sites)
    assert message in str(caught.value)


def test_a_site_is_of_dumps_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", b'{"user": 1, "text": "a"}')
    with pytest.raises(InputError, match=r"a\.jsonl: remove --site: no source is a Stack Exchange dump"):
        import_corpus([source], tmp_path / "corpus", HPARAMS, sites=["ai"])


def test_a_pipe_needs_a_site(tmp_path: Path) -> None:
    def run(*options: str) -> "subprocess.CompletedProcess[bytes]":
        command = [
            sys.executable,
            "-m",
            "flsim",
            "data",
            "import",
            "/dev/stdin",
            "--out",
            str(tmp_path / "corpus"),
            *options,
        ]
        return subprocess.run([*command, *map(str, SETTINGS)], input=AI, capture_output=True)

    refused = run()
    assert refused.returncode == 2
    assert b"flsim: /dev/stdin: a pipe has no name that tells the site of a dump; add --site NAME\n" in refused.stderr
    assert run("--site", "ai").returncode == 0
    assert authors(Corpus.open(tmp_path / "corpus")) == {f"ai/{user}" for user in range(12)}


def test_authors_of_plain_text_do_not_depend_on_compression_either(tmp_path: Path) -> None:
    content = b"some words of text\n" * 30
    write(tmp_path / "a.txt", content)
    write(tmp_path / "a.txt.gz", gzip.compress(content))
    made = [
        import_corpus([tmp_path / name], tmp_path / f"{name}-corpus", HPARAMS, lines_per_author=5)
        for name in ("a.txt", "a.txt.gz")
    ]
    assert authors(made[0]) == authors(made[1])
    other = write(tmp_path / "other" / "a.txt", b"other words of text\n" * 30)
    with pytest.raises(InputError, match=r"a\.txt: has the same name 'a\.txt' as .*; rename one of the files"):
        import_corpus([tmp_path / "a.txt", other], tmp_path / "corpus", HPARAMS)


def test_an_archive_of_several_files_is_read_for_its_posts(tmp_path: Path) -> None:
    archive = write(tmp_path / "ai.7z", seven_zip({"Users.xml": b"<users/>", "Posts.xml": AI, "Tags.xml": b"<tags/>"}))
    assert authors(import_corpus([archive], tmp_path / "corpus", HPARAMS)) == {f"ai/{user}" for user in range(12)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (seven_zip({"Posts.xml": AI})[:-9], "cut short or damaged"),
        (seven_zip({"Posts.xml": AI})[:40] + b"xxxx" + seven_zip({"Posts.xml": AI})[44:], "cut short or damaged"),
        (seven_zip({"Posts.xml": AI}, password="secret"), "encrypted; unpack it first|cut short or damaged"),
        (seven_zip({"a.xml": AI, "b.xml": AI}), "needs 1 file or Posts.xml, found 'a.xml, b.xml'"),
        (seven_zip({}), "found 'none'|cut short or damaged"),
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


def test_names_in_an_archive_are_no_paths(tmp_path: Path) -> None:
    """The content goes to one file of the import, whatever the archive calls it."""
    archive = write(tmp_path / "ai.7z", seven_zip({"sub/Posts.xml": AI}))
    import_corpus([archive], tmp_path / "corpus", HPARAMS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ai.7z", "corpus"]


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
    with pytest.raises(InputError, match=r"RC_2026-01\.zst: cut short or damaged"):
        import_corpus([path], tmp_path / "cut", hparams)
