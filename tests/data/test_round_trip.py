"""A file written in any format is read with the same users, order and words, in parts of any size."""

from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import Sentence, check_post, parts_of, read

from benchmarks import writers
from flsim.data.formats.known import FORMATS, format_of
from flsim.data.sentences import records

SPLITS = st.sampled_from(["train", "heldout", "test"])
NO_NUL = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
PLAIN = st.characters(exclude_categories=["Cc", "Cs", "Cn"])

ANY_USER = st.one_of(st.text(), st.sampled_from(["../../etc/passwd", "a\0b", "x" * 10_000, "", "00000010", "\n", "-1"]))
AUTHOR = ANY_USER.filter(str.strip)  # for formats that refuse or drop posts without an author
GROUP = st.text(NO_NUL.filter(lambda character: character != "/"), min_size=1).filter(lambda name: name != ".")

SPLIT_AT_SPACE = (
    "tff-sqlite",
    "tff-hdf5",
)  # other formats have plain text, which is split into sentences, and no splits
FORMS = {
    "tff-sqlite": ("so.sqlite", ANY_USER, st.text(), writers.write_tff_sqlite),
    "tff-hdf5": ("stackoverflow_{split}.h5", GROUP, st.text(NO_NUL), writers.write_tff_hdf5),
    "parquet": ("so.parquet", AUTHOR, st.text(), writers.write_parquet),
    "jsonl": ("so.jsonl", AUTHOR, st.text(), writers.write_jsonl),
    "stackexchange": (
        "so.Posts.xml",
        st.text(PLAIN, min_size=1).filter(lambda user: user != "-1"),
        st.text(PLAIN),
        writers.write_stackexchange,
    ),
}
NUMBERS = count()


@pytest.mark.parametrize("format", FORMS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(data=st.data(), part=st.sampled_from([1, 3, 1_000, 2**26]), group=st.integers(1, 5))
def test_what_is_written_is_read(tmp_path: Path, format: str, data: st.DataObject, part: int, group: int) -> None:
    name, user, text, write = FORMS[format]
    rows = data.draw(st.lists(st.tuples(user, SPLITS, text), max_size=12))
    if format == "tff-hdf5":  # such a file has one split, and a group for each client
        split = data.draw(SPLITS)
        rows = sorted([(author, split, words) for author, _, words in rows], key=lambda row: row[0].encode())
        name = name.format(split=split.replace("heldout", "held_out"))
    if format == "stackexchange":
        rows = [*rows, ("1", "train", "end")]
    path = tmp_path / str(next(NUMBERS)) / name
    path.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "ROW_GROUP", group)
        write(path, [(split, author, words) for author, split, words in rows])
    assert format_of(path, path) is FORMATS[format]
    with parts_of(part):
        found, dropped = read(path, format)
    for post in found:
        check_post(post)
    expected: list[Sentence]
    if format in SPLIT_AT_SPACE:
        expected = [(author, split, " ".join(words.split())) for author, split, words in rows if words.split()]
    else:
        site = "so/" if format == "stackexchange" else ""
        expected = [(site + author, None, sentence) for author, _, words in rows for sentence in records(words)]
    assert [(post.user, post.split, sentence) for post in found for sentence in post.sentences] == expected
    assert not [reason for reason in dropped if reason not in ("records_without_words", "posts_without_text")]
