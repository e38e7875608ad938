"""Characters that XML 1.0 forbids, in dumps: removed, and their rows counted."""

from pathlib import Path

import pytest
import reading
from dumps import DECLARATION, question, write_dump
from helpers import Flsim
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.formats import stackexchange
from flsim.data.formats.posts import Post
from flsim.data.formats.stackexchange import CharacterFilter, is_allowed

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
    path = write(
        tmp_path / "a.Posts.xml", b"a b", b"c" + piece + b"d &#xA;&#x2318; e", b"x " + piece + b" " + piece, b"y"
    )
    texts = [["a b"], ["cd ⌘ e"], ["x"], ["y"]]
    assert reading.read(path, "stackexchange") == (
        [Post("a/1", text) for text in texts],
        {"rows_with_forbidden_characters": 2},
    )


@pytest.mark.parametrize("piece", PAIRS.values(), ids=PAIRS)
def test_surrogate_pairs_are_joined(tmp_path: Path, piece: bytes) -> None:
    path = write(tmp_path / "a.Posts.xml", b"a " + piece * 2 + b" b", b"c")
    posts, dropped = reading.read(path, "stackexchange")
    assert [post.sentences for post in posts] == [[f"a {EMOJI} {EMOJI} b"], ["c"]]
    assert dropped == {"rows_with_forbidden_characters": 1}


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_other_encodings(tmp_path: Path, name: str) -> None:
    """In latin-1 the bytes of U+FFFE in UTF-8 are three letters, which stay."""
    raw = "\x0e\ud83d" if name != "latin-1" else "\x0eï¿¾"
    declaration = f'<?xml version="1.0" encoding="{name[:6] if name != "latin-1" else "iso-8859-1"}"?>'
    text = f"{declaration}<posts>\n{question('1', f'a{raw}b')}{question('2', 'é')}</posts>"
    text = text.replace("b&quot;", "b").replace("a\x0e", "a\x0e&#14;&#xD83D;&#xDE00;")
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(text.encode(name, "surrogatepass"))
    posts, dropped = reading.read(path, "stackexchange")
    expected = f"a {EMOJI} b" if name != "latin-1" else f"a {EMOJI} ï ¿ ¾ b"
    assert [" ".join(post.sentences) for post in posts] == [expected, "é"]
    assert dropped == {"rows_with_forbidden_characters": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DECLARATION.encode() + b"<posts>\n<row Body='&#x0E;a", "unclosed token"),
        (DECLARATION.encode() + b"<posts>\n<row Body='&#xD83", "unclosed token"),
        (DECLARATION.encode() + b"<posts>\n<row Body='&#x0E;'/>", "no element found"),
        (b"<!DOCTYPE posts [<!ENTITY a '&#x0E;'>]><posts><row Body='&a;'/></posts>", "declares the entity 'a'"),
        (b"<posts><row Body='&#xG;'/></posts>", "not well-formed"),
        (b"<posts><row Body='&#;'/></posts>", "not well-formed"),
    ],
)
def test_truncated_files_and_entities_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.Posts.xml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        reading.read(path, "stackexchange")


PIECES = [
    *FORBIDDEN.values(),
    *PAIRS.values(),
    b"<row ",
    b"/>",
    b"a",
    b"&#xA;",
    b"&#10;",
    b"&",
    b";",
    "é한\U0001f600".encode(),
]


@given(st.lists(st.sampled_from(PIECES)).map(b"".join), st.lists(st.integers(1, 40), min_size=1))
def test_chunks_change_nothing(content: bytes, sizes: list[int]) -> None:
    """Wherever a chunk ends: within a reference, within a pair, within a character."""
    whole, cut = CharacterFilter(), CharacterFilter()
    expected = whole.feed(content, final=True)
    found, offset = b"", 0
    for number in range(len(content) + 1):
        size = sizes[number % len(sizes)]
        found += cut.feed(content[offset : offset + size])
        offset += size
    assert _unescaped(found + cut.feed(b"", final=True)) == _unescaped(expected)
    assert cut.elements == whole.elements


@given(st.lists(st.tuples(st.sampled_from(["hex", "decimal", "raw"]), st.integers(0, 0x10FFFF))))
def test_what_is_left_is_what_xml_allows(characters: list[tuple[str, int]]) -> None:
    """Against the definition: join the surrogates, then keep the characters of the production Char."""
    kept = [(how, code) for how, code in characters if chr(code) not in '<&"']
    spelled = b"".join(_spelled(how, code) for how, code in kept)
    out = CharacterFilter().feed(b'<row Body="' + spelled + b'"/>', final=True)
    parser_sees = _unescaped(out.removeprefix(b'<row Body="').removesuffix(b'"/>'))
    joined, position = "", 0
    while position < len(kept):
        (how, code), (next_how, next_code) = kept[position], (*kept, ("", 0))[position + 1]
        is_pair = 0xD800 <= code < 0xDC00 <= next_code < 0xE000 and (how == "raw") == (next_how == "raw")
        joined += chr(0x10000 + (code - 0xD800) * 0x400 + next_code - 0xDC00) if is_pair else chr(code)
        position += 2 if is_pair else 1
    assert parser_sees == "".join(character for character in joined if is_allowed(character))


def _spelled(how: str, code: int) -> bytes:
    if how == "raw":
        return chr(code).encode("utf-8", "surrogatepass")
    return (f"&#x{code:x};" if how == "hex" else f"&#{code};").encode()


def _unescaped(content: bytes) -> str:
    pieces = content.decode("utf-8").split("&#")
    text = pieces[0]
    for piece in pieces[1:]:
        digits, _, rest = piece.partition(";")
        text += chr(int(digits[1:], 16) if digits.startswith("x") else int(digits)) + rest
    return text


def test_parts_and_chunks_of_a_dump_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.Posts.xml", *(b"a " + piece + b" b" for piece in (*FORBIDDEN.values(), *PAIRS.values())))
    expected = reading.read(path, "stackexchange")
    assert expected[1] == {"rows_with_forbidden_characters": len(FORBIDDEN) + len(PAIRS)}
    for chunk in (1, 7, 100):
        monkeypatch.setattr(stackexchange, "CHUNK", chunk)
        assert reading.read(path, "stackexchange") == expected
    with reading.parts_of(150):
        assert reading.read(path, "stackexchange") == expected


def test_an_import_reports_the_rows(tmp_path: Path, flsim: Flsim) -> None:
    path = write(tmp_path / "ai.Posts.xml", *[b"some words here"] * 20, b"a &#x0E; b")
    settings = ("--words-per-user", 10, "--heldout", 0, "--test", 0)
    code, out, err = flsim("data", "import", path, *settings, "--out", tmp_path / "corpus")
    assert code == 0, err
    assert "1 rows, without the characters that XML forbids" in out
    manifest = Corpus.open(tmp_path / "corpus").manifest
    assert manifest["dropped"]["rows_with_forbidden_characters"] == 1
    assert manifest["parameters"]["read"]["posts"] == 21
