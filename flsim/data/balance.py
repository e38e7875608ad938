"""From authors to balanced users: who is long enough, where an author is cut, which split an author belongs to.

Thakkar et al. (2020), "Dataset Construction": users of fewer than 2,000 words are discarded, the others are cut into
balanced users of about 2,000 words each, and remainders are discarded: 4,030 words are two users, and 30
words are lost. Words here are what an author wrote: before sentences are cut to the model's length, and without the
punctuation that the model reads as words of its own.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flsim.rng import stream


@dataclass
class Tally:
    """What was read, and what of it was dropped, by reason; a reason's name says what it counts.

    Attributes:
        read: posts, records (sentences), words (punctuation included) and users (authors with at least one record).
        dropped: reason -> count.
        longest: words of the longest author that was dropped for being too short, and who that is.
    """

    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    longest: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Author:
    """An author who is long enough.

    Attributes:
        name: as the reader gave it.
        users: the balanced users, each a list of records, each its words joined by spaces.
    """

    name: str
    users: list[list[str]]


_WRITTEN = re.compile(r"(?<![^ ])(?:[a-z0-9]|<URL>)")


def written_words(record: str) -> int:
    """How many of a record's tokens are words, not punctuation."""
    return len(_WRITTEN.findall(record))


def count_tokens(records: Iterable[str]) -> int:
    return sum(record.count(" ") + 1 for record in records)


def cut(records: list[str], words_per_user: int) -> tuple[list[list[str]], list[str]]:
    """Cut an author's records, in order, into users; each ends with the record that brings it to `words_per_user`.

    Returns:
        The users, and the remaining records, which have fewer than `words_per_user` words.
    """
    users: list[list[str]] = []
    begun = words = 0
    for index, record in enumerate(records, start=1):
        words += written_words(record)
        if words >= words_per_user:
            users.append(records[begun:index])
            begun, words = index, 0
    return users, records[begun:]


def balanced(authors: Iterable[tuple[str, list[str]]], words_per_user: int, tally: Tally) -> Iterator[Author]:
    """The authors of at least `words_per_user` words, cut; what falls away is added to `tally`."""
    for name, records in authors:
        tally.read["users"] += 1
        users, remainder = cut(records, words_per_user)
        if users:
            tally.dropped["remainder_records"] += len(remainder)
            tally.dropped["remainder_words"] += count_tokens(remainder)
            yield Author(name, users)
        else:
            words = sum(map(written_words, records))
            tally.dropped["users_too_short"] += 1
            tally.dropped["records_of_short_users"] += len(records)
            tally.dropped["words_of_short_users"] += count_tokens(records)
            tally.longest = max(tally.longest, (words, name))


def split_of(author: str, heldout: float, test: float, seed: int) -> str:
    """The split of all of an author's users: a function of (seed, name) alone.

    Args:
        author: name.
        heldout: probability of heldout.
        test: probability of test.
        seed: of the import.
    """
    draw = stream(seed, "split", author).random()
    return "test" if draw < test else "heldout" if draw < test + heldout else "train"
