"""Reader of the Posts.xml of a Stack Exchange data dump, in parts.

A dump is one `posts` element with one `row` element per post (https://meta.stackexchange.com/questions/2677). Expat
parses rows as the bytes arrive, so memory does not grow with the file. Nothing outside the file is ever opened. A file
that declares entities is refused: no dump does, and expanding them is how XML is made to explode or to leak.

A part begins at a ``<row`` at the beginning of a line, which no attribute's value can hold. Later parts get a root
element of their own. This needs a file in UTF-8 without a DTD, as all dumps are. Any other file is one part.

Dumps hold characters that XML 1.0 forbids, because the exporter escapes what authors typed. These are removed before
Expat sees them, see `flsim.data.formats.xml_characters`.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.parsers import expat

from flsim.base.errors import InputError
from flsim.data.formats import posts
from flsim.data.formats.posts import LONGEST_RECORD, Format, Part, Post, post_of, unpacked_name
from flsim.data.formats.xml_characters import CharacterFilter, utf16_decoder
from flsim.data.html import plain_text

QUESTION, ANSWER = "1", "2"
COMMUNITY = "-1"  # the site's own account: nobody's text
LONGEST_ROW = 2**26  # bytes; expat keeps an unfinished element in memory
MOST_TAGS = 20_000  # in a body of at most 30,000 characters before rendering; the time for deep nesting is quadratic
CHUNK = 2**20  # bytes; expat begins an unfinished element again with each chunk

_HEAD = re.compile(
    rb"""(?:\xef\xbb\xbf)?(?:<\?xml(?:[^?>]*encoding\s*=\s*["']utf-8["'])?[^?>]*\?>)?\s*<posts\s*>""", re.IGNORECASE
)
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
    """Return where the first row that begins a line at or after an offset begins; the end of the file if none does."""
    file.seek(offset)
    seen = b""
    while chunk := file.read(CHUNK):
        seen += chunk
        if match := _ROW.search(seen):
            return offset + seen.index(b"<", match.start())
        offset += len(seen[:-32])
        seen = seen[-32:]  # a row may begin at the end of what was read
    return size


def read_stackexchange(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield the questions and answers of a dump, by users named ``site/OwnerUserId``.

    Dropped, under the first reason that applies, are ``posts_of_other_types`` (tag wikis and the like),
    ``posts_without_owner``, ``posts_of_community_user`` (OwnerUserId -1), ``posts_without_body`` and ``posts_too_long``
    (a body of more than a million characters, or of 20,000 tags, which no person wrote).
    ``rows_with_forbidden_characters`` counts the rows without the characters that XML 1.0 forbids; they are read.

    Raises:
        InputError: the file is not XML, is cut short, has no posts, or declares entities.
    """
    site = part.reading.site or site_of(part.source)
    rows = 0
    for row in _rows(part, dropped):
        rows += 1
        reason = _reason_to_drop(row)
        if reason:
            dropped[reason] += 1
        else:
            yield post_of(f"{site}/{row['OwnerUserId']}", plain_text(row["Body"]), ascii=part.reading.ascii)
    if not rows and part.first == 0 and part.last == part.path.stat().st_size:
        raise InputError(f"{part.source}: no posts in it; give the Posts.xml of a Stack Exchange dump")


def site_of(path: Path) -> str:
    """Return a dump's site: ``ai`` of ``ai.Posts.xml``, or the folder's name if the file is just ``Posts.xml``.

    Compression changes no site.

    >>> site_of(Path("dumps/history.meta.Posts.xml.gz")), site_of(Path("dumps/ai.stackexchange.com/Posts.xml"))
    ('history.meta', 'ai.stackexchange.com')
    >>> site_of(Path("dumps/stackoverflow.com-Posts.7z"))
    'stackoverflow.com'
    """
    name = unpacked_name(path)
    if path.suffix.lower() != ".7z" or name.lower().endswith(".xml"):
        name = Path(name).stem
    if name.lower() == "posts":
        return path.resolve().parent.name
    return _POSTS.sub("", name)


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

    def __init__(self, part: Part, encoding: str | None = None) -> None:
        self.part = part
        self.rows: list[dict[str, str]] = []
        self.fed = 0
        self._depth = 0
        self._expat = expat.ParserCreate(encoding)
        self._expat.specified_attributes = True  # none of a DTD's defaults
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.EntityDeclHandler = self._entity

    def feed(self, chunk: bytes, final: bool = False) -> list[dict[str, str]]:
        """Return the rows that end in this chunk."""
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

    def decoded(self, decoder: codecs.IncrementalDecoder, raw: bytes, final: bool) -> bytes:
        """Return a chunk of a file in UTF-16 in UTF-8, with halves of surrogate pairs as they are."""
        try:
            return decoder.decode(raw, final).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-16 ({error.reason})") from error

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth == 1 and name != "posts":
            raise self._error(f"the root element is <{name[:40]}>, not <posts>")
        if self._depth == 2 and name == "row":
            self.rows.append(attributes)

    def _end(self, _name: str) -> None:
        self._depth -= 1

    def _entity(self, name: str, *_declaration: object) -> None:
        raise self._error(f"declares the entity {name[:40]!r}, which no dump does and which is refused")

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
        head = file.read(2**12)
        decoder = utf16_decoder(head)
        parser = _Parser(part, None if decoder is None else "utf-8")
        characters = CharacterFilter(utf8=decoder is not None or not _OTHER_ENCODING.search(head))

        def parsed(raw: bytes, final: bool = False) -> list[dict[str, str]]:
            if decoder is not None:
                raw = parser.decoded(decoder, raw, final)
            return parser.feed(characters.feed(raw, final), final)

        file.seek(part.first)
        if part.first:
            yield from parser.feed(b"<posts>")
        offset = part.first
        while offset < part.last and (chunk := file.read(min(CHUNK, part.last - offset))):
            offset += len(chunk)
            yield from parsed(chunk)
    yield from parsed(b"" if part.last >= whole else b"</posts>", final=True)
    if characters.elements:
        dropped["rows_with_forbidden_characters"] += characters.elements


STACKEXCHANGE = Format("stackexchange", stackexchange_parts, read_stackexchange)
