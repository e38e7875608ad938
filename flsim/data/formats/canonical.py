"""The published size of Stack Overflow, as it is and cut into balanced users, and warnings about copies that differ.

The counts are those of the docstring of `tff.simulation.datasets.stackoverflow.load_data`. The copies that FedJAX and
pfl-research host are made of the same data.
"""

from collections.abc import Mapping

USERS = {"train": 342_477, "heldout": 38_758, "test": 204_088}
RECORDS = {"train": 135_818_730, "heldout": 16_491_230, "test": 16_586_035}
FORMATS = {"tff-sqlite", "tff-hdf5", "fedjax-sqlite", "pfl-hdf5"}
# Thakkar et al. (2020), section 4.1: about 392K balanced users of about 2,000 words. Its "93K examples" can only be 93
# million.
BALANCED_WORDS, BALANCED_USERS, BALANCED_RECORDS = 2_000, 392_000, 93_000_000
ABOUT = 0.02  # relative difference that "about" allows


def warnings(format_names: set[str], users: Mapping[str, int], records: Mapping[str, int]) -> list[str]:
    """Return warnings about sources whose counts differ from the published ones.

    Args:
        format_names: formats of all sources; nothing is compared unless all of them hold this data set.
        users: numbers of users in the sources, by split.
        records: numbers of sentences in the sources before any is dropped, by split.
    """
    if not format_names or not format_names <= FORMATS:
        return []
    return [
        f"{counts[split]:,} {what} in {split}, but Stack Overflow as published has {published[split]:,}: "
        "a part of it, or another data set"
        for what, counts, published in (("users", users, USERS), ("sentences", records, RECORDS))
        for split in published
        if counts.get(split) and counts[split] != published[split]
    ]


def balanced_warnings(
    format_names: set[str], words_per_user: int | None, read_users: Mapping[str, int], users: int, records: int
) -> list[str]:
    """Return a warning if the balanced train users are not about as many as in Thakkar et al. (2020), section 4.1.

    Args:
        format_names: formats of all sources; nothing is compared unless all of them hold this data set.
        words_per_user: words of a balanced user; nothing is compared unless it is the paper's.
        read_users: numbers of users in the sources, by split; nothing is compared unless all train users are there.
        users, records: numbers of the balanced train users, and of their records.
    """
    is_whole = bool(format_names) and format_names <= FORMATS and read_users.get("train") == USERS["train"]
    if not is_whole or words_per_user != BALANCED_WORDS:
        return []
    pairs = ((users, BALANCED_USERS), (records, BALANCED_RECORDS))
    if all(abs(count - published) <= ABOUT * published for count, published in pairs):
        return []
    return [
        f"{users:,} balanced train users with {records:,} records, {records / max(users, 1):.0f} a user, but Thakkar "
        f"et al. (2020) have about {BALANCED_USERS:,} with {BALANCED_RECORDS:,}, "
        f"{BALANCED_RECORDS / BALANCED_USERS:.0f} a user: words or users are counted in another way"
    ]
