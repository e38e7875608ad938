"""The largest authors of a corpus, and names that are placeholders for many people, such as ``[deleted]``."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

LARGEST = 5  # authors that a summary names
UNUSUAL_SHARE = 0.05  # an author with a larger share of all words is unusual,
UNUSUAL_MULTIPLE = 2  # if the share is also above this multiple of an equal share
STAND_INS = {
    *("[deleted]", "[removed]", "deleted", "removed", "nan", "none", "null", "n/a", "na", "undefined"),
    *("unknown", "anonymous", "anon", "guest", "automoderator", "bot"),
}


def author_of(user: str) -> str:
    """Return the author of a user's text: an import cuts authors into users ``author#0``, ``author#1``."""
    return re.sub(r"#[0-9]+\Z", "", user)


def largest_authors(users: Iterable[tuple[str, str, int]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the `LARGEST` authors of (split, user, words) and those of `STAND_INS`, and warnings about them."""
    words: Counter[tuple[str, str]] = Counter()
    pieces: Counter[tuple[str, str]] = Counter()
    for split, user, count in users:
        key = (author_of(user), split)
        words[key] += count
        pieces[key] += 1
    total = max(words.total(), 1)
    ranked = sorted(words, key=lambda key: (-words[key], key))
    chosen = [*ranked[:LARGEST], *(key for key in ranked[LARGEST:] if key[0].strip().lower() in STAND_INS)]
    authors: list[dict[str, Any]] = [
        {"author": key[0], "split": key[1], "users": pieces[key], "words": words[key], "share": words[key] / total}
        for key in chosen
    ]
    warnings = []
    for author in authors:
        name, share = author["author"], author["share"]
        if name.strip().lower() in STAND_INS:
            why = "and is a placeholder for many people or for nobody"
        elif share > UNUSUAL_SHARE and share > UNUSUAL_MULTIPLE / len(words):
            why = "which is unusual for one person"
        else:
            continue
        advice = "to leave this author out, import again with --drop-authors"
        warnings.append(f"author {name!r} has {share:.1%} of all words, {why}; {advice} {name!r}")
    return authors, warnings
