"""Reader of CSV: a header, then a row per post, with commas or another delimiter, in UTF-8, with plain text (not HTML).

Quoted fields can hold line feeds, so no place is known to be between two rows, and a file is a single part.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator

from flsim.base.errors import InputError
from flsim.data.formats.posts import OPTIONS, Format, Part, Post, WrongFieldError, posts_of, unpacked_name, whole_file

LONGEST_FIELD = 2**24  # characters; longest field, which bounds a quote that never ends
_FLOAT = re.compile(r"-?[0-9]{1,300}\.0+")


def read_csv(part: Part, dropped: Counter[str]) -> Iterator[Post]:
    """Yield one post per row; blank lines and other columns are ignored, and empty fields are nulls."""
    csv.field_size_limit(LONGEST_FIELD)
    with part.path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter=_delimiter(part), strict=True)
        try:
            header = next(rows, [])
            places = [_place(header, column, option, part) for column, option in zip(part.named, OPTIONS, strict=False)]
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise InputError(
                        f"{part.source}: line {rows.line_num}: a row of {len(row)} fields, but the header has "
                        f"{len(header)}; put quotes around fields that hold {_delimiter(part)!r}, quotes or line feeds"
                    )
                user, text, prompt = (*(row[place] for place in places), None)[:3]
                # "7.0", which pandas writes for an integer in a column with nulls, is an integer
                author = float(str(user)) if _FLOAT.fullmatch(str(user)) else user
                yield from posts_of(author, text, dropped, part.reading, prompt=prompt)
        except WrongFieldError as error:
            raise InputError(
                f"{part.source}: line {rows.line_num}: {part.named[error.place]!r} {error.why}, found {user:.40}"
            ) from error
        except UnicodeDecodeError as error:
            # the file is read ahead, so the line is unknown
            raise InputError(f"{part.source}: not UTF-8; convert the file to UTF-8") from error
        except csv.Error as error:
            raise InputError(f"{part.source}: line {rows.line_num}: not CSV ({error})") from error


def _delimiter(part: Part) -> str:
    default = "\t" if unpacked_name(part.source).lower().endswith(".tsv") else ","
    return part.reading.delimiter or default


def _place(header: list[str], column: str, option: str, part: Part) -> int:
    if header.count(column) != 1:
        names, delimiter = ", ".join(header)[:200] or "none", _delimiter(part)
        raise InputError(
            f"{part.source}: no column {column!r}; its columns, separated by {delimiter!r}, are {names}; name "
            f"the right column with {option}, or set --delimiter"
        )
    return header.index(column)


CSV = Format("csv", whole_file, read_csv)
