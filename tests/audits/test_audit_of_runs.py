"""Tests of `flsim audit` on real runs: rows against a second computation from files, groups, claims and refusals."""

import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy
import torch
from gaussian_claims import curve_of_gaussian
from helpers import PRIVATE, TESTED, Flsim, MakeCorpus, Trained, refusal

import flsim as api
from benchmarks.alarms import bench_alarms, describe
from benchmarks.alarms.cases import Case, most_alarms
from benchmarks.alarms.elsewhere import ELSEWHERE
from benchmarks.alarms.ours import ESTIMATES, OURS, epsilon_of_noise, right_guesses, right_guesses_of_users
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.checkpoint import load
from flsim.algorithms.rounds import FederatedTraining
from flsim.attacks.audit import bounds
from flsim.attacks.audit.audit import COLUMNS, Subject, audit_subject, subject_of, tables
from flsim.attacks.audit.bounds import epsilon_of_gaussian
from flsim.attacks.audit.claim import Claim, LedgerTest
from flsim.attacks.audit.rounds import CanaryUsers, epsilon_of_cosines
from flsim.attacks.audit.summary import summary
from flsim.base.rng import stream
from flsim.models.architectures import ModelHParams
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import AuditHParams, PrivacyHParams, cosines, direction, epsilon, toss
from flsim.runs.folder import Run
from flsim.training.update import LocalHParams, with_canaries


def test_rows_follow_from_the_ranks(trained_here: Trained, flsim: Flsim) -> None:
    """Counts, shares and intervals follow from Parquet files; at the bound, as many hits or more have p = 0.04."""
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
    """Users are counted one by one, as they read their records. Copies count only if the corpus is missing."""
    run = trained_here(f"data.partition='{partition}'")
    subject, opened = subject_of(run), Run.open(run)
    phrases = {canary.id: list(canary.tokens) for canary in opened.canaries}
    for canary, group in zip(subject.results.planted["canary"], subject.groups, strict=True):
        users = [opened.users[user] for user in range(len(opened.users))]
        assert group == sum(phrases[canary] in [record.tolist() for record in records] for records in users)
    assert subject.is_exact


def test_a_ledger_is_compared_with_what_was_detected(trained_here: Trained, flsim: Flsim) -> None:
    """The claim is that of the ledger, for removing a user and adding another; a tiny run contradicts nothing."""
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
    assert f"{subject.claim.stated('user')}; no test refutes it." in " ".join(summary(subject).split())
    assert subject.noise is not None
    with_other_noise = replace(subject, noise=replace(subject.noise, p_value=0.0))
    assert "; refuted by the tests noise." in " ".join(summary(with_other_noise).split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--round", "3"), "round 3 was not evaluated"),
        (("--format", "latex"), "--format latex: audits have the formats md, csv and parquet; choose one of them"),
        (("--threshold", "500"), "--threshold 500: there are 200 references; name a rank of at most 200"),
    ],
)
def test_options_that_do_not_fit_the_run_are_refused_in_one_line(
    trained_here: Trained, flsim: Flsim, options: tuple[str, ...], message: str
) -> None:
    assert message in refusal(flsim, "audit", trained_here(), *options)


FIELDS = ("method", "unit", "neighbours", "n_in", "n_out", "estimate", "low", "high", "confidence", "delta", "kind")
NEVER = {"unit", "neighbours", "n_in", "n_out"}  # fields that are never unknown
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
def test_an_audit_has_all_possible_rows_and_names_missing_settings(
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


def test_a_folder_is_audited_without_runs_that_are_not_evaluated(
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


CANARIES: dict[str, Any] = {"p_u": (0.2,), "p_e": (0.5, 1.0), "count": 2}
MODEL = api.Model(embedding=8, units=12)
LOCAL = api.LocalSGD(batch_size=4)
NAMES = ["run", "setting"]


def simulated(corpus: Path, algorithm: Any, partition: Any, rounds: int, **canaries: Any) -> pd.DataFrame:
    """Simulate and evaluate the settings of `helpers.TINY`, and audit the last state."""
    planted = api.plant(corpus, api.Canaries(**CANARIES | canaries), partition=partition)
    *_, last = api.simulate(planted, MODEL, algorithm, rounds)
    measured = api.evaluate(last, planted, MODEL, references=200)
    return api.audit_simulation(last, planted, MODEL, algorithm, measured)


def corpus_of(run: Path) -> Path:
    return run.parent / "corpus"


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_a_simulation_is_audited_as_its_run(trained_here: Trained, partition: str) -> None:
    """All rows of a DP run with canary users are equal, with groups, ledger, cosines and coins."""
    run = trained_here(*TESTED, f"data.partition='{partition}'")
    privacy = api.Privacy("dp", clip=0.5, noise_multiplier=0.8)
    users = api.CanaryUsers(60, canary_coins=True)
    algorithm = api.FedAvg(6, sampler="poisson", local=LOCAL, privacy=privacy, canary_users=users, shards=1)
    of_run = api.audit(run)
    assert {"epsilon", "trade-off", "epsilon, canary users by coins"} <= set(of_run["method"])
    shown = tables(audit_subject(subject_of(run)).frame)
    assert set(shown["Tests of the ledger"].frame["method"].str.partition(",")[0]) == {"trade-off", *OF_ROUNDS}
    for part in "".join(table.markdown() for table in shown.values()).split("\n\n"):
        cells = [line.strip("|").split("|")[1:] for line in part.splitlines() if line.startswith("|")][2:]
        assert all(any(map(str.strip, line)) for line in (*cells, *zip(*cells, strict=True)))
    of_simulation = simulated(corpus_of(run), algorithm, partition, 4)
    pd.testing.assert_frame_equal(of_simulation.drop(columns=NAMES), of_run.drop(columns=NAMES), check_exact=True)
    assert set(of_simulation["run"]) == {"simulation"}


def test_a_simulation_with_coins_and_without_noise(trained_here: Trained) -> None:
    run = trained_here("canaries.coins=true", "canaries.count=10", "canaries.p_u=[0.05]")
    of_run = api.audit(run)
    assert "epsilon, coins" in set(of_run["method"])
    algorithm = api.FedAvg(6, local=LOCAL, shards=1)
    of_simulation = simulated(corpus_of(run), algorithm, "non-iid", 4, count=10, coins=True, p_u=(0.05,))
    pd.testing.assert_frame_equal(of_simulation.drop(columns=NAMES), of_run.drop(columns=NAMES), check_exact=True)


def test_dp_sgd_protects_records(trained_here: Trained) -> None:
    run = trained_here()
    training = api.CentralSGD(batch_size=8, learning_rate=0.5)
    algorithm = api.Central(training, api.Privacy("dp", clip=0.5, noise_multiplier=1.0))
    rows = simulated(corpus_of(run), algorithm, "non-iid", 3)
    assert set(rows["unit"]) == {"record"}
    (row,) = rows[rows["method"] == "epsilon, GDP"].to_dict("records")
    records = api.open_corpus(corpus_of(run)).split("train").records
    assert row["delta"] == 1 / (10 * records)


def test_canary_users_are_audited_without_ranks(trained_here: Trained) -> None:
    """If training continues from a state, the vectors of canary users are in the change since this state."""
    corpus = corpus_of(trained_here())
    planted = api.plant(corpus, api.Canaries(count=0))
    plain, clip = api.FedAvg(6, local=LOCAL, shards=1), api.Privacy("clip", clip=0.5)
    *_, first = api.simulate(planted, MODEL, plain, 1)
    tested = api.FedAvg(6, local=LOCAL, privacy=clip, canary_users=api.CanaryUsers(20), shards=1)
    *_, last = api.simulate(planted, MODEL, tested, 3, start=first)
    (row, _) = api.audit_simulation(last, planted, MODEL, tested, start=first).to_dict("records")
    assert (row["method"], row["n_in"], row["estimate"] > 0) == ("epsilon, canary users", 20, True)
    rows = api.evaluate(first, planted, MODEL, references=200)
    with pytest.raises(api.InputError, match="some rows are not of round 3"):
        api.audit_simulation(last, planted, MODEL, tested, rows, start=first)


def test_rows_of_folders_are_those_of_the_command(trained_here: Trained, flsim: Flsim) -> None:
    run, other = trained_here(), trained_here("canaries.count=0")
    table = api.audit(run, other, threshold=3)
    assert list(table.columns) == list(COLUMNS)
    printed = json.loads(flsim("audit", run, "--threshold", 3, "--json")[1])["runs"][0]["rows"]
    assert [row["method"] for row in printed] == table["method"].tolist()
    assert [row["low"] for row in printed] == pytest.approx(table["low"].tolist())
    with pytest.raises(api.InputError, match="--round and --epoch"):
        api.audit(run, round=4, epoch=1.0)


def test_rows_of_other_canaries_are_refused(trained_here: Trained) -> None:
    planted = api.plant(corpus_of(trained_here()), api.Canaries(**CANARIES))
    algorithm = api.FedAvg(6, local=LOCAL, shards=1)
    *_, last = api.simulate(planted, MODEL, algorithm, 2)
    measured, first = api.evaluate(last, planted, MODEL, references=200), planted.canaries[0].id
    for rows in (measured.replace({"canary": {first: "mine"}}), measured[measured["canary"] != first]):
        with pytest.raises(api.InputError, match="rows: these canaries are not in `planted`"):
            api.audit_simulation(last, planted, MODEL, algorithm, rows)


@pytest.mark.parametrize(("dimension", "value"), [(200, 2.375326), (2_000, 2.317789)])
def test_published_values(dimension: int, value: float) -> None:
    """The values are in google-research/federated, one_shot_epe/empirical_privacy_estimation_test.py: normal cosines
    against chance."""
    assert epsilon_of_cosines(dimension**-0.5, dimension**-0.5, dimension, 0.01) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0])
def test_the_estimate_is_near_the_truth_of_a_gaussian_mechanism(noise: float) -> None:
    """The sum of 200 unit vectors in 2,000 dimensions has noise of this deviation: mu is 1 / noise for each vector."""
    zero = {"a": torch.zeros(2_000, dtype=torch.float64)}
    total = with_canaries(zero, np.arange(200), 0, 1.0)
    total["a"] += torch.from_numpy(stream(0, "test of estimates").normal(0, noise, 2_000))
    measured = cosines(total, 0, range(400))
    users = CanaryUsers(measured[:200], np.ones(200, np.bool_), measured[200:], False, 2_000, 1e-5)
    truth = epsilon_of_gaussian(1 / noise, 1e-5)
    assert users.estimate(users.members) == pytest.approx(truth, rel=0.3)
    chance = users.estimate(users.others)
    assert chance is not None
    if noise == 1.0:
        assert chance < 0.5 * truth


def test_the_bound_is_below_the_ledgers_epsilon(
    make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]
) -> None:
    """At most 1 of 20 seeds of a run of epsilon 0.6 is above it; with almost no noise, the bound is much larger."""
    users = make_corpus(random_users(8, 2, 36), vocabulary_size=40).split("train")
    server, canary_users = FedAvgHParams(rounds=2, cohort=8, sampler="poisson"), AuditHParams(100, canary_coins=True)

    def bound_and_claim(seed: int, multiplier: float) -> tuple[float, float]:
        privacy = PrivacyHParams("dp", clip=0.5, noise_multiplier=multiplier)
        training = FederatedTraining(
            users, ModelHParams(embedding=4, units=4), server, LocalHParams(), privacy, seed, audit=canary_users
        )
        first = training.first_state()
        (last,) = training.states(first, 2, lambda _: False)
        change = {name: value.double() - first.params[name].double() for name, value in last.params.items()}
        right = bounds.correct_guesses(cosines(change, seed, range(100)), canary_users.present(seed), 10)
        claimed = epsilon(last.ledger, 1e-5, sound_convention("poisson"))
        return bounds.epsilon_of_coins(100, 20, right, 1e-5), claimed

    pairs = [bound_and_claim(seed, 10.0) for seed in range(20)]
    assert all(claimed == pytest.approx(0.6, abs=0.2) for _, claimed in pairs)
    assert sum(bound > claimed for bound, claimed in pairs) <= 1
    assert bound_and_claim(0, 0.01)[0] > 1, "the attack finds those that noise does not hide"


def test_an_audit_of_a_run_with_canary_users(trained_here: Trained, flsim: Flsim) -> None:
    """The test computes coins, cosines and guesses again from the checkpoint, with numpy."""
    run = trained_here(*TESTED)
    code, out, err = flsim("audit", run, "--format", "csv")
    assert code == 0, err
    rows = {row["method"]: row for row in pd.read_csv(io.StringIO(out)).to_dict("records")}
    opened = Run.open(run)
    state, first = load(sorted((run / "checkpoints").iterdir())[-1])[0], opened.training().first_state()
    names = sorted(state.params)
    moved = np.concatenate([(state.params[name].double() - first.params[name].double()).flatten() for name in names])
    vectors = [direction(0, canary, state.params)[0] for canary in range(60)]
    flat = np.stack([np.concatenate([vector[name].flatten() for name in names]) for vector in vectors]).astype(float)
    measured = flat @ moved / np.linalg.norm(flat, axis=1) / np.linalg.norm(moved)
    tossed = np.array([toss(0, canary) for canary in range(60)])
    order = np.argsort(measured)
    right = tossed[order[-6:]].sum() + (~tossed[order[:6]]).sum()
    bound, estimate = rows["epsilon, canary users by coins"], rows["epsilon, canary users"]
    assert (bound["kind"], bound["detected"], bound["n_in"], bound["n_out"]) == (
        "bound",
        right,
        tossed.sum(),
        60 - tossed.sum(),
    )
    delta = opened.delta
    assert bound["low"] == pytest.approx(bounds.epsilon_of_coins(60, 12, int(right), delta))
    ins = measured[tossed]
    assert estimate["kind"] == "estimate"
    assert estimate["estimate"] == pytest.approx(
        epsilon_of_cosines(ins.mean(), ins.std(ddof=1), len(moved), delta), rel=1e-6
    )
    assert not rows["trade-off, canary users by coins"]["refuted"]
    assert (bound["trials"], estimate["n_in"]) == (12, tossed.sum())


DELTA = 1e-5
MUS = (0.01, 0.2, 0.5, 1.0, 4.0)


def claim_of_gaussian(mu: float, delta: float = DELTA) -> Claim:
    """Return the claim of a ledger that is exactly mu-GDP."""
    return Claim(sound_convention("fixed-size"), epsilon_of_gaussian(mu, delta), delta, curve_of_gaussian(mu))


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize(("canaries", "each", "neighbours"), [(10, 1, 1), (12, 2, 1), (12, 6, 1), (10, 5, 2)])
def test_the_best_outcome_of_coins_decides_what_can_be_refuted(
    canaries: int, each: int, neighbours: int, mu: float
) -> None:
    """All 2^m outcomes of the coins are tried; scores in any order are the same design."""
    claim, test = claim_of_gaussian(mu), LedgerTest(canaries, 2 * each, neighbours)
    scores = np.arange(canaries, dtype=np.float64)
    outcomes = {bounds.correct_guesses(scores, np.array(c, bool), each) for c in product((0, 1), repeat=canaries)}
    refuting = {right for right in outcomes if test.refutes(claim.curve, right)}
    assert outcomes == set(range(2 * each + 1))
    assert test.needed(claim.curve) == min(refuting, default=None)
    for right in outcomes:
        verdict = test.verdict(claim, right)
        assert verdict["refuted"] == (right in refuting)
        assert verdict["needed"] == min(refuting, default=None)
        assert (claim.epsilon <= verdict["refutable"]) if refuting else (claim.epsilon >= verdict["refutable"])


@pytest.mark.parametrize("mu", MUS)
def test_the_best_outcome_of_hits_decides_what_can_be_refuted(mu: float) -> None:
    """All 2^8 outcomes are tried: each of 8 canaries is among the first 2 of its 200 references, or not."""
    claim, test = claim_of_gaussian(mu), LedgerTest.of_ranks(8, 2, 200, neighbours=1)
    refuting = {sum(hit) for hit in product((0, 1), repeat=8) if test.refutes(claim.curve, sum(hit))}
    assert test.needed(claim.curve) == min(refuting, default=None)
    assert bool(refuting) == (claim.epsilon <= test.verdict(claim, 0)["refutable"])


@pytest.mark.parametrize(("canaries", "each"), [(12, 6), (48, 5), (100, 10), (1_000, 100)])
def test_the_largest_epsilon_is_the_limit_of_refutable_gaussian_ledgers(canaries: int, each: int) -> None:
    test = LedgerTest(canaries, 2 * each, neighbours=1)
    largest = test.largest(DELTA)
    mu = test.mu_refuted(2 * each)
    assert epsilon_of_gaussian(mu, DELTA) == pytest.approx(largest)
    # The curve is known on a grid of epsilons; therefore, its claim allows a little more than the mechanism.
    assert test.needed(claim_of_gaussian(0.95 * mu).curve) is not None
    assert test.needed(claim_of_gaussian(1.001 * mu).curve) is None


@pytest.fixture
def subject(trained_here: Trained) -> Subject:
    return subject_of(trained_here(*TESTED))


def test_a_row_has_the_largest_refutable_epsilon(subject: Subject) -> None:
    """60 canary users, of whom 12 are guessed, cannot test the ledger of this run."""
    (row,) = audit_subject(subject).frame.query("method == 'trade-off, canary users by coins'").to_dict("records")
    assert subject.claim is not None
    assert pd.isna(row["needed"])
    assert row["refutable"] == pytest.approx(LedgerTest(60, 12, 1).largest(subject.claim.delta))
    assert row["refutable"] < subject.claim.epsilon


# How often bounds exceed the truth: mechanisms whose epsilon is known, and models that memorize nothing.
#
# The simulations are those of `python -m benchmarks alarms`. They are seeded, and therefore pass or fail each time.
# A bound at 5% may exceed the truth in 100 of 2,000 simulations, with a standard deviation of 9.7. The limit is three
# standard deviations higher.

SIMULATIONS = 2_000
PAGE = Path(__file__).parents[2] / "docs" / "audit-tests.md"
PROMISING = [case for case in (*OURS, *ESTIMATES) if case.promised is not None]


@pytest.mark.parametrize("case", PROMISING, ids=lambda case: f"{case.bound}: {case.truth}")
def test_bounds_exceed_the_truth_at_most_as_often_as_promised(case: Case) -> None:
    assert case.promised is not None
    simulations = SIMULATIONS // 20 if "canary users" in case.bound else SIMULATIONS  # canary users take a minute
    assert case.alarms(simulations) <= most_alarms(case.promised, simulations)


@pytest.mark.parametrize("mu", [1.0, 2.0, 4.0])
def test_the_simulated_attacker_guesses_better_than_chance(mu: float) -> None:
    """If the attacker guessed by chance, no bound could be above the truth."""
    assert (right_guesses(stream(0, "attacker"), SIMULATIONS, mu) > 10).mean() > 0.9


def test_canary_users_are_detected_under_little_noise_and_not_if_absent() -> None:
    """With little noise, more than 10 of 20 guesses are right; without canary users, 10 are right, by chance."""
    simulations = SIMULATIONS // 10
    assert right_guesses_of_users(1.0, simulations).mean() > 13
    standard_error = (20 / 4 / simulations) ** 0.5
    assert abs(right_guesses_of_users(None, simulations).mean() - 10) < 4 * standard_error
    epsilon, normal = epsilon_of_noise(1.0), scipy.stats.norm.cdf
    delta = normal(0.5 - epsilon) - np.exp(epsilon) * normal(-0.5 - epsilon)  # Balle and Wang (2018), theorem 8
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert epsilon_of_noise(None) == 0


def test_the_command_prints_what_was_measured(benchmark_command: Flsim) -> None:
    code, out, _ = benchmark_command("alarms", "--simulations", 20, "--json")
    assert code == 0
    measured = json.loads(out)
    sizes = {kind: len(measured[kind]) for kind in ("bounds", "estimates", "elsewhere")}
    assert sizes == {"bounds": len(OURS), "estimates": len(ESTIMATES), "elsewhere": len(ELSEWHERE)}
    assert measured["bounds"][0]["alarms"] == OURS[0].alarms(20)


@pytest.mark.nightly
def test_the_page_has_the_table_that_the_command_prints() -> None:
    tables = [part for part in describe(bench_alarms()).split("\n\n") if part.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert table in PAGE.read_text(encoding="utf-8")
