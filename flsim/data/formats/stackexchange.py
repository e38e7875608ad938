"""Reader of the Posts.xml of a Stack Exchange data dump, in parts.

A dump is one `posts` element with one `row` element per post (https://meta.stackexchange.com/questions/2677). Expat
parses rows as the bytes arrive. A file that declares entities is refused, because dumps have none, and expanding
entities can exhaust memory or read other files.

A part begins at a ``<row`` at the beginning of a line, which no attribute's value can hold, and later parts get an
artificial root element. This needs a file in UTF-8 without a DTD; any other file is one part. The characters that XML
1.0 forbids, which exporters escape, are removed before Expat reads them, see `CharacterFilter`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.parsers import expat

from selectolax.lexbor import LexborHTMLParser

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import LONGEST_RECORD, Format, Part, Post, post_of, unpacked_name

# Conversion of a post's HTML to plain text: step 2 and "the bodies were parsed" in `flsim.data.sentences`.

# Elements that end a sentence in a rendered page, including `pre`, although its text is dropped.
_BLOCKS = (
    "address, article, aside, blockquote, br, caption, center, dd, details, div, dl, dt, fieldset, figcaption, figure, "
    "footer, form, h1, h2, h3, h4, h5, h6, header, hr, li, main, nav, ol, p, pre, section, summary, table, tbody, td, "
    "tfoot, th, thead, tr, ul"
)
_DROPPED = ["pre", "script", "style"]
_WHITE_SPACE = re.compile(r"\s+")


def plain_text(html: str) -> str:
    """Return the text of an HTML fragment, any text, with a line for each block element or `br`.

    The text of `pre`, `script` and `style` is dropped. Inline elements, `code` included, are transparent, so a word can
    contain them. References are unescaped, and white space becomes one space, as in a rendered page.
    """
    tree = LexborHTMLParser(_WHITE_SPACE.sub(" ", html))
    for block in tree.css(_BLOCKS):
        block.insert_before("\n")
        block.insert_after("\n")
    tree.strip_tags(_DROPPED)
    return tree.body.text(deep=True, separator="") if tree.body else ""


# Removal of the characters that XML 1.0 forbids, before a parser refuses them.
#  XML 1.0 (section 2.2) allows tab, line feed, carriage return, and all Unicode characters except the other control
# characters, halves of surrogate pairs, U+FFFE and U+FFFF. Exporters write references to them, such as ``&#x0E;``.

_REFERENCES = rb"(?:&#(?:x[0-9a-fA-F]{1,40}|[0-9]{1,40});)+"
_CONTROL = rb"[\x00-\x08\x0b\x0c\x0e-\x1f]+"
_PAIR = rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]"  # of surrogates, each as if it were a character
_HALF = rb"\xed[\xa0-\xbf][\x80-\xbf]"
_PAIR_IN_TEXT = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NO_CHARACTER = rb"\xef\xbf[\xbe\xbf]"
_IN_UTF8 = re.compile(b"|".join((_REFERENCES, _CONTROL, _PAIR, _HALF, _NO_CHARACTER)))
_IN_OTHERS = re.compile(b"|".join((_REFERENCES, _CONTROL)))


class CharacterFilter:
    """A filter of the bytes of an XML file, chunk by chunk, that removes forbidden characters and joins surrogates.

    The file is in UTF-8, or in another encoding that contains ASCII. The bytes from the last ``<`` of a chunk are
    returned with the next one, so no element's text is cut. `elements` counts elements that were changed.
    """

    def __init__(self, utf8: bool = True) -> None:
        self.elements = 0
        self._pattern = _IN_UTF8 if utf8 else _IN_OTHERS
        self._rest = b""

    def feed(self, chunk: bytes, final: bool = False) -> bytes:
        chunk = self._rest + chunk
        end = len(chunk) if final or len(chunk) > LONGEST_ROW else max(0, chunk.rfind(b"<"))
        chunk, self._rest = chunk[:end], chunk[end:]
        elements = chunk.split(b"<")
        allowed = [self._pattern.sub(_allowed, element) for element in elements]
        self.elements += sum(before != after for before, after in zip(elements, allowed, strict=True))
        return b"<".join(allowed)


def _allowed(match: re.Match[bytes]) -> bytes:
    """Return allowed characters; ``&#x41`` and ``&#65`` are an A, and a number of no character is U+FFFF."""
    matched = match[0]
    if matched[:1] == b"&":
        digits = [reference[2:] for reference in matched.split(b";")[:-1]]
        numbers = [int(number[1:], 16) if number.startswith(b"x") else int(number) for number in digits]
        text = "".join(chr(number) if number <= 0x10FFFF else "\uffff" for number in numbers)
    else:
        text = matched.decode("utf-8", "surrogatepass")
    joined = _PAIR_IN_TEXT.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
    allowed = "".join(character for character in joined if is_allowed(character))
    return matched if allowed == text else b"".join(b"&#x%X;" % ord(character) for character in allowed)


def is_allowed(character: str) -> bool:
    """Return whether XML 1.0 allows a character: the production ``Char``."""
    return (
        character in "\t\n\r"
        or " " <= character <= "\ud7ff"
        or "\ue000" <= character <= "\ufffd"
        or character > "\uffff"
    )


QUESTION, ANSWER = "1", "2"
COMMUNITY = "-1"  # the account of the site, which is not a person
LONGEST_ROW = 2**26  # bytes; expat keeps an unfinished element in memory
MOST_TAGS = 20_000  # in a body of at most 30,000 characters before rendering; deep nesting needs quadratic time
CHUNK = 2**20  # bytes; expat parses an unfinished element again with each chunk

_HEAD = re.compile(
    rb"""(?:\xef\xbb\xbf)?(?:<\?xml(?:[^?>]*encoding\s*=\s*["']utf-8["'])?[^?>]*\?>)?\s*<posts\s*>""", re.IGNORECASE
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")
_OTHER_ENCODING = re.compile(rb"""<\?xml[^?>]*encoding\s*=\s*["'](?!utf-8["'])""", re.IGNORECASE)
_POSTS = re.compile(r"[-._ ]posts\Z", re.IGNORECASE)
_ROW = re.compile(rb"\n[ \t\r]{0,16}<row\s")


def stackexchange_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[Part]:
    """Return the parts of a file: byte ranges that begin at the file's beginning or at a row."""
    size = data.stat().st_size
    bounds = [0]
    with data.open("rb") as file:
        head = file.read(2**12)
        if _HEAD.match(head) and not _OTHER_ENCODING.search(head):
            while (target := bounds[-1] + posts.PART_BYTES) < size:
                bounds.append(_next_row(file, target, size))
    bounds += [size] if bounds[-1] < size or size == 0 else []
    return posts.parts_between(bounds, data, source, columns)


def _next_row(file: IO[bytes], offset: int, size: int) -> int:
    """Return the offset of the first row that begins a line at or after an offset; the end of the file without one."""
    file.seek(offset)
    seen = b""
    while chunk := file.read(CHUNK):
        seen += chunk
        if match := _ROW.search(seen):
            return offset + seen.index(b"<", match.start())
        offset += len(seen[:-32])
        seen = seen[-32:]  # a row can begin at the end of the read bytes
    return size


def read_stackexchange(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield the questions and answers of a dump, by users named ``site/OwnerUserId``.

    Dropped are posts of other types (tag wikis and the like), without owner or body, of the Community user, and too
    long (a million characters, or 20,000 tags). Rows that are read without forbidden characters are counted too.
    """
    site = site_of(part.source)
    rows = 0
    for row in _rows(part, dropped):
        rows += 1
        reason = _reason_to_drop(row)
        if reason:
            dropped[reason] += 1
        else:
            yield post_of(f"{site}/{row['OwnerUserId']}", plain_text(row["Body"]), part.reading)
    if not rows and part.first == 0 and part.last == part.path.stat().st_size:
        raise InputError(f"{part.source}: the file has no posts; give the Posts.xml of a Stack Exchange dump")


def site_of(path: Path) -> str:
    """Return a dump's site: ``ai`` of ``ai.Posts.xml``, or the folder's name if the file is just ``Posts.xml``."""
    name = unpacked_name(path)
    if path.suffix.lower() != ".7z" or name.lower().endswith(".xml"):
        name = Path(name).stem
    return path.resolve().parent.name if name.lower() == "posts" else _POSTS.sub("", name)


def _reason_to_drop(row: dict[str, str]) -> str | None:
    if row.get("PostTypeId") not in (QUESTION, ANSWER):
        return "posts_of_other_types"
    if not row.get("OwnerUserId"):
        return "posts_without_owner"
    if row["OwnerUserId"] == COMMUNITY:
        return "posts_of_community_user"
    body = row.get("Body")
    if not body or body.isspace():
        return "posts_without_body"
    return "posts_too_long" if len(body) > LONGEST_RECORD or body.count("<") > MOST_TAGS else None


class _Parser:
    """Expat with handlers that collect the attributes of rows, and refuse entities and other documents."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.rows: list[dict[str, str]] = []
        self.fed = 0
        self._depth = 0
        self._expat = expat.ParserCreate()
        self._expat.specified_attributes = True  # without defaults of a DTD
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.EntityDeclHandler = self._entity

    def feed(self, chunk: bytes, final: bool = False) -> list[dict[str, str]]:
        self.rows = []
        try:
            self._expat.Parse(chunk, final)
        except InputError:
            raise
        except expat.ExpatError as error:
            raise self._error(expat.ErrorString(error.code), error.lineno, error.offset) from error
        except (LookupError, ValueError) as error:  # an encoding that expat does not know
            raise self._error(str(error)) from error
        self.fed += len(chunk)
        if self.fed - self._expat.CurrentByteIndex > LONGEST_ROW:
            raise self._error(f"an element of more than {LONGEST_ROW:,} bytes")
        return self.rows

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth == 1 and name != "posts":
            raise self._error(f"the root element is <{name[:40]}>, not <posts>")
        if self._depth == 2 and name == "row":
            self.rows.append(attributes)

    def _end(self, _name: str) -> None:
        self._depth -= 1

    def _entity(self, name: str, *_declaration: object) -> None:
        raise self._error(f"declares the entity {name[:40]!r}, which is refused because dumps have no entities")

    def _error(self, what: str, line: int | None = None, column: int | None = None) -> InputError:
        line = self._expat.CurrentLineNumber if line is None else line
        column = self._expat.CurrentColumnNumber if column is None else column
        begun = f" of the part from byte {self.part.first:,}" if self.part.first else ""
        return InputError(
            f"{self.part.source}: line {line}, column {column + 1}{begun}: {what}; "
            "give the complete, unpacked Posts.xml of a Stack Exchange dump"
        )


def _rows(part: Part, dropped: Counter[str]) -> Iterator[dict[str, str]]:
    """Yield the attributes of rows; count those with forbidden characters."""
    with part.path.open("rb") as file:
        whole = file.seek(0, 2)
        file.seek(0)
        parser = _Parser(part)
        head = file.read(2**12)
        if head.startswith(_UTF16):
            raise InputError(f"{part.source}: the file is in UTF-16; convert it to UTF-8")
        characters = CharacterFilter(utf8=not _OTHER_ENCODING.search(head))
        file.seek(part.first)
        if part.first:
            yield from parser.feed(b"<posts>")
        offset = part.first
        while offset < part.last and (chunk := file.read(min(CHUNK, part.last - offset))):
            offset += len(chunk)
            yield from parser.feed(characters.feed(chunk))
    end = b"" if part.last >= whole else b"</posts>"
    yield from parser.feed(characters.feed(end, final=True), final=True)
    if characters.elements:
        dropped["rows_with_forbidden_characters"] += characters.elements


STACKEXCHANGE = Format("stackexchange", stackexchange_parts, read_stackexchange)
