"""Step 3 of an import: the words of buckets become the vocabulary, a range of hashes of words at a time.

As many words of a range are kept as the vocabulary has, so memory does not grow with the number of different words.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from flsim.base.pool import Report
from flsim.data.formats.posts import OOV_WORD
from flsim.data.importing.spill import Range, cuts, read_lines

Counts = list[tuple[str, int]]


def count_words(_report: Report, ranges: list[Range], most: int) -> Counts:
    """Return the most frequent words of train users in a range of hashes, with their counts.

    Args:
        ranges: lines of ``word<TAB>count``.
        most: how many words to return.
    """
    counts: defaultdict[bytes, int] = defaultdict(int)
    for line in read_lines(ranges):
        word, _, count = line.partition(b"\t")
        counts[word] += int(count)
    return most_frequent(((word.decode(), count) for word, count in counts.items() if count), most)


def most_frequent(counts: Iterable[tuple[str, int]], most: int) -> Counts:
    """Return the most frequent words; ties are in alphabetical order."""
    ranked = sorted(counts, key=lambda item: (-item[1], item[0]))
    return [(word, count) for word, count in ranked if word != OOV_WORD][:most]


def merge(counted: Iterable[Counts], most: int) -> dict[str, int]:
    """Return the most frequent words of all ranges."""
    merged: Counts = []
    for counts in counted:
        merged = most_frequent([*merged, *map(tuple, counts)], most)  # type: ignore[list-item]
    return dict(merged)


def words_of(path: Path) -> list[bytes]:
    """Return the words in a file, in order."""
    (end,) = cuts([path], 1)[:, 1].tolist()
    return [line.partition(b"\t")[0] for line in read_lines([(str(path), 0, end)])] if end else []
