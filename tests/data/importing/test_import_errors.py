"""Bad input: one line that says what, where and what to do; and nothing is left behind, whatever goes wrong."""

import shutil
from pathlib import Path

import pytest
from dumps import dump, folder_bytes, peak_kilobytes, question, write_jsonl

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus
from flsim.data.importing.tasks import merge

SMALL = ImportHParams(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.0, test=0.0)
TEXT = "a b c d e f g h. " * 3


def import_folder(folder: Path, hparams: ImportHParams = SMALL, format: str | None = None) -> Corpus:
    """Import all files of a folder, in order of name."""
    return import_corpus(sorted(folder.iterdir()), folder.parent / "corpus", hparams, format)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    return folder


def nothing_but(folder: Path) -> bool:
    return list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.log",
            b"user\ttext\n1\ta\n",
            r"a\.log: begins with b'user.*, which is not a known format; known are .*py:NAME",
        ),
        ("a.log", b"", r"a\.log: the file is empty, so its format cannot be detected"),
        ("a.zip", b"PK\x03\x04", r"a\.zip: the file is compressed; decompress it first"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c\0\4", r"a\.7z: the archive is truncated or damaged"),
        ("a.tsv", b"user\ttext\n1\ta\tb\n", r"a\.tsv: line 2: a row of 3 fields, but the header has 2"),
        ("a.xml", b"\x1f\x8b\x08", r"a\.xml: the file is truncated or damaged"),
        ("a.jsonl", b"", r"a\.jsonl: no text of any user in 0 posts"),
        ("a.jsonl", b'{"user": 1, "text": "\xe2\x80\x8b"}', r"a\.jsonl: no text of any user in 1 posts"),
        ("a.json", b"[1]", r"a\.json: line 1: not a JSON object"),
        ("a.json", b'[{"user": 1, "text": "a"}', r"a\.json: line 1: not JSON \(expected ',', found the end\)"),
        ("a.xml", b'{"user": 1, "text": "a b c"}', "no user has 12 words; the longest, '1', has 3: import more text"),
        ("a.jsonl", b"<users/>", "the root element is <users>"),
        ("a.jsonl", b'{"user": "one", "text": "... !"}', r"a\.jsonl: no user has words, only punctuation$"),
        ("a.jsonl", b'{"user": 1, "text": "a b"}\n{"user": 1, "te', r"a\.jsonl: line 2: not JSON"),
    ],
)
def test_bad_sources(sources: Path, name: str, content: bytes, message: str) -> None:
    (sources / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        import_folder(sources)
    assert "\n" not in str(caught.value)
    assert nothing_but(sources)


def test_a_missing_source_is_found_before_anything_is_read(sources: Path) -> None:
    broken = sources / "a.Posts.xml"
    broken.write_text("<posts>")
    with pytest.raises(InputError, match=r"no\.xml: cannot be read \(No such file or directory\)"):
        import_corpus([broken, sources / "no.xml"], sources.parent / "corpus", SMALL)
    assert nothing_but(sources)


def test_folders_and_nothing_are_no_sources(sources: Path) -> None:
    with pytest.raises(InputError, match="a folder; name the files in it"):
        import_corpus([sources], sources.parent / "corpus", SMALL)
    with pytest.raises(InputError, match="name at least one file"):
        import_corpus([], sources.parent / "corpus", SMALL)
    assert nothing_but(sources)


def test_a_forced_format_is_obeyed_and_must_exist(sources: Path) -> None:
    write_jsonl(sources / "a.jsonl", [(1, TEXT)])
    with pytest.raises(InputError, match="line 1, column 1: "):
        import_folder(sources, format="stackexchange")
    with pytest.raises(InputError, match=r"format must be one of .*jsonl.*, found 'tsv'"):
        import_folder(sources, format="tsv")
    assert nothing_but(sources)


def test_the_same_content_twice(sources: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(sources / name, [(1, TEXT)])
    with pytest.raises(InputError, match=r"b\.jsonl: has the same content as .*a\.jsonl; name only one"):
        import_folder(sources)
    assert nothing_but(sources)


def test_nobody_is_left_to_train_on(sources: Path) -> None:
    write_jsonl(sources / "a.jsonl", [(1, TEXT)])
    write_jsonl(sources / "b.jsonl", [(2, TEXT)])
    with pytest.raises(InputError, match=r"a\.jsonl and 1 more: no train users, because heldout and test have all 2"):
        import_folder(sources, ImportHParams(8, 6, 12, heldout=0.49999, test=0.49999))
    assert nothing_but(sources)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocabulary_size": 4}, "vocabulary size must be between 5 and 16,777,216, found 4"),
        ({"record_words": 0}, "record_words must be at least 1, found 0"),
        ({"heldout": 0.5, "test": 0.5}, r"heldout \+ test must be less than 1"),
    ],
)
def test_hparams_that_make_no_sense(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImportHParams(**values)  # type: ignore[arg-type]


def test_a_cut_dump_leaves_nothing_wherever_it_is_cut(sources: Path) -> None:
    content = dump([question(str(owner), f"<p>{TEXT}</p>") for owner in range(6)]).encode("utf-8-sig")
    whole = content.index(b"</posts>") + len(b"</posts>")
    path = sources / "a.Posts.xml"
    for length in [*range(0, 60, 5), *range(60, whole, 43), *range(whole - 12, whole, 3)]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"a\.Posts\.xml: line \d+, column \d+: "):
            import_folder(sources)
        assert nothing_but(sources), length
    path.write_bytes(content[:whole])
    assert len(import_folder(sources).split("train")) == 6


def stop(*arguments: object, **named: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "step",
    [
        "formats.posts.post_of",
        "importing.gather._encode",
        "importing.tasks.merge",
        "importing.tasks.CorpusWriter.finish",
    ],
)
def test_an_interrupt_leaves_what_the_same_import_continues_with(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    write_jsonl(sources / "a.jsonl", [(1, TEXT)])
    expected = folder_bytes(import_folder(sources).path)
    shutil.rmtree(sources.parent / "corpus")
    with monkeypatch.context() as patch:
        patch.setattr(f"flsim.data.{step}", stop)
        with pytest.raises(KeyboardInterrupt):
            import_folder(sources)
    assert sorted(path.name for path in sources.parent.iterdir()) == [".corpus.importing", "sources"]
    assert capsys.readouterr().err.endswith(".corpus.importing: interrupted; repeat the command to continue\n")
    assert folder_bytes(import_folder(sources).path) == expected
    assert "continuing an interrupted import" in capsys.readouterr().err
    assert sorted(path.name for path in sources.parent.iterdir()) == ["corpus", "sources"]


def test_a_source_that_changes_while_it_is_read(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(sources / "a.jsonl", [(1, TEXT)])

    def append(*arguments: object) -> dict[str, int]:
        write_jsonl(source, [(1, TEXT), (2, TEXT)])
        return merge(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("flsim.data.importing.tasks.merge", append)
    with pytest.raises(InputError, match=r"a\.jsonl: the file changed while flsim read it; import it again"):
        import_folder(sources)
    assert nothing_but(sources)


IMPORT = """
import sys
from pathlib import Path
from flsim.data.formats import posts
from flsim.data.importing import run, tasks
posts.PART_BYTES = tasks.PIECE = tasks.BUCKET = 2**20
hparams = run.ImportHParams(100, words_per_user=500)
run.import_corpus([Path(sys.argv[1])], Path(sys.argv[2]), hparams, workers=2)
"""


@pytest.mark.slow
def test_memory_of_all_processes_is_bounded_by_pieces(tmp_path: Path) -> None:
    def peak(posts: int) -> int:
        text = "few different words make for little memory in counts. " * 30
        rows = [(f"author{n % (posts // 4)}", f"{text} {chr(97 + n % 26)}{n % 9}") for n in range(posts)]
        source = write_jsonl(tmp_path / f"{posts}.jsonl", rows)
        return peak_kilobytes(IMPORT, source, tmp_path / f"corpus{posts}")

    assert peak(8_000) < peak(2_000) + 9_000  # 14 MB and 3.5 MB


@pytest.mark.parametrize("out", [".", "/"])
def test_a_folder_without_a_name_is_refused(out: str, sources: Path) -> None:
    with pytest.raises(InputError, match="already exists; name another folder"):
        import_corpus([write_jsonl(sources / "a.jsonl", [(1, TEXT)])], Path(out), SMALL)


def test_sources_can_be_text_and_come_from_an_iterator(sources: Path, tmp_path: Path) -> None:
    write_jsonl(sources / "a.jsonl", [(1, TEXT)])
    corpus = import_corpus(map(str, sources.iterdir()), str(tmp_path / "corpus"), SMALL)
    assert corpus.path == tmp_path / "corpus"
    with pytest.raises(InputError, match="sources must be a list"):
        import_corpus(str(sources), tmp_path / "other", SMALL)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"user": null, "text": "a"}', r"in 1 posts \(1 whose author is not known\)"),
        ("a.jsonl", b'{"user": "a', r"Unterminated string starting at column 10"),
    ],
)
def test_an_error_names_the_reason(sources: Path, name: str, content: bytes, message: str) -> None:
    (sources / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        import_folder(sources)
