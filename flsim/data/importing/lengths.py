"""Lengths of users to suggest where an import leaves few of them or none."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flsim.data.importing.settings import ImportHParams

LENGTHS = (2_000, 1_000, 500, 200, 100, 50, 20, 10)  # words of a user that are suggested
FEW_USERS = 100  # a training cohort of the paper's smallest scale; fewer users call for shorter ones
MOST_SUGGESTED = 4

Counts = list[tuple[int, int]]  # for each of LENGTHS: authors who wrote so many words, and users that they make


def count_by_length(author_words: NDArray[np.int64]) -> Counts:
    """Return authors and users for each of `LENGTHS`.

    A user ends with a whole sentence, so that an import makes slightly fewer users than are counted here.

    Args:
        author_words: int64 [authors], written words.
    """
    return [(int(np.count_nonzero(author_words >= length)), int((author_words // length).sum())) for length in LENGTHS]


def summed(counts: Iterable[Sequence[Sequence[int]]]) -> Counts:
    """Return the sums of counts of several ranges of authors; zeros where there are no ranges."""
    totals = np.zeros((len(LENGTHS), 2), np.int64)
    for count in counts:
        totals += np.array(count, np.int64)
    return [(int(authors), int(users)) for authors, users in totals]


def suggestion(counts: Counts, below: int) -> str:
    """Return shorter lengths with the users that each leaves: ``"--words-per-user 500 (about 3 users of 2 authors)"``.

    Args:
        counts: of all authors.
        below: words of a user, as asked for.

    Returns:
        The largest `MOST_SUGGESTED` lengths that leave a user; empty where none does.
    """
    shorter = [
        f"{length} (about {_number(users, 'user')} of {_number(authors, 'author')})"
        for length, (authors, users) in zip(LENGTHS, counts, strict=True)
        if length < below and users
    ]
    return f"--words-per-user {', '.join(shorter[:MOST_SUGGESTED])}" if shorter else ""


def advice(counts: Counts, users: int, hparams: ImportHParams, missing: Sequence[str] = ()) -> str | None:
    """Return a line for an import that leaves few users, or a split without any; None where there is nothing to say.

    Args:
        counts: of all authors.
        users: that the import makes, of all splits.
        hparams: of the import.
        missing: splits that are asked for and have no user.
    """
    if hparams.words_per_user is None or (users >= FEW_USERS and not missing):
        return None
    shorter = suggestion(counts, hparams.words_per_user)
    if not shorter:
        return None
    without = f", none of them in {' or '.join(missing)}" if missing else ""
    length = f"{hparams.words_per_user:,} {hparams.by}"
    return f"only {_number(users, 'user')} of {length}{without}; shorter ones are more: {shorter}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
