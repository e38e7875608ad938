"""Import against an oracle: a naive import in the test, on posts whose tokens are known by construction."""

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from dumps import dump, folder_bytes, question, row, write_dump, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.importing import run
from flsim.data.importing.gather import ImportHParams, split_of
from flsim.data.importing.run import import_corpus
from flsim.data.manifest import SPLITS, WHOLE

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
    """Sentences with a full stop each, ended by a space or a line feed, with irregular white space."""
    ends = (". ", ".\n", ".  \t", ".\n\n")
    return " ".join("  ".join(words).upper() + ends[index % 4] for index, words in enumerate(sentences))


def naive_import(posts: Posts, hparams: ImportHParams) -> tuple[dict[str, dict[str, list[Sentence]]], Counter[str]]:
    """Split -> user -> records, and what was dropped, with nothing clever."""
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
            if sum(len(record) - 1 for record in users[-1]) >= (hparams.words_per_user or 0):  # the stop is no word
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
    """Imports work in parts of so many bytes, pieces of so many characters, and ranges of so many bytes and words."""
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


@settings(max_examples=40)
@given(
    some_posts,
    st.integers(1, 10),
    st.integers(1, 25),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3]),
    st.tuples(*[st.sampled_from([40, 400, 2**24])] * 4),
)
def test_imports_what_a_naive_import_does(
    tmp_path_factory: pytest.TempPathFactory,
    posts: Posts,
    record_words: int,
    words_per_user: int,
    words_left_out: int,
    share: float,
    sizes: tuple[int, int, int, int],
) -> None:
    """Whatever the sizes of parts, pieces, and ranges of authors and words."""
    tmp_path = tmp_path_factory.mktemp("import")
    written = [(user, text_of(sentences)) for user, sentences in posts]
    sources = [write_jsonl(tmp_path / "one.jsonl", written[::2]), write_jsonl(tmp_path / "two.jsonl", written[1::2])]
    sources[1].write_text(sources[1].read_text() + "\n")  # or it might be refused for being the same
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
    for split, users in kept.items():
        known = [
            (user, [[w if w in vocabulary else "<oov>" for w in r] for r in records]) for user, records in users.items()
        ]
        assert decoded(corpus, split) == known  # order of users too
        oov_words = sum(record.count("<oov>") for _, records in known for record in records)
        assert corpus.manifest["parameters"]["oov_words"][split] == oov_words
    for split, whole in WHOLE.items():  # what an author's balanced users hold begins all that the author wrote
        everything = dict(decoded(corpus, whole))
        balanced: dict[str, list[Sentence]] = {}
        for user, records in decoded(corpus, split):
            balanced.setdefault(user.rpartition("#")[0], []).extend(records)
        assert all(everything[author][: len(records)] == records for author, records in balanced.items())


def test_counts_add_up(tmp_path: Path) -> None:
    """Read = kept + each drop, for posts, users, records and words, in a dump where all of them happen."""
    body = "<p>" + "Some words here. " * 7 + "And a longer sentence that will be cut.</p>"
    rows = [question(str(owner), body) for owner in (1, 2, 3, 1, 2, 1, -1)]
    rows += [row(PostTypeId="4"), row(PostTypeId="1", Body="x"), row(PostTypeId="2", OwnerUserId="1")]
    rows += [question("1", "<pre>code</pre>"), question("4", "Short. User.")]
    corpus = import_small(tmp_path, [write_dump(tmp_path / "a.Posts.xml", rows)], words_per_user=50)
    read, dropped = corpus.manifest["parameters"]["read"], corpus.manifest["dropped"]
    kept = corpus.manifest["splits"]["train"]
    assert read["posts"] == len(rows)
    assert dropped == {
        "posts_of_community_user": 1,
        "posts_of_other_types": 1,
        "posts_without_body": 1,
        "posts_without_owner": 1,
        "posts_without_words": 1,
        "users_too_short": 2,
        "records_of_short_users": 8 + 2,
        "words_of_short_users": 7 * 4 + 9 + 4,
        "words_truncated": 2 * 3,  # of each user's one long sentence that is kept
        "remainder_records": (1 + 8) + 1,  # a body has 29 words: 50 are reached within the second
        "remainder_words": (9 + 7 * 4 + 9) + 9,
    }
    assert read["users"] == 4  # 2 of them short, 2 cut into users
    assert read["records"] == kept["records"] + dropped["records_of_short_users"] + dropped["remainder_records"]
    assert read["words"] == kept["words"] + sum(
        dropped[reason] for reason in ("words_of_short_users", "remainder_words", "words_truncated")
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_format_is_told_from_content_whatever_the_name(tmp_path: Path, encoding: str) -> None:
    dumped = tmp_path / "one.txt"
    dumped.write_text(dump([question("1", "a b c d e f g h. " * 3)], "\n"), encoding)
    lines = tmp_path / "two.xml"
    lines.write_text('\n {"user": 1, "text": "a b c. a b c. a b c. a b c."}', "utf-8-sig")
    assert set(import_small(tmp_path, [dumped, lines]).split("train").names) == {"one/1#0", "1#0"}


def write_two(tmp_path: Path) -> list[Path]:
    """Two sources of different users, whose names sort differently by hash and by alphabet."""
    return [
        write_jsonl(tmp_path / f"{name}.jsonl", [(f"{name}{n % 7}", f"w{n} a b c{n % 5}. d e f?") for n in range(150)])
        for name in ("one", "two")
    ]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """Also in other processes, where sets of strings have another order."""
    sources = write_two(tmp_path)
    code = (
        "import sys; from pathlib import Path; from flsim.data.importing.run import *; "
        "import_corpus([Path(p) for p in sys.argv[2:]], Path(sys.argv[1]), "
        "ImportHParams(vocabulary_size=8, words_per_user=12, record_words=6, heldout=0.2, test=0.2))"
    )
    expected = folder_bytes(import_small(tmp_path, sources, heldout=0.2, test=0.2).path)
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(run.__file__).parents[2])}
    out = tmp_path / "other"
    subprocess.run([sys.executable, "-c", code, out, *sources], check=True, env=environment, capture_output=True)
    assert folder_bytes(out) == expected


def test_neither_processes_nor_pieces_nor_the_order_of_sources_matter(tmp_path: Path) -> None:
    sources = write_two(tmp_path)
    expected = folder_bytes(import_small(tmp_path, sources, "expected").path)
    turned = folder_bytes(import_small(tmp_path, sources[::-1], "turned").path)
    assert {name for name in expected if expected[name] != turned[name]} == {"manifest.json"}  # the list of sources
    hparams = ImportHParams(8, 6, 12, heldout=0.0, test=0.0)
    with cut_into(1_000, 500, 1_000, 10):
        assert folder_bytes(import_corpus(sources, tmp_path / "three", hparams, workers=3).path) == expected
    assert folder_bytes(import_corpus(sources, tmp_path / "one", hparams, workers=1).path) == expected
