"""Step 1 of an import: a part of a source becomes files of lines, one line for the texts of an author in that part.

A line is JSON of the author's split (if the source states it) and name, then the sentences, separated by tabs, which
neither JSON nor a word contains. Lines are in the order of the sha256 of names.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from flsim.base.pool import Report
from flsim.data.formats.known import format_of
from flsim.data.formats.posts import Format, Part, Reading
from flsim.data.importing.spill import hash_of, write_lines
from flsim.data.vocabulary import By

LINE = 2**12  # sentences
ALIVE = 100  # posts between two signs of life
COUNTED_TOO = ("posts_without_words", "rows_with_forbidden_characters")  # what they count is among the posts


def detect(_report: Report, data: Path, source: Path) -> str:
    """Return the name of a file's format."""
    return format_of(data, source).name


def parts_of(
    _report: Report, format: Format, data: Path, source: Path, columns: tuple[str, str], reading: Reading
) -> tuple[list[Part], list[str]]:
    """Return the parts of a file, and warnings about the complete file."""
    parts = [replace(part, reading=reading) for part in format.parts(data, source, columns)]
    return parts, format.check(data, source)


def read_part(
    report: Report, format: Format, part: Part, stem: Path, piece: int, by: By, drop_authors: Collection[str] = ()
) -> dict[str, Any]:
    """Read a part of a source, and write its sentences by author.

    Args:
        report: called now and then as a sign of life.
        format: the format of the part.
        part: the part.
        stem: beginning of the paths to write, which end in .0, .1, and so on.
        piece: characters of sentences in a file; only the last post of a file may exceed it.
        by: whether words are counted, or characters.
        drop_authors: names of authors whose posts are dropped.

    Returns:
        ``files``, their number; ``read`` and ``dropped``, counts by unit or reason; ``splits``, the number of sentences
        by split of the source, dropped ones included, "" if the source states none; ``characters`` of the texts
        that were cut into sentences, and how many of them were ``removed``, see `Post`; ``dropped_authors``,
        those of `drop_authors` who have posts.

    Raises:
        InputError: the part cannot be read as its format.
    """
    authors: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)
    dropped: Counter[str] = Counter()
    splits: Counter[str] = Counter()
    named: set[str] = set()
    posts = words = files = pending = characters = removed = 0
    for post in format.read(part, dropped):
        if not post.user.strip():
            dropped["posts_without_user"] += 1
            continue
        if post.user in drop_authors:
            dropped["posts_of_dropped_authors"] += 1
            named.add(post.user)
            continue
        posts += 1
        characters, removed = characters + post.characters, removed + post.removed
        if posts % ALIVE == 0:
            report(0)
        dropped["posts_without_words"] += not post.sentences
        if not post.sentences:
            continue
        authors[post.split, post.user] += post.sentences
        splits[post.split or ""] += len(post.sentences)
        pending += sum(map(len, post.sentences))
        if pending > piece:
            words += _write(stem.with_name(f"{stem.name}.{files}"), authors, by)
            files, pending = files + 1, 0
            authors.clear()
    if authors:
        words += _write(stem.with_name(f"{stem.name}.{files}"), authors, by)
        files += 1
    read = Counter(posts=posts, records=splits.total(), words=words)
    for reason, count in dropped.items():
        read[reason.split("_")[0]] += count * (reason not in COUNTED_TOO)
    usual = max(splits, key=lambda split: splits[split], default="")  # a part is of one split, but where two meet
    splits[usual] += sum(count for reason, count in dropped.items() if reason.startswith("records_"))
    return {
        "files": files,
        "read": read,
        "dropped": dropped,
        "splits": splits,
        "characters": characters,
        "removed": removed,
        "dropped_authors": sorted(named),
    }


def _write(path: Path, authors: dict[tuple[str | None, str], list[str]], by: By) -> int:
    """Write a file, and return the number of words or characters in it."""
    ordered = sorted((hash_of(name), split or "", name) for split, name in authors)
    hashes, lines = [], []
    words = 0
    for author_hash, split, name in ordered:
        head = json.dumps([split, name])
        sentences = authors.pop((split or None, name))
        for first in range(0, len(sentences), LINE):
            text = "\t".join(sentences[first : first + LINE])
            breaks = text.count("\t")
            words += len(text) - breaks if by == "characters" else text.count(" ") + breaks + 1
            hashes.append(author_hash)
            lines.append(f"{head}\t{text}\n".encode())
    write_lines(path, hashes, lines)
    return words
