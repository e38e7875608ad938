from collections import Counter
from pathlib import Path

import pytest
import reading
from dumps import DECLARATION, dump, peak_kilobytes, question, row, write_dump
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.formats import posts as parts
from flsim.data.formats import stackexchange
from flsim.data.formats.known import FORMATS
from flsim.data.formats.posts import Post
from flsim.data.formats.stackexchange import site_of
from flsim.data.sentences import records


def read(path: Path) -> tuple[list[Post], Counter[str]]:
    return reading.read(path, "stackexchange")


def test_questions_and_answers_of_owners_are_kept_and_the_rest_counted(tmp_path: Path) -> None:
    rows = [
        row(Id="1", PostTypeId="1", Body="<p>a</p>", OwnerUserId="8"),
        row(Id="2", PostTypeId="2", Body="b &lt;", OwnerUserId="9"),
        row(Id="3", PostTypeId="4", Body="wiki", OwnerUserId="8"),
        row(Id="4", PostTypeId="5"),
        row(Id="5", Body="no type", OwnerUserId="8"),
        row(Id="6", PostTypeId="1", Body="nobody"),
        row(Id="7", PostTypeId="2", Body="community", OwnerUserId="-1"),
        row(Id="8", PostTypeId="2", OwnerUserId="8"),
        row(Id="9", PostTypeId="2", Body="", OwnerUserId="8"),
        "  <other PostTypeId='1' Body='x' OwnerUserId='8'/>\n",
        f"  <inner>{question('8', 'x')}</inner>\n",
    ]
    posts, dropped = read(write_dump(tmp_path / "ai.Posts.xml", rows))
    assert posts == [Post("ai/8", ["a"]), Post("ai/9", ["b <"])]
    assert dropped == {
        "posts_of_other_types": 3,
        "posts_without_owner": 1,
        "posts_of_community_user": 1,
        "posts_without_body": 2,
    }
    assert len(posts) + dropped.total() == 9


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("ai.Posts.xml", "ai"),
        ("bicycles.meta.Posts.xml", "bicycles.meta"),
        ("ai.stackexchange.com/Posts.xml", "ai.stackexchange.com"),
        ("ai/posts.xml", "ai"),
        ("AI.POSTS.XML", "AI"),
        ("something.xml", "something"),
    ],
)
def test_the_site_is_in_the_name(name: str, site: str) -> None:
    assert site_of(Path("dumps") / name) == site


@given(st.lists(st.tuples(st.integers(1, 9), st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"])))))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, posts: list[tuple[int, str]]) -> None:
    written = [(str(owner), f"x {text.replace('&', '&amp;').replace('<', '&lt;')}") for owner, text in posts]
    path = write_dump(
        tmp_path_factory.mktemp("dump") / "a.Posts.xml",
        [question(owner, body) for owner, body in [*written, ("1", "end")]],
    )
    assert read(path)[0][:-1] == [Post(f"a/{owner}", records(" ".join(["x", *text.split()]))) for owner, text in posts]


@pytest.mark.parametrize(
    "content",
    [
        dump([question("1", "caf\u00e9")]).encode("utf-8-sig"),
        dump([question("1", "caf\u00e9")]).replace("\n", "\r\n").encode("utf-8-sig"),
        dump([question("1", "caf\u00e9")], DECLARATION + "<!DOCTYPE posts SYSTEM 'posts.dtd'>\n").encode(),
        dump([question("1", "caf\u00e9")], DECLARATION + "<!DOCTYPE posts [<!ELEMENT posts ANY>]>\n").encode(),
        dump([question("1", "caf\u00e9")], '<?xml version="1.0" encoding="iso-8859-1"?>').encode("latin-1"),
        dump([question("1", "caf\u00e9")], '<?xml version="1.0" encoding="windows-1252"?>').encode("cp1252"),
        dump([question("1", "caf\u00e9")], '<?xml version="1.0" encoding="utf-16"?>').encode("utf-16"),
        dump([question("1", "caf\u00e9")], "").encode("utf-16"),
    ],
    ids=["bom", "crlf", "external-dtd", "internal-dtd", "latin-1", "cp1252", "utf-16", "utf-16-undeclared"],
)
def test_dumps_as_they_come(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(content)
    assert read(path)[0] == [Post("a/1", ["café"])]


@pytest.mark.parametrize(
    "declaration",
    [
        "<!ENTITY leak SYSTEM '{secret}'>",
        "<!ENTITY leak PUBLIC 'x' '{secret}'>",
        "<!ENTITY % leak SYSTEM '{secret}'> %leak;",
        "<!ENTITY leak 'harmless'>",
    ],
)
def test_entities_are_refused(tmp_path: Path, declaration: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("<!ENTITY leak 'hunter2'>")
    head = f"{DECLARATION}<!DOCTYPE posts [{declaration.format(secret=secret.as_uri())}]>"
    path = write_dump(tmp_path / "a.Posts.xml", [question("1", "x").replace("x", "&leak;")], head)
    with pytest.raises(InputError, match=r"a\.Posts\.xml: line 2, column \d+: declares the entity 'leak'"):
        read(path)


def test_an_external_dtd_is_never_opened(tmp_path: Path) -> None:
    dtd = tmp_path / "posts.dtd"
    dtd.write_text("<!ENTITY leak 'hunter2'><!ATTLIST row OwnerUserId CDATA '7'>")
    head = f"{DECLARATION}<!DOCTYPE posts SYSTEM '{dtd.as_uri()}'>"
    rows = [question("1", "a").replace('"a"', '"a&leak;b"'), row(PostTypeId="1", Body="c")]
    posts, dropped = read(write_dump(tmp_path / "a.Posts.xml", rows, head))
    assert posts == [Post("a/1", ["ab"])]
    assert dropped == {"posts_without_owner": 1}


def test_defaults_of_a_dtd_are_ignored(tmp_path: Path) -> None:
    head = f"{DECLARATION}<!DOCTYPE posts [<!ATTLIST row OwnerUserId CDATA '7'>]>"
    rows = [question("1", "a"), row(PostTypeId="1", Body="c")]
    assert read(write_dump(tmp_path / "a.Posts.xml", rows, head))[1] == {"posts_without_owner": 1}


def test_billion_laughs_are_refused(tmp_path: Path) -> None:
    entities = "".join(f"<!ENTITY l{n} '{f'&l{n - 1};' * 10}'>" for n in range(1, 10))
    head = f"{DECLARATION}<!DOCTYPE posts [<!ENTITY l0 'ha'>{entities}]>"
    path = write_dump(tmp_path / "a.Posts.xml", [question("1", "x").replace("x", "&l9;")], head)
    with pytest.raises(InputError, match="entity 'l0'"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1, column 1: no element found"),
        (b"PostTypeId,Body\n1,a\n", "line 1, column 1: syntax error"),
        (b"\x89PNG\r\n\x1a\n\0\0", "line 1, column 1: not well-formed"),
        (b"<posts><row></posts>", "line 1, column 15: mismatched tag"),
        (b"<posts><row PostTypeId='1' Body='\xff\xfe'/></posts>", "not well-formed"),
        (b"<posts>&nbsp;</posts>", "undefined entity"),
        (b"<users><row Id='1'/></users>", "the root element is <users>, not <posts>"),
        (b"<html><body>404</body></html>", "the root element is <html>, not <posts>"),
        (b"<posts></posts>", "no posts in it"),
        (b"<posts><post/></posts>", "no posts in it"),
        (b"<?xml version='1.0' encoding='shift_jis'?><posts/>", "multi-byte encodings are not supported"),
        (b"<?xml version='1.0' encoding='nonsense'?><posts/>", "unknown encoding: nonsense"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "Posts.xml of a Stack Exchange dump" in str(caught.value)  # what to do
    assert "\n" not in str(caught.value)


def test_line_and_column_point_at_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.Posts.xml"
    content = dump([question("1", "a"), question("2", "b")])
    path.write_text(content[: content.index("Body", content.index("\n", content.index("row")))])
    with pytest.raises(InputError, match=r"line 4, column 3: unclosed token"):
        read(path)


READ = """
import sys
from collections import Counter
from pathlib import Path
from flsim.data.formats.known import FORMATS
path, format = Path(sys.argv[1]), FORMATS["stackexchange"]
for part in format.parts(path, path, ("user", "text")):
    sum(1 for _ in format.read(part, Counter()))
"""


def test_memory_does_not_grow_with_the_dump(tmp_path: Path) -> None:
    def peak(posts: int) -> int:
        rows = (question("1", f"<p>{number} {'word ' * 400}</p>") for number in range(posts))
        return peak_kilobytes(READ, write_dump(tmp_path / f"{posts}.Posts.xml", rows))

    assert peak(20_000) < peak(500) + 5_000  # 40 MB and 1 MB


@given(
    st.lists(st.sampled_from([question("1", "a"), question("2", "<p>b\n<row c"), "\n", " <!-- x --> ", "\t<x/>\n"])),
    st.data(),
)
def test_parts_begin_at_rows(tmp_path_factory: pytest.TempPathFactory, rows: list[str], data: st.DataObject) -> None:
    path = write_dump(tmp_path_factory.mktemp("dump") / "a.Posts.xml", [question("3", "first"), *rows])
    whole = read(path)
    content = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", data.draw(st.integers(1, 200)))
        found = FORMATS["stackexchange"].parts(path, path, ("user", "text"))
        assert b"".join(content[part.first : part.last] for part in found) == content
        assert all(content[part.first :].startswith(b"<row ") for part in found[1:])
        assert read(path) == whole


def test_errors_of_later_parts_name_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dump(tmp_path / "a.Posts.xml", [question("1", "a")] * 9 + ["<row &nbsp; />"])
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    with pytest.raises(
        InputError, match=r"a\.Posts\.xml: line \d+, column \d+ of the part from byte \d+: not well-formed"
    ):
        read(path)


@pytest.mark.parametrize("ending", ["", "</posts></posts>", "</posts><row />", "</row></posts>"])
def test_parts_do_not_hide_a_wrong_end(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 200)
    path = tmp_path / "a.Posts.xml"
    path.write_text(f"<posts>\n{question('1', 'a') * 9}{ending}\n")
    with pytest.raises(InputError, match="column"):
        read(path)
    path.write_text(f"<posts>\n{question('1', 'a') * 4}</posts>\n{question('1', 'a') * 4}</posts>")
    with pytest.raises(InputError, match="column"):
        read(path)


@pytest.mark.parametrize(
    "content", ["<posts>" + question("1", "a").strip() * 9 + "</posts>", "\ufeff<posts>\n</posts>"]
)
def test_what_cannot_be_cut_is_one_part(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 10)
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(content.encode("utf-16"))
    assert len(FORMATS["stackexchange"].parts(path, path, ("user", "text"))) == 1
    path.write_bytes(content.encode())
    assert len(FORMATS["stackexchange"].parts(path, path, ("user", "text"))) == 1


def test_a_row_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stackexchange, "LONGEST_ROW", 2**22)
    path = write_dump(tmp_path / "a.Posts.xml", [question("1", "x" * 2**23)])
    with pytest.raises(InputError, match="more than 4,194,304 bytes"):
        read(path)


@pytest.mark.parametrize(
    "body",
    ["x" * 50_000_000, "<b>" * 100_000, "<div>" * 100_000, "<table><tr><td>" * 50_000, "&amp;" * 1_000_000],
    ids=["50 MB", "inline", "blocks", "tables", "references"],
)
def test_html_that_is_a_bomb_is_dropped(tmp_path: Path, body: str) -> None:
    rows = [question("1", "a"), question("2", body), question("3", "b")]
    posts, dropped = read(write_dump(tmp_path / "a.Posts.xml", rows))
    assert posts == [Post("a/1", ["a"]), Post("a/3", ["b"])]
    assert dropped == {"posts_too_long": 1}


@pytest.mark.parametrize("tag", ["<div>", "<b>", "<ul><li>", "<table>", "<a href=x>", "<font><p>"])
def test_the_deepest_html_that_is_read(tmp_path: Path, tag: str) -> None:
    body = tag * (stackexchange.MOST_TAGS // tag.count("<")) + "deep"
    posts, _ = read(write_dump(tmp_path / "a.Posts.xml", [question("1", body)]))
    assert posts == [Post("a/1", ["deep"])]
