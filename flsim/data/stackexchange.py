"""Posts.xml of a Stack Exchange data dump, as a stream.

A dump is one `posts` element with one `row` element a post (https://meta.stackexchange.com/questions/2677). Rows are
parsed by expat as the bytes arrive, so memory does not grow with the file. Nothing outside the file is ever opened, and
a file that declares entities is refused: no dump does, and expanding them is how XML is made to explode or to leak.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from flsim.data.posts import Post, Source
from flsim.data.text import plain_text
from flsim.errors import InputError

QUESTION, ANSWER = "1", "2"
COMMUNITY = "-1"  # the site's own account: nobody's text
LONGEST_ROW = 2**22  # bytes; a post has at most 30,000 characters, and expat keeps an unfinished element in memory


def read_stackexchange(source: Source, dropped: Counter[str]) -> Iterator[Post]:
    """The questions and answers of a dump, by users named ``site/OwnerUserId``.

    Dropped, under the first reason that holds: ``posts_of_other_types`` (tag wikis and the like),
    ``posts_without_owner``, ``posts_of_community_user`` (OwnerUserId -1), ``posts_without_body``.

    Raises:
        InputError: not XML, cut short, not posts, or it declares entities.
    """
    site = site_of(source.path)
    rows = 0
    for row in _rows(source):
        rows += 1
        reason = _reason_to_drop(row)
        if reason:
            dropped[reason] += 1
        else:
            yield Post(f"{site}/{row['OwnerUserId']}", plain_text(row["Body"]))
    if not rows:
        raise InputError(f"{source.path}: no posts in it; give the Posts.xml of a Stack Exchange dump")


def site_of(path: Path) -> str:
    """A dump's site: ``ai`` of ``ai.Posts.xml``; the folder's name where the file is just ``Posts.xml``.

    >>> site_of(Path("dumps/history.meta.Posts.xml")), site_of(Path("dumps/ai.stackexchange.com/Posts.xml"))
    ('history.meta', 'ai.stackexchange.com')
    """
    if path.name.lower() == "posts.xml":
        return path.resolve().parent.name
    return path.stem[: -len(".posts")] if path.stem.lower().endswith(".posts") else path.stem


def _reason_to_drop(row: dict[str, str]) -> str | None:
    if row.get("PostTypeId") not in (QUESTION, ANSWER):
        return "posts_of_other_types"
    if not row.get("OwnerUserId"):
        return "posts_without_owner"
    if row["OwnerUserId"] == COMMUNITY:
        return "posts_of_community_user"
    return None if row.get("Body") else "posts_without_body"


class _Parser:
    """Expat with the handlers of a dump: collects the attributes of rows, refuses entities and other documents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        self.fed = 0
        self._depth = 0
        self._expat = expat.ParserCreate()
        self._expat.specified_attributes = True  # none of a DTD's defaults
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.EntityDeclHandler = self._entity

    def feed(self, chunk: bytes, final: bool = False) -> list[dict[str, str]]:
        """The rows that end in this chunk."""
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
        raise self._error(f"declares the entity {name[:40]!r}, which no dump does and which is refused")

    def _error(self, what: str, line: int | None = None, column: int | None = None) -> InputError:
        line = self._expat.CurrentLineNumber if line is None else line
        column = self._expat.CurrentColumnNumber if column is None else column
        return InputError(
            f"{self.path}: line {line}, column {column + 1}: {what}; "
            "give the complete, unpacked Posts.xml of a Stack Exchange dump"
        )


def _rows(source: Source) -> Iterator[dict[str, str]]:
    parser = _Parser(source.path)
    for chunk in source.chunks():
        yield from parser.feed(chunk)
    yield from parser.feed(b"", final=True)
