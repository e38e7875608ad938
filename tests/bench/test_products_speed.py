"""The benchmark of products: a rate for each side, and a ratio for each model."""

from flsim.bench.products import bench_product, bench_users, describe
from flsim.bench.small_models import Case


def test_every_side_has_a_rate_and_every_model_a_ratio() -> None:
    rates, case = bench_product(8, 24, repeats=1), Case(60, 3, 5, 4)
    ratio = bench_users(case, users=2, words=30, rounds=1)
    assert set(rates) == {"torch", "oneDNN", "bfloat16"}
    assert min(*rates.values(), ratio) > 0
    lines = describe([(8, 24, rates)], [(case, ratio)]).splitlines()
    assert lines[2].split()[:3] == ["8", "x", "24"]
    assert lines[-1].split() == ["60", "3", "5", "4", "180", f"{ratio:.2f}"]
