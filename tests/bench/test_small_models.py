"""The benchmark of small models: a ratio for each number of users at once, and a star where users are stacked."""

import torch

from flsim.bench.small_models import Case, bench_small, describe
from flsim.training.cohort.engine import STACKED_ON_CPU, users_on_cpu
from flsim.training.hparams import LocalHParams


def test_ratios_and_stars_are_of_the_rule_of_the_engine() -> None:
    small, large = Case(60, 3, 5, 4), Case(60, 3, 5, 2**14)
    rows = [bench_small(case, (2, 3), cohort=3, rounds=1) for case in (small, large)]
    assert all(set(row.ratios) == {2, 3} and min(row.ratios.values()) > 0 for row in rows)
    _, _, *lines = describe(rows, (2, 3)).splitlines()
    assert [line[0] for line in lines] == ["*", " "]


def test_users_of_small_steps_are_stacked_on_a_processor() -> None:
    """600,000 parameters times records at most, in float32."""
    like = {"weight": torch.zeros(300, 125)}
    assert users_on_cpu(like, LocalHParams(batch_size=16)) == STACKED_ON_CPU
    assert users_on_cpu(like, LocalHParams(batch_size=17)) is None
    assert users_on_cpu(like, LocalHParams(batch_size=16, precision="bf16")) is None
    assert users_on_cpu({"weight": torch.zeros(2, device="meta")}, LocalHParams(batch_size=1)) is None
