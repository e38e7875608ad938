"""Readers of files with a record per row: CSV, Parquet, JSON Lines and plain text."""

import codecs
import csv
import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError, at_least_one
from flsim.base.files import file_digest
from flsim.data.formats import posts
from flsim.data.records import Layout, Vocabulary

LONGEST_FIELD = 2**24  # characters; longest field, which bounds a quote that never ends
_FLOAT = re.compile(r"-?[0-9]{1,300}\.0+")


def read_csv(part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
    """Yield one post per row; blank lines and other columns are ignored, and empty fields are nulls."""
    csv.field_size_limit(LONGEST_FIELD)
    with part.path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter=_delimiter(part), strict=True)
        try:
            header = next(rows, [])
            named = zip(part.named, posts.OPTIONS, strict=False)
            places = [_place(header, column, option, part, _delimiter(part)) for column, option in named]
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
                yield from posts.posts_of(author, text, dropped, part.reading, prompt=prompt)
        except posts.WrongFieldError as error:
            raise InputError(
                f"{part.source}: line {rows.line_num}: {part.named[error.place]!r} {error.why}, found {user:.40}"
            ) from error
        except UnicodeDecodeError as error:
            # the file is read ahead, so the line is unknown
            raise InputError(f"{part.source}: not UTF-8; convert the file to UTF-8") from error
        except csv.Error as error:
            raise InputError(f"{part.source}: line {rows.line_num}: not CSV ({error})") from error


def _delimiter(part: posts.Part) -> str:
    default = "\t" if posts.unpacked_name(part.source).lower().endswith(".tsv") else ","
    return part.reading.delimiter or default


def _place(columns: list[str], column: str, option: str, part: posts.Part, delimiter: str = "") -> int:
    """Return the place of the only column with this name; raise InputError for none, or for several."""
    if columns.count(column) != 1:
        names, fault = ", ".join(columns)[:200] or "none", "several columns" if column in columns else "no column"
        separated, other = (f", separated by {delimiter!r},", ", or set --delimiter") if delimiter else ("", "")
        raise InputError(
            f"{part.source}: {fault} {column!r}; its columns{separated} are {names}; name the right column with "
            f"{option}{other}"
        )
    return columns.index(column)


CSV = posts.Format("csv", posts.whole_file, read_csv)

# Reader of Parquet files with a column of users and a column of plain text.
#
# Users are strings or integers, also as floats. A text is a string, or a list of texts.

MAGIC = b"PAR1"
BATCH = 256  # rows in memory at a time


@contextmanager
def _open(data: Path, source: Path) -> Iterator[Any]:
    kinds = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError)
    with (
        posts.reading(source, "cannot be read as Parquet", kinds),
        pq.ParquetFile(data, memory_map=False, pre_buffer=False, buffer_size=2**16) as file,
    ):
        yield file


def parquet_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[posts.Part]:
    """Return the parts of a file: ranges of row groups."""
    with _open(data, source) as file:
        bounds, rows, size = [0], 0, 0
        for group in range(file.metadata.num_row_groups):
            metadata = file.metadata.row_group(group)
            rows, size = rows + metadata.num_rows, size + metadata.total_byte_size
            if rows >= posts.PART_RECORDS or size >= posts.PART_BYTES or group == file.metadata.num_row_groups - 1:
                bounds.append(group + 1)
                rows = size = 0
    return posts.parts_between(bounds, data, source, columns)


def read_parquet(part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
    """Yield one post per text; `flsim.data.formats.posts.posts_of` states which ones are dropped."""
    with _open(part.path, part.source) as file:
        for column, option in zip(part.named, posts.OPTIONS, strict=False):
            _place(file.schema_arrow.names, column, option, part)
        groups = range(part.first, part.last)
        for batch in file.iter_batches(BATCH, row_groups=groups, columns=list(part.named), use_threads=False):
            for row in zip(*(batch.column(name).to_pylist() for name in part.named), strict=True):
                user, text, prompt = (*row, None)[:3]
                try:
                    yield from posts.posts_of(user, text, dropped, part.reading, prompt=prompt)
                except posts.WrongFieldError as error:
                    raise InputError(
                        f"{part.source}: column {part.named[error.place]!r} {error.why}, found {row[error.place]!s:.40}"
                    ) from error


PARQUET = posts.Format("parquet", parquet_parts, read_parquet)

# Readers of JSON: one object ``{"user": ..., "text": ...}`` per line, in UTF-8, with plain text (not HTML).

LONGEST_LINE = 2**24  # bytes
CHUNK = 2**16  # bytes
SHOWN_KEYS = 10  # longest excerpt in an error
MISSING = object()


def jsonl_parts(data: Path, source: Path, columns: tuple[str, str]) -> list[posts.Part]:
    """Return the parts of a file: byte ranges that end after a line feed, or at the end of the file."""
    size = data.stat().st_size
    bounds = [0]
    with data.open("rb") as file:
        while (target := bounds[-1] + posts.PART_BYTES) < size:
            bounds.append(_after_line_feed(file, target))
    bounds += [size] if bounds[-1] < size else []
    return posts.parts_between(bounds, data, source, columns)


def _after_line_feed(file: IO[bytes], offset: int) -> int:
    """Return the offset of the first line at or after an offset; the end of the file if there is none."""
    file.seek(offset - 1)
    while line := file.readline(CHUNK):
        if line.endswith(b"\n"):
            break
    return file.tell()


def read_jsonl(part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
    """Yield one post per text; blank lines and other keys are ignored, and lines over 16 MB are ``posts_too_long``."""
    is_key = cache(partial(_occurs, part.path))
    with part.path.open("rb") as file:
        offset = part.first
        file.seek(offset)
        while offset < part.last:
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                raise InputError(f"{part.source}: the file became shorter while flsim read it; import it again")
            start, offset = offset, offset + len(line)
            try:
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    if not line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
                        what = f"a line of more than {LONGEST_LINE:,} bytes that is not a JSON object"
                        raise posts.WrongFieldError(posts.USER, f"{what}; {_expected(part.columns)}")
                    offset = _after_line_feed(file, file.tell() + 1)
                    dropped["posts_too_long"] += 1
                    continue
                if start == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield from _posts(line.removesuffix(b"\n"), part, dropped, is_key)
            except posts.WrongFieldError as error:
                line_number = 1
                file.seek(0)
                while start > 0 and (chunk := file.read(min(2**20, start))):
                    line_number += chunk.count(b"\n")
                    start -= len(chunk)
                raise InputError(f"{part.source}: line {line_number}: {error}") from error


def _expected(columns: tuple[str, str]) -> str:
    return f"expected {{{json.dumps(columns[0])}: ..., {json.dumps(columns[1])}: ...}}"


def _occurs(path: Path, key: str) -> bool:
    """Return whether the object in any line of a file has a value for a key."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            with suppress(ValueError, RecursionError):
                if has_value(json.loads(line.decode("utf-8-sig")), key):
                    return True
    return False


def _posts(line: bytes, part: posts.Part, dropped: Counter[str], is_key: Callable[[str], bool]) -> Iterator[posts.Post]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        why = f"not UTF-8 (byte {error.start + 1} of the line); convert the file to UTF-8"
        raise posts.WrongFieldError(posts.USER, why) from error
    except (ValueError, RecursionError) as error:
        raise posts.WrongFieldError(posts.USER, f"not JSON ({reason_of(error)}); {_expected(part.columns)}") from error
    yield from posts_of_object(value, part, dropped, is_key)


def posts_of_object(
    value: Any, part: posts.Part, dropped: Counter[str], is_key: Callable[[str], bool]
) -> Iterator[posts.Post]:
    """Yield the posts of a JSON object; a missing key counts as null if any object of the file has the key."""
    if not isinstance(value, dict):
        raise posts.WrongFieldError(posts.USER, f"not a JSON object; {_expected(part.columns)}")
    fields = []
    for place, key in enumerate(part.named):
        inner = _value_at(value, key)
        if inner is MISSING and not is_key(key):
            raise posts.WrongFieldError(
                place, f"no {key!r}; {_keys_of(value)}; name the right one with {posts.OPTIONS[place]}"
            )
        fields.append(None if inner is MISSING else inner)
    user, text, prompt = (*fields, None)[:3]
    try:
        yield from posts.posts_of(user, text, dropped, part.reading, prompt=prompt)
    except posts.WrongFieldError as error:
        why = f"{part.named[error.place]!r} {error.why}, found {_abbreviated(fields[error.place])}"
        raise posts.WrongFieldError(error.place, why) from error


def has_value(value: Any, key: str) -> bool:
    return isinstance(value, dict) and _value_at(value, key) not in (MISSING, None)


def _value_at(value: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or of ``author.id``: the key ``id`` of the object ``author``; otherwise `MISSING`."""
    inner: Any = value
    for step in [key] if key in value else key.split("."):
        if inner is None:
            return None
        if not isinstance(inner, dict) or step not in inner:
            return MISSING
        inner = inner[step]
    return inner


def _keys_of(value: dict[str, Any]) -> str:
    first, others = ", ".join(map(_abbreviated, list(value)[:SHOWN_KEYS])) or "none", len(value) - SHOWN_KEYS
    return f"its keys are {first}" + (f" and {others:,} others" if others > 0 else "")


def _abbreviated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def reason_of(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


JSONL = posts.Format("jsonl", jsonl_parts, read_jsonl)

# Reader of JSON that is not lines: an array of objects, indented objects one after another, and LEAF's layout.
#
# That layout (https://leaf.cmu.edu) is one object, ``{"users": [...], "user_data": {USER: {"x": [TEXT, ...]}}}``. A
# file is read completely, so large files should be JSON lines.

LARGEST = 2**30  # bytes of a file, which needs several times as much memory
LEAF_DATA, LEAF_TEXTS = "user_data", "x"
LEAF_KEYS = {"users", "num_samples", "hierarchies", LEAF_DATA}

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_LEAF = re.compile(rb'\s*\{\s*"(?:(?:users|num_samples|hierarchies)"\s*:\s*\[|user_data"\s*:\s*\{)')


def read_json(part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
    """Yield one post per text; `flsim.data.formats.posts.posts_of` states which ones are dropped."""
    values = _values(part.path, part.source)
    leaf = values[0] if len(values) == 1 else None
    if isinstance(leaf, dict) and leaf.keys() <= LEAF_KEYS and isinstance(leaf.get(LEAF_DATA), dict):
        yield from _leaf_posts(leaf[LEAF_DATA], part, dropped)
        return
    for number, value in enumerate(values, start=1):
        try:
            yield from posts_of_object(value, part, dropped, lambda key: any(has_value(one, key) for one in values))
        except posts.WrongFieldError as error:
            raise InputError(f"{part.source}: object {number}: {error}") from error


def is_lines(data: Path) -> bool:
    """Return whether a file that begins with an object holds JSON lines: its first line is not only a part of it."""
    with data.open("rb") as file:
        line = next((line for line in iter(lambda: file.readline(LONGEST_LINE + 1), b"") if line.strip()), b"")
    if _LEAF.match(line) or len(line) > LONGEST_LINE:
        return not _LEAF.match(line)
    try:
        json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return error.pos < len(error.doc.rstrip())  # otherwise the object continues on the next line
    except (ValueError, RecursionError):
        pass
    return True


def _values(data: Path, source: Path) -> list[Any]:
    """Return the members of the array in a file, or its values one after another; raise InputError for other text."""
    if (size := data.stat().st_size) > LARGEST:
        raise InputError(
            f"{source}: {size:,} bytes of JSON, but at most {LARGEST:,} are read; write one object per line"
        )
    try:
        text = data.read_text(encoding="utf-8-sig")
        values: list[Any] = []
        end = _skip(text, 0)
        while end < len(text):
            value, end = json.JSONDecoder().raw_decode(text, end)
            values.append(value)
            end = _skip(text, end)
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not JSON ({reason_of(error)})") from error
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _skip(text: str, place: int) -> int:
    return _WHITE_SPACE.match(text, place).end()  # type: ignore[union-attr]


def _leaf_posts(data: dict[str, Any], part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
    if part.reading.prompt_column is not None:
        raise InputError(f"{part.source}: has LEAF's layout, which has no prompts; remove --prompt-column")
    for user, value in data.items():
        texts = value.get(LEAF_TEXTS) if isinstance(value, dict) else None
        where = f"{LEAF_TEXTS!r} of user {user!r:.40}"
        if not isinstance(texts, list):
            raise InputError(f"{part.source}: {where} is not a list, which the layout of LEAF requires")
        try:
            yield from posts.posts_of(user, texts, dropped, part.reading)
        except posts.WrongFieldError as error:
            raise InputError(
                f"{part.source}: {where} {error.why}; write a reader: --format my_reader.py:NAME"
            ) from error


JSON = posts.Format("json", posts.whole_file, read_json)

# Reader of plain text in UTF-8, a record per line, such as the Penn Treebank for language models.
#
# Words and characters are unchanged; runs of white space become one space. A block of consecutive lines counts as an
# author, named by the file and the number of the first line.

LINES_PER_AUTHOR = 200  # about 4,000 words of typical text


def text_format(lines_per_author: int = LINES_PER_AUTHOR) -> posts.Format:
    """Return the format of plain text in which `lines_per_author` consecutive lines, at least 1, count as an author."""
    at_least_one(lines_per_author=lines_per_author)
    settings = {} if lines_per_author == LINES_PER_AUTHOR else {"lines_per_author": lines_per_author}
    return posts.Format("text", partial(_parts, lines_per_author), partial(_read, lines_per_author), about=settings)


def _parts(lines_per_author: int, data: Path, source: Path, columns: tuple[str, str]) -> list[posts.Part]:
    bounds, begun = [0], [1]  # begun: number of each part's first line
    lines = offset = 0
    with data.open("rb") as file:
        while chunk := file.readline(CHUNK):
            offset += len(chunk)
            lines += chunk.endswith(b"\n")
            is_between = chunk.endswith(b"\n") and lines % lines_per_author == 0
            if is_between and offset - bounds[-1] >= posts.PART_BYTES:
                bounds.append(offset)
                begun.append(lines + 1)
    bounds += [offset] if bounds[-1] < offset else []
    parts = posts.parts_between(bounds, data, source, columns)
    return [replace(part, line=line) for part, line in zip(parts, begun, strict=False)]  # no part begins at the end


def _read(lines_per_author: int, part: posts.Part, dropped: Counter[str]) -> Iterator[posts.Post]:
    """Yield the lines of one author after another; `published` documents which lines are dropped."""
    split, name = posts.split_of_name(part.source), posts.user_name(posts.unpacked_name(part.source)) or "text"
    for author, lines in groupby(enumerate(_lines(part)), key=lambda line: line[0] // lines_per_author):
        user = f"{name}:{part.line + author * lines_per_author}"
        yield from posts.published(user, split, (line for _, line in lines), dropped)


def _lines(part: posts.Part) -> Iterator[bytes]:
    """Yield the lines of a part; a line that is too long is cut, but remains too long."""
    with part.path.open("rb") as file:
        file.seek(part.first)
        while (start := file.tell()) < part.last:
            line = rest = file.readline(posts.LONGEST_RECORD + 1)
            if not line:
                raise InputError(f"{part.source}: the file became shorter while flsim read it; import it again")
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(CHUNK)
            if not start and line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise InputError(f"{part.source}: UTF-16; convert the file to UTF-8")
            yield line if start else line.removeprefix(codecs.BOM_UTF8)


TEXT = text_format()

# Reader of the word counts of TensorFlow Federated, ``stackoverflow.word_count.tar.bz2``: the standard vocabulary.
#
# Lines are ``word<TAB>count``, most frequent first. The count is the number of train users who have the word.


def read_word_count(path: Path, vocabulary_size: int, fit: bool = False) -> tuple[Vocabulary, str]:
    """Return the most frequent words of the text file, or of its archive, and the sha256 of the file.

    With `fit`, there may be fewer words than the vocabulary needs.
    """
    needed = Layout(vocabulary_size).words
    kinds = (tarfile.TarError, EOFError, OSError, ValueError)
    with posts.reading(path, "cannot be read as lines of a word and its count", kinds), _opened(path) as file:
        lines = islice(iter(partial(file.readline, CHUNK), b""), needed)
        rows = [line.decode("utf-8").split() for line in lines]
        words, counts = tuple(word for word, _ in rows), tuple(int(count) for _, count in rows)
        sha256 = file_digest(path)
    if list(counts) != sorted(map(abs, counts), reverse=True):
        raise InputError(f"{path}: counts must be 0 or more, the largest first; sort the lines by count")
    if len(set(words)) < len(words):
        raise InputError(f"{path}: {Counter(words).most_common(1)[0][0]!r:.40} occurs twice; remove one line")
    if len(words) < needed and not (fit and words):
        raise InputError(
            f"{path}: ends after {len(words):,} words, but a vocabulary of {vocabulary_size:,} has {needed:,}; give "
            f"--vocabulary {len(words) + vocabulary_size - needed} or less"
        )
    return Vocabulary(words, counts), sha256


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open the text, which is the file or the first file in the archive."""
    with path.open("rb") as file:
        is_archive = file.read(3) == b"BZh"
        file.seek(0)
        if not is_archive:
            yield file
            return
        with tarfile.open(fileobj=file, mode="r|bz2") as archive:
            for member in archive:
                if member.isfile() and (text := archive.extractfile(member)) is not None:
                    yield text
                    return
    raise InputError(f"{path}: the archive has no file")
