"""Imports equal a naive import, which the test implements, on posts whose tokens are known by construction."""

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from dumps import dump, folder_bytes, question, write_jsonl
from helpers import Flsim
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing import tasks
from flsim.data.importing.gather import ImportHParams, split_of, written
from flsim.data.importing.scratch import cuts, hash_of, ranges_of, read_lines, write_lines
from flsim.data.importing.tasks import import_corpus
from flsim.data.manifest import SPLITS, WHOLE
from flsim.data.records import largest_authors

Sentence = list[str]
Posts = list[tuple[str, list[Sentence]]]

words = st.sampled_from(["a", "bee", "don't", "well-known", "7", "x1"])
some_posts = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(["u", "v", "w/1", "w#1"]), st.text(max_size=4).filter(str.strip)),
        st.lists(st.lists(words, min_size=1, max_size=9), max_size=4),
    ),
    max_size=25,
)


def text_of(sentences: list[Sentence]) -> str:
    """Return the sentences in capitals, each with a full stop and irregular white space."""
    ends = (". ", ".\n", ".  \t", ".\n\n")
    return " ".join("  ".join(words).upper() + ends[index % 4] for index, words in enumerate(sentences))


def naive_import(posts: Posts, hparams: ImportHParams) -> tuple[dict[str, dict[str, list[Sentence]]], Counter[str]]:
    """Return split -> user -> records, and the counts of what was dropped, computed without any optimization."""
    authors: dict[str, list[Sentence]] = {}
    dropped: Counter[str] = Counter()
    for user, sentences in posts:
        dropped["posts_without_text"] += not sentences
        for sentence in sentences:
            record = [*sentence, "."]
            authors.setdefault(user, []).append(record)
    kept: dict[str, dict[str, list[Sentence]]] = {split: {} for split in (*SPLITS, *WHOLE.values())}
    for author in sorted(authors, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        users: list[list[Sentence]] = [[]]
        for record in authors[author]:
            users[-1].append(record)
            if sum(len(record) - 1 for record in users[-1]) >= (hparams.words_per_user or 0):  # full stops do not count
                users.append([])
        remainder = users.pop()
        reasons = (
            ("remainder_records", "remainder_words") if users else ("records_of_short_users", "words_of_short_users")
        )
        dropped["users_too_short"] += not users
        dropped[reasons[0]] += len(remainder)
        dropped[reasons[1]] += sum(map(len, remainder))
        dropped["words_truncated"] += sum(len(record[hparams.record_words :]) for user in users for record in user)
        users = [[record[: hparams.record_words] for record in user] for user in users]
        split = split_of(author, hparams.heldout, hparams.test, hparams.seed)
        if split in WHOLE:
            kept[WHOLE[split]][author] = [record[: hparams.record_words] for record in authors[author]]
        kept[split].update((f"{author}#{number}", user) for number, user in enumerate(users))
    return kept, dropped


@contextmanager
def cut_into(part: int, piece: int, bucket: int, counted: int) -> Iterator[None]:
    """Set the sizes in which imports work: bytes of parts, characters of pieces, bytes of buckets, words of ranges."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (
            ("formats.posts.PART_BYTES", part),
            ("importing.tasks.PIECE", piece),
            ("importing.tasks.BUCKET", bucket),
        ):
            patch.setattr(f"flsim.data.{name}", size)
        patch.setattr("flsim.data.importing.tasks.COUNTED", counted)
        yield


def decoded(corpus: Corpus, split: str) -> list[tuple[str, list[Sentence]]]:
    users = corpus.split(split)
    return [
        (name, [corpus.vocabulary.decode(record.tolist()) for record in users[index]])
        for index, name in enumerate(users.names)
    ]


def nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def import_small(tmp_path: Path, sources: list[Path], name: str = "corpus", **changes: float) -> Corpus:
    values = {"vocabulary_size": 8, "words_per_user": 12, "record_words": 6, "heldout": 0.0, "test": 0.0, **changes}
    return import_corpus(sources, tmp_path / name, ImportHParams(**values))  # type: ignore[arg-type]


@settings(max_examples=20)
@given(
    some_posts,
    st.integers(1, 10),
    st.integers(1, 25),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3]),
    st.tuples(*[st.sampled_from([40, 400, 2**24])] * 4),
)
def test_an_import_equals_a_naive_import(
    tmp_path_factory: pytest.TempPathFactory,
    posts: Posts,
    record_words: int,
    words_per_user: int,
    words_left_out: int,
    share: float,
    sizes: tuple[int, int, int, int],
) -> None:
    """An import equals the naive import for any sizes of parts, pieces, and ranges of authors and words."""
    tmp_path = tmp_path_factory.mktemp("import")
    written = [(user, text_of(sentences)) for user, sentences in posts]
    sources = [write_jsonl(tmp_path / "one.jsonl", written[::2]), write_jsonl(tmp_path / "two.jsonl", written[1::2])]
    sources[1].write_text(sources[1].read_text() + "\n")  # two equal sources would be refused
    hparams = ImportHParams(5, record_words, words_per_user, heldout=share, test=share)
    kept, dropped = naive_import([*posts[::2], *posts[1::2]], hparams)
    counts = Counter(word for user in kept["train"].values() for record in user for word in record)
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))[: max(1, len(counts) - words_left_out)]
    with cut_into(*sizes):
        if not vocabulary:
            with pytest.raises(InputError):
                import_corpus(sources, tmp_path / "corpus", hparams)
            assert sorted(tmp_path.iterdir()) == sources
            return
        hparams = replace(hparams, vocabulary_size=len(vocabulary) + 4)
        corpus = import_corpus(sources, tmp_path / "corpus", hparams)
    assert list(corpus.vocabulary.words) == vocabulary
    assert list(corpus.vocabulary.counts) == [counts[word] for word in vocabulary]
    assert nonzero(corpus.manifest["dropped"]) == nonzero(dropped)
    said = [(user, sentence) for user, sentences in posts for sentence in sentences]
    assert corpus.manifest["parameters"]["read"] == {
        "posts": len(posts),
        "users": len({user for user, _ in said}),
        "records": len(said),
        "words": sum(len(sentence) + 1 for _, sentence in said),
    }
    for split, users in kept.items():
        known = [
            (user, [[w if w in vocabulary else "<oov>" for w in r] for r in records]) for user, records in users.items()
        ]
        assert decoded(corpus, split) == known  # in the same order of users
        oov_words = sum(record.count("<oov>") for _, records in known for record in records)
        assert corpus.manifest["parameters"]["oov_words"][split] == oov_words
    for split, whole in WHOLE.items():  # an author's records begin with those of the author's balanced users
        everything = dict(decoded(corpus, whole))
        balanced: dict[str, list[Sentence]] = {}
        for user, records in decoded(corpus, split):
            balanced.setdefault(user.rpartition("#")[0], []).extend(records)
        assert all(everything[author][: len(records)] == records for author, records in balanced.items())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_the_format_is_detected_from_content_with_any_name(tmp_path: Path, encoding: str) -> None:
    dumped = tmp_path / "one.txt"
    dumped.write_text(dump([question("1", "a b c d e f g h. " * 3)], "\n"), encoding)
    lines = tmp_path / "two.xml"
    lines.write_text('\n {"user": 1, "text": "a b c. a b c. a b c. a b c."}', "utf-8-sig")
    assert set(import_small(tmp_path, [dumped, lines]).split("train").names) == {"one/1#0", "1#0"}


def write_two(tmp_path: Path) -> list[Path]:
    """Write two sources of different users, whose names sort differently by hash and by alphabet."""
    return [
        write_jsonl(tmp_path / f"{name}.jsonl", [(f"{name}{n % 7}", f"w{n} a b c{n % 5}. d e f?") for n in range(150)])
        for name in ("one", "two")
    ]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """The bytes are equal in another process, in which sets of strings have another order."""
    sources = write_two(tmp_path)
    code = (
        "import sys; from pathlib import Path; from flsim.api import ImportSettings, import_corpus; "
        "import_corpus([Path(p) for p in sys.argv[2:]], Path(sys.argv[1]), "
        "ImportSettings(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.2, test=0.2))"
    )
    expected = folder_bytes(import_small(tmp_path, sources, heldout=0.2, test=0.2).path)
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(tasks.__file__).parents[2])}
    out = tmp_path / "other"
    subprocess.run([sys.executable, "-c", code, out, *sources], check=True, env=environment, capture_output=True)
    assert folder_bytes(out) == expected


def test_neither_processes_nor_pieces_nor_the_order_of_sources_matter(tmp_path: Path) -> None:
    sources = write_two(tmp_path)
    expected = folder_bytes(import_small(tmp_path, sources, "expected").path)
    turned = folder_bytes(import_small(tmp_path, sources[::-1], "turned").path)
    assert {name for name in expected if expected[name] != turned[name]} == {"manifest.json"}  # lists the sources
    hparams = ImportHParams(8, 6, 12, heldout=0.0, test=0.0)
    with cut_into(1_000, 500, 1_000, 10):
        assert folder_bytes(import_corpus(sources, tmp_path / "two", hparams, workers=2).path) == expected


# Which tokens count as words, and how authors are assigned to splits.


def test_written_words_have_a_letter_or_a_digit() -> None:
    assert written(["don't", "7", "c++", "<URL>", "é", ".", "<", "_"]).tolist() == [True] * 5 + [False] * 3


def test_splits_have_the_shares_that_were_asked_for() -> None:
    """Shares of 4,000 authors are within 3% of the requested shares; a share's standard deviation is below 0.8%."""
    splits = Counter(split_of(f"author{index}", heldout=0.1, test=0.3, seed=7) for index in range(4_000))
    assert abs(splits["heldout"] / 4_000 - 0.1) < 0.03
    assert abs(splits["test"] / 4_000 - 0.3) < 0.03
    assert splits.total() == 4_000


def test_splits_depend_on_the_seed_and_nothing_else() -> None:
    def splits(seed: int) -> list[str]:
        return [split_of(f"author{index}", 0.2, 0.2, seed) for index in range(100)]

    assert splits(0) == splits(0) != splits(1)
    assert {split_of(name, 0.0, 0.0, 3) for name in "abc"} == {"train"}


# Lines on disk are regrouped by hash, as in a dictionary, for any number of files and ranges.

some_files = st.lists(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "ä", "xyz"]), st.binary(max_size=4)), max_size=12),
    min_size=1,
    max_size=5,
)


@given(some_files, st.integers(1, 9))
def test_regroups_like_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[tuple[str, bytes]]], ranges: int
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    paths = []
    expected: dict[str, list[bytes]] = {}
    for number, content in enumerate(files):
        lines = sorted(((key, value.hex().encode()) for key, value in content), key=lambda line: hash_of(line[0]))
        paths.append(folder / str(number))
        write_lines(paths[-1], [hash_of(key) for key, _ in lines], (b"%s=%b\n" % (k.encode(), v) for k, v in lines))
        for key, value in lines:
            expected.setdefault(key, []).append(value)
    bounds = cuts(paths, ranges)
    assert bounds[:, 0].tolist() == [0] * len(files)
    found: dict[str, list[bytes]] = {}
    for index in range(ranges):
        for line in read_lines(ranges_of(paths, bounds, index)):
            key = line.partition(b"=")[0].decode()
            found.setdefault(key, []).append(line.partition(b"=")[2])
            assert hash_of(key) * ranges >> 64 == index  # the ranges divide all 64-bit hashes equally
    assert found == expected


def test_hashes_are_sha256_and_the_largest_is_in_the_last_range(tmp_path: Path) -> None:
    """A hash is the first 64 bits of SHA-256; FIPS 180-2, appendix B.1, publishes the SHA-256 of "abc"."""
    assert hash_of("abc") == 0xBA7816BF8F01CFEA
    path = tmp_path / "lines"
    write_lines(path, [0, 2**63, 2**64 - 1], [b"first\n", b"middle\n", b"last\n"])
    bounds = cuts([path], 2)
    found = [list(read_lines(ranges_of([path], bounds, index))) for index in range(2)]
    assert found == [[b"first"], [b"middle", b"last"]]


# Names that many people share, such as [deleted]: imports and `inspect` report them, and an option drops them.

SETTINGS = ("--words-per-user", 8, "--vocabulary", 9)
TEXT = "some words are here now"


def posts(name: str, deleted: int) -> list[tuple[str | int, str]]:
    """Return posts of 40 accounts, and of `deleted` more accounts that share one name."""
    rows = [(f"user{user}", TEXT) for user in range(40) for _ in range(4)]
    return [*rows, *((name, TEXT) for _ in range(deleted) for _ in range(4))]


@pytest.mark.parametrize("name", ["[deleted]", "nan"])
def test_a_placeholder_name_is_reported_and_dropped(tmp_path: Path, flsim: Flsim, name: str) -> None:
    """A name that 20 of 60 accounts share has a third of all words; it is reported, and dropped on request."""
    source = write_jsonl(tmp_path / "a.jsonl", posts(name, 20))
    code, imported, err = flsim("data", "import", source, *SETTINGS, "--out", tmp_path / "corpus")
    assert code == 0, err
    code, inspected, _ = flsim("data", "inspect", tmp_path / "corpus")
    for out in (imported, inspected):
        line = " ".join(out.split())
        assert f"largest authors by their share of all words: {name} 33.3%, user0 1.7%, user1 1.7%" in line
        assert f"WARNING author '{name}' has 33.3% of all words, and is a placeholder for many people" in line
        assert f"import again with --drop-authors '{name}'" in line
    options = ("--drop-authors", f"{name},nobody")
    code, out, err = flsim("data", "import", source, *SETTINGS, *options, "--out", tmp_path / "without")
    assert code == 0, err
    assert "80 posts 33.3% of dropped authors" in " ".join(out.split())
    assert "author '" not in out
    manifest = Corpus.open(tmp_path / "without").manifest
    assert manifest["dropped"]["posts_of_dropped_authors"] == 80
    assert manifest["parameters"]["read"]["posts"] == 240
    assert manifest["parameters"]["drop_authors"] == [name, "nobody"]


def test_shares_and_warnings() -> None:
    """An author with 6 of 45 words (13.3%) causes a warning: it is more than twice the mean share of 40 authors, 5%."""
    users = [("train", "big#0", 4), ("train", "big#1", 2), *(("heldout", f"u{n}", 1) for n in range(39))]
    authors, warnings = largest_authors(users)
    assert authors[0] == {"author": "big", "split": "train", "users": 2, "words": 6, "share": 6 / 45}
    assert [author["author"] for author in authors] == ["big", "u0", "u1", "u10", "u11"]
    (warning,) = warnings
    assert warning.startswith("author 'big' has 13.3% of all words, which is unusual for one person; to leave")
    _, warnings = largest_authors([*users, ("train", "None", 1)])
    assert any(text.startswith("author 'None' has 2.2% of all words, and is a placeholder") for text in warnings)
    assert largest_authors([("train", f"u{n}", 10 + n) for n in range(6)])[1] == [], "few equal authors"
    assert largest_authors([]) == ([], [])
