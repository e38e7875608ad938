"""Bad input causes one line with the fault, the place and the remedy, and failed imports leave no corpus behind."""

import json
import re
import shutil
from pathlib import Path

import pytest
from dumps import dump, folder_bytes, peak_kilobytes, question, write_jsonl
from helpers import Flsim

from benchmarks import writers
from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.data.manifest import SPLITS

SMALL = ImportHParams(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.0, test=0.0)
TEXT = "a b c d e f g h. " * 3


def import_folder(folder: Path) -> Corpus:
    """Import all files of a folder, in order of name."""
    return import_corpus(sorted(folder.iterdir()), folder.parent / "corpus", SMALL)


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
        ("a.log", b"", r"a\.log: the file is empty, so its format cannot be detected"),
        ("a\udcff.csv", b"", r"'a\\udcff\.csv': the name of this file is not UTF-8; rename the file"),
        ("a.txt", "a b c\n".encode("utf-16"), r"a\.txt: UTF-16; convert the file to UTF-8"),
        ("a.zip", b"PK\x03\x04", r"a\.zip: the file is compressed; decompress it first"),
        ("a.jsonl", b"", r"a\.jsonl: no text of any user in 0 posts"),
        ("a.jsonl", b'{"user": 1, "text": "\xe2\x80\x8b"}', r"a\.jsonl: no text of any user in 1 posts"),
        ("a.xml", b'{"user": 1, "text": "a b c"}', "no user has 12 words; the longest, '1', has 3: import more text"),
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


def test_sources_that_cannot_be_imported_together(sources: Path) -> None:
    def refused(paths: list[Path], message: str, hparams: ImportHParams = SMALL, format: str | None = None) -> None:
        with pytest.raises(InputError, match=message):
            import_corpus(paths, sources.parent / "corpus", hparams, format)
        assert nothing_but(sources)

    one, same = (write_jsonl(sources / name, [(1, TEXT)]) for name in ("a.jsonl", "b.jsonl"))
    other = write_jsonl(sources / "c.jsonl", [(2, TEXT)])
    broken = sources / "a.Posts.xml"
    broken.write_text("<posts>")
    refused([broken, sources / "no.xml"], r"no\.xml: cannot be read \(No such file or directory\)")
    refused([sources], "a folder; name the files in it")
    refused([], "name at least one file")
    refused([one], "line 1, column 1: ", format="stackexchange")
    refused([one], r"format must be one of .*jsonl.*, found 'tsv'", format="tsv")
    refused([one, same], r"b\.jsonl: has the same content as .*a\.jsonl; name only one")
    nobody = ImportHParams(8, 6, 12, heldout=0.49999, test=0.49999)
    refused([one, other], r"a\.jsonl and 1 more: no train users, because heldout and test have all 2", nobody)
    with pytest.raises(InputError, match=r"heldout \+ test must be less than 1"):
        ImportHParams(heldout=0.5, test=0.5)


def test_a_dump_truncated_anywhere_leaves_no_files(sources: Path) -> None:
    content = dump([question(str(owner), f"<p>{TEXT}</p>") for owner in range(6)]).encode("utf-8-sig")
    whole = content.index(b"</posts>") + len(b"</posts>")
    path = sources / "a.Posts.xml"
    for length in [0, 20, 50, *range(60, whole, 150), whole - 9, whole - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"a\.Posts\.xml: line \d+, column \d+: "):
            import_folder(sources)
        assert nothing_but(sources), length
    path.write_bytes(content[:whole])
    assert len(import_folder(sources).split("train")) == 6


def stop(*arguments: object, **named: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "step", ["formats.posts.post_of", "importing.tasks.count_words", "importing.tasks.CorpusWriter.finish"]
)
def test_the_same_import_continues_after_an_interrupt(
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


IMPORT = """
import sys
from pathlib import Path
from flsim.data.formats import posts
from flsim.data.importing import gather, tasks
posts.PART_BYTES = tasks.PIECE = tasks.BUCKET = 2**20
hparams = gather.ImportHParams(100, words_per_user=500)
tasks.import_corpus([Path(sys.argv[1])], Path(sys.argv[2]), hparams, workers=2)
"""


@pytest.mark.slow
def test_memory_of_all_processes_is_bounded_by_pieces(tmp_path: Path) -> None:
    def peak(posts: int) -> int:
        text = "few different words make for little memory in counts. " * 30
        rows = [(f"author{n % (posts // 4)}", f"{text} {chr(97 + n % 26)}{n % 9}") for n in range(posts)]
        source = write_jsonl(tmp_path / f"{posts}.jsonl", rows)
        return peak_kilobytes(IMPORT, source, tmp_path / f"corpus{posts}")

    assert peak(8_000) < peak(2_000) + 9_000  # kB; sources of 14 MB and 3.5 MB


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
        ("a.jsonl", b'{"user": null, "text": "a"}', r"in 1 posts \(1 posts without user\)"),
        ("a.jsonl", b'{"user": "a', r"Unterminated string starting at column 10"),
    ],
)
def test_an_error_names_the_reason(sources: Path, name: str, content: bytes, message: str) -> None:
    (sources / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        import_folder(sources)


# Layouts, given vocabularies, columns, splits of the sources, and messages about sources.

POSTS = [(number % 9, f"a b c word{number % 4} d e, f? a b.") for number in range(90)]
HPARAMS = {"vocabulary_size": 9, "words_per_user": 30, "record_words": 6, "heldout": 0.2, "test": 0.2}


def hparams(**changes: object) -> ImportHParams:
    return ImportHParams(**{**HPARAMS, **changes})  # type: ignore[arg-type]


def texts(corpus: Corpus) -> dict[str, list[list[str]]]:
    return {
        split: [
            corpus.vocabulary.decode(record.tolist())
            for user in map(users.__getitem__, range(len(users)))
            for record in user
        ]
        for split, users in ((split, corpus.split(split)) for split in corpus.splits)
    }


def test_each_split_records_its_layout(tmp_path: Path) -> None:
    corpus = import_corpus([write_jsonl(tmp_path / "a.jsonl", POSTS)], tmp_path / "corpus", hparams(layout="fedml"))
    path = corpus.path / "train" / "split.json"
    about = json.loads(path.read_text())
    assert about == {"layout": corpus.manifest["layout"], **corpus.manifest["splits"]["train"]}
    about["layout"]["name"] = "tff"
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"corpus/train: token ids are in .*'tff'.*but the manifest .*'fedml'"):
        corpus.split("train")
    path.write_text("{}")
    with pytest.raises(InputError, match=r"corpus/train: not a split of a corpus"):
        corpus.split("train")


def test_a_vocabulary_can_be_given(tmp_path: Path) -> None:
    """The vocabulary has the words, order and counts of the given file; other words are out of vocabulary."""
    source = write_jsonl(tmp_path / "a.jsonl", POSTS)
    given = tmp_path / "word_count"
    given.write_text("zebra\t900\nc\t80\nword1\t7\n.\t6\na\t5\nb\t4\n")
    corpus = import_corpus([source], tmp_path / "corpus", hparams(layout="fedjax"), vocabulary_from=given)
    assert corpus.vocabulary.words == ("zebra", "c", "word1", ".", "a")
    assert corpus.vocabulary.counts == (900, 80, 7, 6, 5)
    assert corpus.manifest["parameters"]["vocabulary_from"]["name"] == "word_count"
    known = {*corpus.vocabulary.words, "<oov>"}
    counted = import_corpus([source], tmp_path / "counted", hparams(vocabulary_size=14))
    for split, records in texts(counted).items():
        wanted = [[word if word in known else "<oov>" for word in record] for record in records]
        assert texts(corpus)[split] == wanted
    with pytest.raises(InputError, match="word_count: "):
        import_corpus([source], tmp_path / "other", hparams(vocabulary_size=20), vocabulary_from=given)


def test_the_splits_of_a_source_are_kept(tmp_path: Path) -> None:
    """A client of several splits is one author in each split; shares apply only to sources without splits."""
    rows = [(split, client, f"a b c {client} . ") for split in SPLITS for client in ("one", "two") for _ in range(12)]
    writers.write_tff_sqlite(tmp_path / "so.sqlite", rows)
    corpus = import_corpus([tmp_path / "so.sqlite"], tmp_path / "corpus", hparams(heldout=0.49, test=0.49))
    for split in SPLITS:
        assert {name.partition("#")[0] for name in corpus.split(split).names} == {"one", "two"}
    assert corpus.manifest["parameters"]["read"]["users"] == 6
    assert set(corpus.vocabulary.words) == {"a", "b", "c", ".", "one"}


def test_the_command_imports_with_all_options(tmp_path: Path, flsim: Flsim, monkeypatch: pytest.MonkeyPatch) -> None:
    posts = [{"who": user, "said": text} for user, text in POSTS]
    source = tmp_path / "posts.data"
    source.write_text("".join(json.dumps(post) + "\n" for post in posts))
    (tmp_path / "words").write_text("a 5\nb 4\nc 3\nd 2\ne 1\n")
    options = (
        "--vocabulary 9 --words-per-user 30 --heldout 0.2 --test 0.2 --layout fedjax --format jsonl "
        "--vocabulary-from words --user-column who --text-column said --workers 2 --json"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = flsim("data", "import", source, "--out", "made", *options.split())
    assert code == 0, err
    assert json.loads(out)["layout"] == "fedjax"
    expected = import_corpus(
        [source],
        tmp_path / "expected",
        hparams(layout="fedjax", record_words=20),
        "jsonl",
        vocabulary_from=tmp_path / "words",
        columns=("who", "said"),
    )
    assert folder_bytes(tmp_path / "made") == folder_bytes(expected.path)


def test_without_a_vocabulary_size_a_small_corpus_keeps_all_words(tmp_path: Path, flsim: Flsim) -> None:
    source = write_jsonl(tmp_path / "posts.jsonl", POSTS)
    words = len({word for _, text in POSTS for word in re.findall(r"\w+|[,.?]", text)})
    shared = [source, "--words-per-user", "30", "--heldout", "0", "--test", "0", "--out"]
    code, _, err = flsim("data", "import", *shared, tmp_path / "fitted")
    assert (code, f"--vocabulary {words + 4} instead of 10000" in err) == (0, True), err
    code, _, err = flsim("data", "import", *shared, tmp_path / "asked", "--vocabulary", "10000")
    assert (code, f"give --vocabulary {words + 4} or less" in err) == (2, True), err
    asked = import_corpus(
        [source], tmp_path / "asked", hparams(vocabulary_size=words + 4, heldout=0.0, test=0.0, record_words=20)
    )
    assert folder_bytes(tmp_path / "fitted") == folder_bytes(asked.path)  # the manifest also has the actual size
    (tmp_path / "words").write_text("a 5\nb 4\nc 3\n")
    code, _, err = flsim("data", "import", *shared, tmp_path / "given", "--vocabulary-from", tmp_path / "words")
    assert (code, "--vocabulary 7 instead of 10000" in err) == (0, True), err


def test_hdf5_is_never_opened_in_the_caller_s_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker detects, cuts and reads HDF5 files, even if one process is enough, because libhdf5 may crash or hang."""
    source = tmp_path / "posts.h5"
    writers.write_tff_hdf5(source, [("train", f"u{user}", "a b c d") for user in range(4)])

    def trip(*_arguments: object, **_named: object) -> None:
        raise OSError("opened in the caller's process")

    monkeypatch.setattr("h5py.File", trip)
    settings = hparams(vocabulary_size=8, words_per_user=2, heldout=0.0, test=0.0)
    corpus = import_corpus([source], tmp_path / "corpus", settings, workers=1)
    assert corpus.manifest["sources"][0]["format"] == "tff-hdf5"
    assert corpus.manifest["splits"]["train"]["users"] == 4
