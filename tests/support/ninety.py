"""Published rows of experiments with 90 canaries, and lists of 90 flags to compare with them."""

from collections.abc import Mapping

from flsim.results.published import matching, published_rows

PublishedRow = Mapping[str, object]
PRIVATE = {"epsilon paper": 18.77, "epsilon replace-one-rdp": 152.8, "delta": 1e-7}


def paper(table: str, **keys: object) -> PublishedRow:
    row = matching(published_rows("thakkar2020.csv", table), keys)
    assert row is not None
    return row


def fedavg(partition: str, size: int) -> PublishedRow:
    return paper("1", data=partition, optimizer="FedAvg", batch_size=size)


def of_ninety(count: int) -> list[float]:
    return [float(index < count) for index in range(90)]
