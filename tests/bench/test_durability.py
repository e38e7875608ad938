"""The benchmark of syncs measures what it says, at a size that a test can afford."""

import json
import os

from flsim.bench.durability import SMALL, DurabilityHParams, bench_durability, describe


def test_rounds_with_and_without_syncs() -> None:
    sync = os.fsync
    hparams = DurabilityHParams(4, 1, (1, 4), {"small": SMALL}, vocabulary_size=200)
    measured = bench_durability(hparams)
    assert os.fsync is sync
    kinds = [(figure["training"], figure["checkpoint_every"]) for figure in measured["figures"]]
    assert kinds == [("federated", 1), ("federated", 4), ("central", 1), ("central", 4)]
    for often, seldom in (measured["figures"][:2], measured["figures"][2:]):
        assert often["syncs"] > seldom["syncs"] >= 1
    for figure in measured["figures"]:
        assert figure["seconds"] > figure["seconds_in_syncs"] > 0
        assert figure["ratio"] > 0
    assert json.loads(json.dumps(measured)) == measured
    assert max(map(len, describe(measured).splitlines())) <= 120
