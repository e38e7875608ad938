"""Tests of `flsim privacy` as a user runs the command."""

import json
import math
from functools import partial
from typing import Any

import pytest
from helpers import Experiment, Flsim
from scipy import optimize, stats

from flsim.privacy.ledger import Entry, Ledger
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.training.update import State

PAPER = ("--users", "392000", "--cohort", "5000", "--rounds", "784", "--delta", "1e-7")
SMALL = ("--users", "1000", "--cohort", "10", "--rounds", "5", "--delta", "1e-4")


@pytest.fixture
def flsim(flsim: Flsim) -> Flsim:
    """Return `flsim privacy` in this process, with exit code, standard output and standard error."""
    return partial(flsim, "privacy")


def test_the_papers_ten_epochs(flsim: Flsim) -> None:
    """The paper's epsilon is 5.6 (5.62 with two decimals); standard output has only the result."""
    _, out, err = flsim(*PAPER, "--noise-multiplier", "1", "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    by_name = {row["convention"]: row for row in rows}
    assert len(by_name) == len(rows) == 6
    assert by_name["paper"]["epsilon"] == pytest.approx(5.62, abs=0.01)
    assert by_name["replace-one-rdp"]["epsilon"] == pytest.approx(28.5, abs=0.1)
    assert by_name["poisson-pld"]["epsilon"] == pytest.approx(2.79, abs=0.01)
    columns = {"sampler", "relation", "sensitivity", "accountant", "conversion", "epsilon", "convention", "unit"}
    assert all(columns <= set(row) <= columns | {"note"} for row in rows)
    assert {row["unit"] for row in rows} == {"user"}
    assert all((row["epsilon"] is None) == ("note" in row) for row in rows)
    assert "WARNING" not in err


def test_the_table(flsim: Flsim) -> None:
    code, out, _ = flsim(*PAPER, "--noise-multiplier", "1", "--sampler", "fixed-size")
    assert code == 0
    header, paper, *_ = out.splitlines()
    assert header.split() == ["sampler", "relation", "sens.", "accountant", "conversion", "epsilon"]
    assert paper.split() == ["fixed-size", "replace-one", "S", "rdp", "mironov-proposition-3", "5.62*"]
    assert "poisson  " not in out
    assert "Sound: " in out
    assert max(map(len, out.splitlines())) <= 80


def test_noise_for_an_epsilon_and_back(flsim: Flsim) -> None:
    """The printed noise is rounded up: it reaches the epsilon, with little excess."""
    _, out, _ = flsim(*SMALL, "--epsilon", "2", "--sampler", "fixed-size")
    (row,) = (line.split() for line in out.splitlines() if line.split()[2:4] == ["2S", "rdp"])
    _, back, _ = flsim(*SMALL, "--noise-multiplier", row[-1], "--sampler", "fixed-size", "--json")
    (same,) = (row for row in json.loads(back) if row["convention"] == "replace-one-rdp")
    assert 1.99 < same["epsilon"] <= 2


def test_a_delta_that_allows_publishing_a_user_is_warned_about(flsim: Flsim) -> None:
    plan = ("--users", "1000", "--cohort", "10", "--rounds", "5", "--noise-multiplier", "1", "--sampler", "fixed-size")
    code, out, err = flsim(*plan, "--delta", "0.001", "--json")
    assert code == 0
    assert json.loads(out)
    assert "warning: delta 0.001 is not below 1 / 1,000 users" in err
    assert "warning" not in flsim(*plan, "--delta", "0.0009")[2]


def test_a_runs_ledger(experiment: Experiment, flsim: Flsim) -> None:
    """The run has 4 rounds with 6 of 24 users, and is made without Ray; a plan with these numbers has equal output."""
    private = ["privacy.mechanism=dp", "privacy.clip=0.2", "privacy.noise_multiplier=2", "privacy.delta=1e-3"]
    run = Run.create(load(experiment.config, private), experiment.folder / "run")
    code, out, err = flsim(run.path)
    assert (code, out) == (2, "")
    assert "has no checkpoint yet" in err
    params, ledger = run.latest_state().params, Ledger((Entry("fixed-size", 24, 6, 2.0, 4),))
    run.save(State(4, params, values={"clip": 0.2}, ledger=ledger))
    run.mark("completed")
    code, out, err = flsim(run.path, "--json")
    assert code == 0
    assert "4 rounds, delta 0.001" in err
    plan = ("--users", "24", "--cohort", "6", "--rounds", "4", "--noise-multiplier", "2", "--sampler", "fixed-size")
    assert out == flsim(*plan, "--delta", "1e-3", "--json")[1]
    assert json.loads(flsim(run.path, "--delta", "1e-5", "--json")[1])[0]["epsilon"] > json.loads(out)[0]["epsilon"]
    (run.path / "checkpoints").rename(run.path / "elsewhere")
    assert "has no checkpoint; restore checkpoints/, or name another run" in flsim(run.path)[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--users, --cohort, --rounds, --delta missing"),
        (SMALL, "--noise-multiplier and --epsilon: one value determines the other; set only one"),
        ((*SMALL, "--noise-multiplier", "1", "--cohort", "0"), "cohort must be at least 1, found 0"),
        ((*SMALL, "--noise-multiplier", "1", "--delta", "1"), "delta must be above 0 and below 1, found 1"),
        ((*SMALL, "--noise-multiplier", "1", "--sampler-option", "dropout=0.2"), "dropout=0.2: set --sampler"),
        (
            (*SMALL, "--noise-multiplier", "1", "--sampler", "poisson", *("--sampler-option", "a=1") * 2),
            "a=1: this option is given twice",
        ),
        ((*SMALL, "--noise-multiplier", "1", "--sampler", "shuffle"), "available, fedbuff, found 'shuffle'"),
        (("runs/x", "--users", "10", "--sampler", "poisson"), "--users, --sampler: runs/x stores these values"),
        (("no-such-run",), "no-such-run: not a run folder"),
    ],
)
def test_bad_input_is_one_line(flsim: Flsim, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = flsim(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_correlated_noise_of_a_sampler_with_options(flsim: Flsim) -> None:
    """In tree noise over 4 rounds, of which a user has one, 3 nodes of the tree contain the first round.

    All rounds are one Gaussian mechanism with mu = sqrt(3) / z, whose delta at an epsilon is in Balle and Wang (2018),
    Theorem 8. If a user is replaced, the sum moves by up to 2S; therefore, mu is twice as large. Privacy loss
    distributions are discretized: their epsilon is at most 0.1% higher.
    """
    plan = ("--users", "1000", "--cohort", "10", "--rounds", "4", "--delta", "1e-4", "--noise-multiplier", "2")
    sampler = ("--sampler", "min-separation", "--sampler-option", "separation=4")
    assert "S under zero-out" in flsim(*plan, *sampler)[1]
    code, out, _ = flsim(*plan, *sampler, "--noise", "tree", "--json")
    assert code == 0
    spent = {row["convention"]: row["epsilon"] for row in json.loads(out)}

    def excess(epsilon: float, mu: float) -> float:
        below, above = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
        return float(below - math.exp(epsilon) * above - 1e-4)

    for convention, mu in (("zero-out", math.sqrt(3) / 2), ("replace-one", math.sqrt(3))):
        exact = optimize.brentq(excess, 0.1, 20, args=(mu,))
        assert exact <= spent[f"min-separation-{convention}-pld"] <= exact * 1.001
    banded = ("--noise", "banded", "--noise-option")
    for arguments, message in (
        ((*plan, *sampler, *banded, "bands"), "bands: write a setting as NAME=VALUE"),
        ((*plan, *sampler, *banded, "buffers=2"), 'noise "banded" has bands, found buffers'),
        (("runs/dp", "--noise", "tree", *sampler[2:]), "--sampler-option, --noise: runs/dp stores these values"),
    ):
        code, _, err = flsim(*arguments)
        assert (code, message in err) == (2, True)


def test_a_plan_whose_epsilon_cannot_be_computed_is_an_error(flsim: Flsim) -> None:
    plan = "--users 100 --cohort 10 --rounds 5 --noise-multiplier 1 --delta 1e-5 --sampler with-replacement"
    code, out, err = flsim(*plan.split())
    assert (code, out) == (2, "")
    assert "no epsilon can be computed: " in err.splitlines()[-1]
