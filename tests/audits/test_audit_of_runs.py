"""`flsim audit` of real runs: rows against a second computation from their files, groups, claims and refusals."""

import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy
from helpers import PRIVATE, TESTED, Flsim, Trained

from flsim.attacks.audit.subject import subject_of
from flsim.privacy.ledger import epsilon
from flsim.runs.folder import Run


def test_rows_are_those_of_the_ranks(trained_here: Trained, flsim: Flsim) -> None:
    """Counts, shares and intervals from the Parquet files, and the bound as the root of a binomial tail."""
    run = trained_here()
    code, out, _ = flsim("audit", run, "--threshold", 3, "--format", "csv")
    assert code == 0
    table = pd.read_csv(io.StringIO(out))
    subject = subject_of(run)
    roster = pd.read_parquet(run / "planted" / "roster.parquet").query("sharers > 0")
    rows = pd.read_parquet(sorted((run / "rows").glob("*.parquet"))[-1])
    ranks = rows[rows["metric"] == "rank"].set_index("canary")["value"].loc[roster["canary"]]
    references = int(rows.loc[rows["metric"] == "references", "value"].iloc[0])
    for row in table[table["method"] == "tpr"].to_dict("records"):
        detected = int((ranks <= row["threshold"]).sum())
        interval = scipy.stats.binomtest(detected, len(ranks)).proportion_ci(method="exact")
        assert (row["detected"], row["n_in"], row["fpr"]) == (detected, len(ranks), row["threshold"] / (references + 1))
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
    (bound,) = table[table["method"] == "epsilon"].to_dict("records")
    share = scipy.stats.beta.ppf(1 - 0.01 / len(ranks), 3, references - 2)
    odds = [share / (1 - share) * math.exp(bound["low"] * users) for users in roster["sharers"]]
    hits = np.random.default_rng(0).random((200_000, len(odds))) < np.array([one / (1 + one) for one in odds])
    as_many, error = (hits.sum(axis=1) >= bound["detected"]).mean(), 4 * math.sqrt(0.04 / 200_000)
    assert as_many == pytest.approx(0.04, abs=error) if bound["low"] else as_many > 0.04 - error
    assert subject.groups.tolist() == roster["sharers"].tolist()


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_users_that_share_a_canary_are_counted(trained_here: Trained, partition: str) -> None:
    """Each user by itself, as users read their records; without the corpus, copies stand for users of the twin."""
    run = trained_here(f"data.partition='{partition}'")
    subject, opened = subject_of(run), Run.open(run)
    phrases = {canary.id: list(canary.tokens) for canary in opened.canaries}
    for canary, group in zip(subject.results.planted["canary"], subject.groups, strict=True):
        users = [opened.users[user] for user in range(len(opened.users))]
        assert group == sum(phrases[canary] in [record.tolist() for record in records] for records in users)
    assert subject.is_exact


def test_a_ledger_is_held_against_what_was_detected(trained_here: Trained, flsim: Flsim) -> None:
    """The claim is the ledger's own, to remove a user and add another; a tiny run contradicts nothing."""
    run = trained_here(*PRIVATE)
    subject = subject_of(run)
    assert subject.claim is not None
    assert (subject.claim.convention.name, subject.claim.steps) == ("poisson-rdp", 2)
    ledger = Run.open(run).latest_state().ledger
    assert subject.claim.epsilon == epsilon(ledger, subject.claim.delta, subject.claim.convention)
    at = np.abs(subject.claim.curve.epsilons - subject.claim.epsilon).argmin()
    assert subject.claim.curve.deltas[at + 1] <= subject.claim.delta <= subject.claim.curve.deltas[at - 1]
    _, out, _ = flsim("audit", run)
    text = " ".join(out.split())
    assert f"epsilon {subject.claim.epsilon:.3g} at delta {subject.claim.delta:.3g} for one user" in text
    assert "cannot be tested" in text
    assert "epsilon, GDP" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--round", "3"), "round 3 was not evaluated"),
        (("--format", "latex"), "--format latex: audits have the formats md, csv and parquet; choose one of them"),
        (("--threshold", "500"), "--threshold 500: there are 200 references; name a rank of at most 200"),
    ],
)
def test_what_cannot_be_audited_is_one_line(
    trained_here: Trained, flsim: Flsim, options: tuple[str, ...], message: str
) -> None:
    code, out, err = flsim("audit", trained_here(), *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


FIELDS = ("method", "unit", "neighbours", "n_in", "n_out", "estimate", "low", "high", "confidence", "delta", "kind")
NEVER = {"unit", "neighbours", "n_in", "n_out"}  # unknown
LEDGER = 'a test of the ledger (privacy.mechanism "dp")'
RANKS, COINS = "a bound from ranks (canaries.count)", "a bound from guesses of coins of at least 10 canaries"
USERS = "an estimate from canary users (audit.update_canaries)"


OF_ROUNDS = {"participation", "noise"}


@pytest.mark.parametrize(
    ("overrides", "methods", "missing"),
    [
        (("canaries.count=0",), set(), [RANKS, COINS, USERS, LEDGER]),
        (
            ("canaries.count=0", "privacy.mechanism='clip'", "privacy.clip=0.5", "audit.update_canaries=20"),
            {"epsilon, canary users", "epsilon, canary users left out"},
            [RANKS, COINS, LEDGER],
        ),
        (
            TESTED,
            {
                *("tpr", "epsilon", "trade-off", "epsilon, GDP", "epsilon, canary users"),
                *("epsilon, canary users left out", "epsilon, canary users by coins"),
                "trade-off, canary users by coins",
                *OF_ROUNDS,
            },
            [],
        ),
    ],
    ids=["nothing", "canary-users", "all"],
)
def test_a_run_says_what_it_can_and_names_what_is_missing(
    trained_here: Trained, flsim: Flsim, overrides: tuple[str, ...], methods: set[str], missing: list[str]
) -> None:
    run = trained_here(*overrides)
    code, out, _ = flsim("audit", run, "--json")
    ((audited,), line) = json.loads(out)["runs"], "Not available, with the required settings: "
    assert (code, {row["method"] for row in audited["rows"]}) == (0, methods)
    for row in audited["rows"]:
        assert set(FIELDS) <= set(row)
        assert all(row[name] is not None for name in NEVER)
        assert row["kind"] in ("bound", "estimate", "heuristic")
        is_of_chance = row["method"] in ("epsilon, canary users", "epsilon, canary users left out")
        assert (row["confidence"] is None) == is_of_chance
        is_verdict = row["method"].startswith("trade-off") or row["method"] in OF_ROUNDS
        known = [row["refuted"] if is_verdict else row["estimate"], row["low"]]
        assert any(value is not None for value in known)
        assert (row["delta"] is None) == (row["method"] == "tpr" or is_verdict)
    named = "".join(note.removeprefix(line) for note in audited["notes"] if note.startswith(line))
    assert [part.strip(" .") for part in named.split(";") if part] == [
        part + " (canaries.coins)" * (part == COINS) for part in missing
    ]


def test_a_table_without_rows_has_its_columns(trained_here: Trained, flsim: Flsim, tmp_path: Path) -> None:
    run = trained_here("canaries.count=0")
    code, out, err = flsim("audit", run, "--format", "csv")
    assert (code, len(out.splitlines()), "run run: has no row. " in err) == (0, 1, True)
    assert flsim("audit", run, "--format", "parquet", "--out", tmp_path / "audit.parquet")[0] == 0
    assert list(pd.read_parquet(tmp_path / "audit.parquet").columns) == out.strip().split(",")


def test_a_folder_of_runs_is_audited_without_those_that_have_nothing(
    trained_here: Trained, flsim: Flsim, tmp_path: Path
) -> None:
    run, folder = trained_here(), tmp_path / "runs"
    for name in ("one", "two", "diverged"):
        shutil.copytree(run, folder / name)
    shutil.rmtree(folder / "diverged" / "rows")
    code, out, err = flsim("audit", folder, "--json")
    audited = json.loads(out)["runs"]
    assert (code, [one["run"] for one in audited]) == (0, ["one", "two"])
    lows = [[row["low"] for row in one["rows"]] for one in audited]
    assert lows[0] == lows[1] != []
    assert "excluded: run diverged: completed, not evaluated yet" in err
    for name in ("one", "two"):
        shutil.rmtree(folder / name)
    assert flsim("audit", folder)[0] == 2
