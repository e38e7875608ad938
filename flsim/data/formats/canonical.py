"""Stack Overflow as TensorFlow Federated hosts it: what must be in it, and what to say where it is not.

The counts are those of the docstring of `tff.simulation.datasets.stackoverflow.load_data`. FedJAX's and pfl-research's
copies are made of the same data.
"""

from collections.abc import Mapping

USERS = {"train": 342_477, "heldout": 38_758, "test": 204_088}
RECORDS = {"train": 135_818_730, "heldout": 16_491_230, "test": 16_586_035}
FORMATS = {"tff-sqlite", "tff-hdf5", "fedjax-sqlite", "pfl-hdf5"}


def warnings(format_names: set[str], users: Mapping[str, int], records: Mapping[str, int]) -> list[str]:
    """What is read, against what was published, for the splits that are there.

    Args:
        format_names: formats of all sources; nothing is compared unless all of them hold this data set.
        users: split -> users in the sources.
        records: split -> sentences in the sources, before any is dropped.
    """
    if not format_names or not format_names <= FORMATS:
        return []
    return [
        f"{found[split]:,} {what} in {split}, but Stack Overflow as published has {published[split]:,}: "
        "a part of it, or another data set"
        for what, found, published in (("users", users, USERS), ("sentences", records, RECORDS))
        for split in published
        if found.get(split) and found[split] != published[split]
    ]
