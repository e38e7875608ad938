"""The published size of Stack Overflow, and warnings about a copy that differs from it.

The counts are those of the docstring of `tff.simulation.datasets.stackoverflow.load_data`. The copies that FedJAX and
pfl-research host are made of the same data.
"""

from collections.abc import Mapping

USERS = {"train": 342_477, "heldout": 38_758, "test": 204_088}
RECORDS = {"train": 135_818_730, "heldout": 16_491_230, "test": 16_586_035}
FORMATS = {"tff-sqlite", "tff-hdf5", "fedjax-sqlite", "pfl-hdf5"}


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
