"""Curves through real runs and real Ray nodes, at sizes that a test can afford, and the command that prints them."""

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import Flsim

from flsim.base.errors import InputError
from flsim.bench.curves import Curve
from flsim.bench.evaluation_curves import canaries_curve, references_curve
from flsim.bench.round_curves import (
    TICKS,
    cohort_curve,
    cpu_seconds,
    make_tiny,
    nodes_curve,
    population_curve,
    shards_curve,
)
from flsim.bench.rounds import BenchHParams
from flsim.bench.scale_curves import CURVES, measure_curves, measure_users_per_second
from flsim.data.corpus import Corpus
from flsim.models.hparams import ModelHParams

TINY = BenchHParams(users=4, words=20, rounds=3, vocabulary_size=60, model=ModelHParams(4, 6))

SERVER = {"round_seconds", "cpu_seconds", "overhead_seconds", "server_seconds", "own_memory_bytes"}


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def check(curve: Curve, name: str, sizes: tuple[int, ...], quantities: set[str]) -> None:
    """All costs are there and above 0, and the exponents are those of the points in the JSON."""
    assert (curve.name, curve.sizes) == (name, sizes)
    measured = curve.as_json()
    assert [point["size"] for point in measured["points"]] == [*sizes]
    assert measured["exponents"].keys() == quantities
    for quantity in curve.quantities:
        assert len(quantity.values) == len(sizes)
        assert min(quantity.values) > 0, quantity.name
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    assert not list(Path(tempfile.gettempdir()).glob("flsim-bench-*"))


def test_curves_double_at_least_four_times_and_reach_4_million_users() -> None:
    for name, (_, sizes) in CURVES.items():
        assert [after / before for before, after in pairwise(sizes)] == [2] * (len(sizes) - 1), name
        assert len(sizes) >= 5
    assert CURVES["population"][1][-1] == 4_000_000
    assert (CURVES["shards"][1][0], CURVES["shards"][1][-1]) == (1, 64)


def test_tiny_users_have_one_record_each(tmp_path: Path) -> None:
    make_tiny(tmp_path / "corpus", 5, TINY)
    corpus = Corpus.open(tmp_path / "corpus", verify=True)
    train = corpus.split("train")
    assert (len(train), train.records, train.words, len(corpus.split("test"))) == (5, 5, 100, 1)
    words = corpus.layout.first_word, corpus.layout.last_word
    assert words[0] <= int(train.tokens.min()) <= int(train.tokens.max()) <= words[1]
    assert train.names == [f"train{user}" for user in range(5)]


def test_cpu_seconds_are_those_of_a_process_and_of_its_descendants() -> None:
    """A child's child works for half a second and waits; before and after it nothing is counted."""
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True); input()"
    shell = f"'{sys.executable}' -c \"{work}\"; true"
    with subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert cpu_seconds(process.pid) >= 0.5 - 2 / TICKS
        process.communicate("\n")
    assert cpu_seconds(process.pid) == 0


def test_evaluation_against_canaries_and_references() -> None:
    ranks = canaries_curve((1, 2, 4), count=50, steps=2, units=4, repeats=1)
    check(ranks, "canaries", (1, 2, 4), {"rank_seconds", "rank_cpu_seconds"})
    drawn = references_curve((8, 16), canaries=2, steps=2, units=4, repeats=1)
    check(drawn, "references", (8, 16), {"rank_seconds", "rank_cpu_seconds", "draw_seconds"})
    with pytest.raises(InputError, match="must divide the largest, 4"):
        canaries_curve((3, 4), steps=1)


@pytest.mark.nightly
def test_rounds_against_cohort_and_population() -> None:
    curve = cohort_curve((1, 2), TINY)
    check(curve, "cohort", (1, 2), {"round_seconds", "cpu_seconds", "own_memory_bytes"})
    assert "4 users of 20 words" in curve.about
    curve = population_curve((4, 8), TINY, cohort=2)
    check(curve, "population", (4, 8), {"round_seconds", "cpu_seconds", "own_memory_bytes"})


@pytest.mark.nightly
def test_a_day_is_computed_from_shards_that_were_measured(flsim: Flsim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real path of the command, with a small model: the prediction for 64 shards is that of the printed rates."""
    monkeypatch.setattr(
        "flsim.bench.scale_curves.CURVES", {"shards": (lambda sizes: shards_curve(sizes, TINY), (1, 2, 64))}
    )
    code, out, err = flsim("bench", "scale", "--day", "--users-per-second", "10", "--json")
    assert code == 0, err
    measured = json.loads(out)
    points = measured["curves"]["shards"]["points"]
    assert [point["size"] for point in points] == [1, 2, 64]
    assert points[0].keys() == {"size", *SERVER, "tree_server_seconds", "tree_round_seconds"}
    rates, checks = measured["day"]["rates"], measured["day"]["checks"]
    server, tree = checks["server_seconds"], checks["tree_server_seconds"]
    assert rates["users_per_second"] == 10
    assert server["predicted_seconds"] == pytest.approx(rates["once_seconds"] + 64 * rates["shard_seconds"])
    assert server["measured_seconds"] == points[-1]["server_seconds"] > 0
    of_branches = 64 * rates["header_seconds"] + 8 * rates["branch_seconds"]
    assert tree["predicted_seconds"] == pytest.approx(rates["tree_once_seconds"] + of_branches)
    assert tree["measured_seconds"] == points[-1]["tree_server_seconds"] > 0


@pytest.mark.nightly
def test_users_per_second_are_measured_where_they_are_not_known() -> None:
    assert measure_users_per_second(TINY) > 0


@pytest.mark.nightly
def test_rounds_against_real_ray_nodes() -> None:
    curve = nodes_curve((1, 2), TINY, shards=2)
    check(curve, "nodes", (1, 2), SERVER)


def test_unknown_curves_and_options_that_do_not_fit_are_refused(flsim: Flsim, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--curve users: no such curve; choose from cohort, population"):
        measure_curves(["users"])
    for options, message in (
        (("--curve", "users"), "no such curve; choose from cohort"),
        (("--curve", "cohort", "--users", "5"), "leave it out with --curve"),
        (("--figure", "scale.png"), "there is no curve to draw"),
        (("--users-per-second", "9"), "add --day"),
        (("--curve", "cohort", "--figure", str(tmp_path / "scale.txt")), "name one of these"),
    ):
        code, out, err = flsim("bench", "scale", *options)
        assert (code, out) == (2, "")
        assert message in " ".join(err.split())


def test_the_command_prints_and_draws_curves(flsim: Flsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One curve through the command, in text and in JSON, with smaller sizes."""
    small = {"canaries": (lambda sizes: canaries_curve(sizes, count=20, steps=1, units=4, repeats=1), (1, 2, 4))}
    monkeypatch.setattr("flsim.bench.scale_curves.CURVES", small)
    code, out, _ = flsim("bench", "scale", "--curve", "canaries", "--figure", str(tmp_path / "scale.png"))
    assert code == 0
    assert out.startswith("canaries: |R| = 20")
    assert (tmp_path / "scale.png").stat().st_size > 1_000
    code, out, _ = flsim("bench", "scale", "--curve", "canaries", "--json")
    measured = json.loads(out)
    assert list(measured) == ["curves"]
    assert [point["size"] for point in measured["curves"]["canaries"]["points"]] == [1, 2, 4]
