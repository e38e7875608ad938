"""Tests of Stack Exchange dumps: rows that are read, refused or dropped, and characters that XML forbids."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reading
from dumps import DECLARATION, dump, peak_of_reading, question, row, write_dump
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.formats import posts as parts
from flsim.data.formats import stackexchange
from flsim.data.formats.known import FORMATS
from flsim.data.formats.posts import Post
from flsim.data.formats.stackexchange import CharacterFilter, is_allowed


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
    "content",
    [
        dump([question("1", "caf\u00e9")]).encode("utf-8-sig"),
        dump([question("1", "caf\u00e9")]).replace("\n", "\r\n").encode("utf-8-sig"),
        dump([question("1", "caf\u00e9")], DECLARATION + "<!DOCTYPE posts SYSTEM 'posts.dtd'>\n").encode(),
        dump([question("1", "caf\u00e9")], DECLARATION + "<!DOCTYPE posts [<!ELEMENT posts ANY>]>\n").encode(),
        dump([question("1", "caf\u00e9")], '<?xml version="1.0" encoding="iso-8859-1"?>').encode("latin-1"),
        dump([question("1", "caf\u00e9")], '<?xml version="1.0" encoding="windows-1252"?>').encode("cp1252"),
    ],
    ids=["bom", "crlf", "external-dtd", "internal-dtd", "latin-1", "cp1252"],
)
def test_variants_of_valid_dumps_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(content)
    assert read(path)[0] == [Post("a/1", ["café"])]


@pytest.mark.parametrize(
    "declaration",
    ["<!ENTITY leak SYSTEM '{secret}'>", "<!ENTITY % leak SYSTEM '{secret}'> %leak;", "<!ENTITY leak 'harmless'>"],
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1, column 1: no element found"),
        ("<posts/>".encode("utf-16"), "the file is in UTF-16; convert it to UTF-8"),
        ("<posts/>".encode("utf-16-be"), "the file is in UTF-16; convert it to UTF-8"),
        (b"<posts><row></posts>", "line 1, column 15: mismatched tag"),
        (b"<posts><row PostTypeId='1' Body='\xff\xfe'/></posts>", "not well-formed"),
        (b"<users><row Id='1'/></users>", "the root element is <users>, not <posts>"),
        (b"<posts></posts>", "the file has no posts"),
        (b"<posts>\n<row Body='&#x0E;a", "unclosed token"),
        (b"<posts><row Body='&#xG;'/></posts>", "not well-formed"),
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
    assert any(remedy in str(caught.value) for remedy in ("Posts.xml of a Stack Exchange dump", "convert it to UTF-8"))
    assert "\n" not in str(caught.value)


def test_memory_does_not_grow_with_the_dump(tmp_path: Path) -> None:
    def peak(posts: int) -> int:
        rows = (question("1", f"<p>{number} {'w' * 2_000}</p>") for number in range(posts))
        return peak_of_reading(write_dump(tmp_path / f"{posts}.Posts.xml", rows), "stackexchange")

    assert peak(6_000) < peak(500) + 5_000  # kB; dumps of 12 MB and 1 MB


def test_errors_of_later_parts_name_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dump(tmp_path / "a.Posts.xml", [question("1", "a")] * 9 + ["<row &nbsp; />"])
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    with pytest.raises(InputError, match=r"line \d+, column \d+ of the part from byte \d+: not well-formed"):
        read(path)


@pytest.mark.parametrize("ending", ["", "</posts><row />", "</row></posts>"])
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
def test_a_dump_that_cannot_be_cut_is_one_part(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 10)
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(content.encode())
    assert len(FORMATS["stackexchange"].parts(path, path, ("user", "text"))) == 1


def test_a_row_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stackexchange, "LONGEST_ROW", 2**22)
    path = write_dump(tmp_path / "a.Posts.xml", [question("1", "x" * 2**23)])
    with pytest.raises(InputError, match="more than 4,194,304 bytes"):
        read(path)


@pytest.mark.parametrize(
    "body",
    ["x" * 5_000_000, "<div>" * 100_000, "<table><tr><td>" * 50_000, "&amp;" * 1_000_000],
    ids=["5 MB", "blocks", "tables", "references"],
)
def test_html_that_is_a_bomb_is_dropped(tmp_path: Path, body: str) -> None:
    rows = [question("1", "a"), question("2", body), question("3", "b")]
    posts, dropped = read(write_dump(tmp_path / "a.Posts.xml", rows))
    assert posts == [Post("a/1", ["a"]), Post("a/3", ["b"])]
    assert dropped == {"posts_too_long": 1}


@pytest.mark.parametrize("tag", ["<ul><li>", "<table>"])
def test_the_deepest_html_that_is_read(tmp_path: Path, tag: str) -> None:
    body = tag * (stackexchange.MOST_TAGS // tag.count("<")) + "deep"
    posts, _ = read(write_dump(tmp_path / "a.Posts.xml", [question("1", body)]))
    assert posts == [Post("a/1", ["deep"])]


# Characters that XML 1.0 forbids are removed from dumps, and their rows are counted.

EMOJI = "\U0001f600"  # U+D83D U+DE00 in UTF-16
FORBIDDEN = {
    "reference": b"&#x0E;",
    "decimal": b"&#14;",
    "zero": b"&#x0;",
    "leading-zeros": b"&#x000000000E;",
    "noncharacter": b"&#xFFFF;&#65534;",
    "half-of-a-pair": b"&#xD83D;",
    "other-half": b"&#56832;",
    "reversed-pair": b"&#xDE00;&#xD83D;",
    "beyond-unicode": b"&#x110000;&#99999999;",
    "raw": b"\x0e\x00\x1b",
    "raw-noncharacter": b"\xef\xbf\xbe\xef\xbf\xbf",
    "raw-half": b"\xed\xa0\xbd",
}
PAIRS = {
    "hexadecimal": b"&#xD83D;&#xDE00;",
    "decimal": b"&#55357;&#56832;",
    "both": b"&#xd83d;&#56832;",
    "raw": b"\xed\xa0\xbd\xed\xb8\x80",
}


def write(path: Path, *bodies: bytes) -> Path:
    """Write a dump of one row for each body, which is put into the XML as it is."""
    rows = [question("1", f"body{number:03}") for number in range(len(bodies))]
    content = write_dump(path, rows).read_bytes()
    for number, body in enumerate(bodies):
        content = content.replace(b"body%03d" % number, body)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("piece", FORBIDDEN.values(), ids=FORBIDDEN)
def test_forbidden_characters_are_removed_and_rows_counted(tmp_path: Path, piece: bytes) -> None:
    path = write(tmp_path / "a.Posts.xml", b"c" + piece + b"d &#xA;&#x2318; e", b"x " + piece + b" " + piece, b"y")
    found, dropped = read(path)
    assert [post.sentences for post in found] == [["cd ⌘ e"], ["x"], ["y"]]
    assert dropped == {"rows_with_forbidden_characters": 2}


@pytest.mark.parametrize("piece", PAIRS.values(), ids=PAIRS)
def test_surrogate_pairs_are_joined(tmp_path: Path, piece: bytes) -> None:
    path = write(tmp_path / "a.Posts.xml", b"a " + piece * 2 + b" b", b"c")
    posts, dropped = read(path)
    assert [post.sentences for post in posts] == [[f"a {EMOJI} {EMOJI} b"], ["c"]]
    assert dropped == {"rows_with_forbidden_characters": 1}


def test_another_encoding(tmp_path: Path) -> None:
    """In Latin-1, the UTF-8 bytes of U+FFFE are three ordinary characters, which the reader keeps."""
    rows = question("1", "a\x0eï¿¾b") + question("2", "é")
    text = f'<?xml version="1.0" encoding="iso-8859-1"?><posts>\n{rows}</posts>'
    text = text.replace("a\x0e", "a\x0e&#14;&#xD83D;&#xDE00;")
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(text.encode("latin-1"))
    posts, dropped = read(path)
    assert [" ".join(post.sentences) for post in posts] == [f"a {EMOJI} ï ¿ ¾ b", "é"]
    assert dropped == {"rows_with_forbidden_characters": 1}


@given(st.lists(st.tuples(st.sampled_from(["&#x{:x};", "&#{};", "raw"]), st.integers(0, 0x10FFFF))))
def test_the_filter_keeps_exactly_what_xml_allows(characters: list[tuple[str, int]]) -> None:
    """An XML parser, which refuses forbidden characters, reads the output. The tests above cover halves of pairs."""
    kept = [(form, code) for form, code in characters if not 0xD800 <= code < 0xE000 and chr(code) not in '<&"\t\n\r']
    spelled = "".join(chr(code) if form == "raw" else form.format(code) for form, code in kept)
    out = CharacterFilter().feed(f'<row Body="{spelled}"/>'.encode(), final=True)
    assert ElementTree.fromstring(out).get("Body") == "".join(chr(code) for _, code in kept if is_allowed(chr(code)))


def test_parts_and_chunks_of_a_dump_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.Posts.xml", *(b"a " + piece + b" b" for piece in (*FORBIDDEN.values(), *PAIRS.values())))
    expected = read(path)
    assert expected[1] == {"rows_with_forbidden_characters": len(FORBIDDEN) + len(PAIRS)}
    for chunk in (1, 2, 3, 5, 7, 100):
        monkeypatch.setattr(stackexchange, "CHUNK", chunk)
        assert read(path) == expected
    with reading.parts_of(150):
        assert read(path) == expected
