"""Layouts, given vocabularies, columns, splits of the sources, and what is said about sources."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dumps import folder_bytes, write_jsonl
from helpers import Flsim

from benchmarks import writers
from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams, split_of
from flsim.data.importing.run import import_corpus
from flsim.data.manifest import SPLITS

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


def test_a_split_says_by_itself_which_layout_it_is_in(tmp_path: Path) -> None:
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
    """Its order is that of the file, and counts are the file's; other words are out of vocabulary."""
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
    """A client of two splits is an author in each; shares are for sources that do not say."""
    rows = [(split, client, f"a b c {client} . ") for split in SPLITS for client in ("one", "two") for _ in range(12)]
    writers.write_tff_sqlite(tmp_path / "so.sqlite", rows)
    corpus = import_corpus([tmp_path / "so.sqlite"], tmp_path / "corpus", hparams(heldout=0.49, test=0.49))
    for split in SPLITS:
        assert {name.partition("#")[0] for name in corpus.split(split).names} == {"one", "two"}
    assert corpus.manifest["parameters"]["read"]["users"] == 6
    assert set(corpus.vocabulary.words) == {"a", "b", "c", ".", "one"}


def test_the_command_has_all_of_it(tmp_path: Path) -> None:
    posts = [{"who": user, "said": text} for user, text in POSTS]
    source = tmp_path / "posts.data"
    source.write_text("".join(json.dumps(post) + "\n" for post in posts))
    (tmp_path / "words").write_text("a 5\nb 4\nc 3\nd 2\ne 1\n")
    options = (
        "--vocabulary 9 --words-per-user 30 --heldout 0.2 --test 0.2 --layout fedjax --format jsonl "
        "--vocabulary-from words --user-column who --text-column said --workers 2 --json"
    )
    done = subprocess.run(
        [sys.executable, "-m", "flsim", "data", "import", source, "--out", "made", *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["layout"] == "fedjax"
    expected = import_corpus(
        [source],
        tmp_path / "expected",
        hparams(layout="fedjax", record_words=20),
        "jsonl",
        vocabulary_from=tmp_path / "words",
        columns=("who", "said"),
    )
    assert folder_bytes(tmp_path / "made") == folder_bytes(expected.path)


def test_a_small_corpus_has_the_words_that_it_has_where_no_vocabulary_is_asked_for(
    tmp_path: Path, flsim: Flsim
) -> None:
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
    assert folder_bytes(tmp_path / "fitted") == folder_bytes(asked.path)  # also the manifest names the size that it has
    (tmp_path / "words").write_text("a 5\nb 4\nc 3\n")
    code, _, err = flsim("data", "import", *shared, tmp_path / "given", "--vocabulary-from", tmp_path / "words")
    assert (code, "--vocabulary 7 instead of 10000" in err) == (0, True), err


def test_shorter_users_are_suggested_where_there_are_few(tmp_path: Path, flsim: Flsim) -> None:
    posts = [(user, "one two three four five. " * count) for user, count in (("a", 110), ("b", 30), ("c", 11))]
    source = write_jsonl(tmp_path / "posts.jsonl", posts)  # authors of 550, 150 and 55 words
    whole = ["--heldout", "0", "--test", "0"]
    suggested = "--words-per-user 500 (about 1 user of 1 author), 200 (about 2 users of 1 author)"
    suggested += ", 100 (about 6 users of 2 authors), 50 (about 15 users of 3 authors)"
    code, _, err = flsim("data", "import", source, "--out", tmp_path / "none", *whole)
    assert (code, f"the longest, 'a', has 550: import more text, or give {suggested}" in err) == (2, True), err
    options = ["--words-per-user", "100", "--json"]
    code, out, err = flsim("data", "import", source, "--out", tmp_path / "few", *whole, *options)
    assert (code, json.loads(out)["users"]) == (0, 6), err  # as was suggested
    assert "only 6 users of 100 words; a shorter length gives more users: --words-per-user 50 (about 15 users of" in err
    seed = next(seed for seed in range(99) if {split_of(name, 0.0, 0.3, seed) for name in "ab"} == {"train"})
    kept_out = ["--heldout", "0", "--test", "0.3", "--seed", str(seed)]
    code, _, err = flsim("data", "import", source, "--out", tmp_path / "untested", *kept_out, *options)
    assert "only 6 users of 100 words, none of them in test; a shorter" in err


def test_hdf5_is_never_opened_in_the_caller_s_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libhdf5 may crash or hang: the file is detected, cut and read by a worker, also where one process would do."""
    source = tmp_path / "posts.h5"
    writers.write_tff_hdf5(source, [("train", f"u{user}", "a b c d") for user in range(4)])

    def trip(*_arguments: object, **_named: object) -> None:
        raise OSError("opened in the caller's process")

    monkeypatch.setattr("h5py.File", trip)
    settings = hparams(vocabulary_size=8, words_per_user=2, heldout=0.0, test=0.0)
    corpus = import_corpus([source], tmp_path / "corpus", settings, workers=1)
    assert corpus.manifest["sources"][0]["format"] == "tff-hdf5"
    assert corpus.manifest["splits"]["train"]["users"] == 4
