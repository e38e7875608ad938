"""`flsim audit`: evidence from canaries about the privacy of a training, and the claims of its ledger, as rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.attacks.audit import coins, guesses, ranks
from flsim.attacks.audit.claim import Claim, LedgerTest, in_words
from flsim.attacks.audit.subject import Subject, subject_of, subject_with
from flsim.attacks.audit.trade_off import epsilon_of_gaussian
from flsim.attacks.result import Result, text_of
from flsim.base.errors import InputError, at_least_one
from flsim.canaries.spec import ABOUT_INJECTIONS
from flsim.models.architectures import ModelHParams
from flsim.results.rows import SCHEMA
from flsim.results.store import RunResults, refuse_two_points
from flsim.results.sweeps import over_runs
from flsim.show.table import Field, Table, table_of
from flsim.simulation import Central, FedAvg, Planted, refuse_not_planted
from flsim.training.update import State

CONFIDENCE = 0.95
OF_EACH_KIND = 0.1  # shares of canaries that are guessed as planted and as not planted, fixed before ranks are known
COLUMNS = {
    "run": "string",
    "setting": "string",
    "round": "Int64",
    "method": "string",
    "kind": "string",
    "unit": "string",
    "neighbours": "string",
    "group": "Int64",
    "n_in": "Int64",
    "n_out": "Int64",
    "threshold": "Int64",
    "detected": "Int64",
    "trials": "Int64",
    "fpr": "Float64",
    "estimate": "Float64",
    "low": "Float64",
    "high": "Float64",
    "confidence": "Float64",
    "delta": "Float64",
    "allowed": "Float64",
    "refuted": "boolean",
    "needed": "Int64",
    "refutable": "Float64",
    "p_value": "Float64",
}
FPR = (
    "FPR: the false-positive rate of the test that the rank is at most this one. For a canary outside "
    "training, all ranks are equally likely, so the rate is exact. Found: planted canaries with such a rank; "
    "the interval treats them as independent."
)
KINDS = {
    "bound": "Bound: holds with 95% confidence.",
    "estimate": "Estimate: assumes, for example, a Gaussian mechanism, and can exceed the true epsilon.",
    "heuristic": "Heuristic: treats the canaries of one model as independent.",
}
NEEDED = "Needed: number of correct guesses that refute the ledger; empty if all correct guesses do not suffice."
LIMIT = "Limit: the largest epsilon at the ledger's delta that the test can refute."
RATES = (
    Field("Rank", "threshold", "{:,}"),
    Field("Found", "detected", "{:,}"),
    Field("Of", "trials", "{:,}"),
    Field("%", "estimate", "{:.0f}", 100, ends=("low", "high")),
    Field(
        "Allowed %", "allowed", "{:.1f}", 100, note="Allowed: the largest share that the ledger allows any attacker."
    ),
)
STATEMENTS = (
    (
        Field("Kind", "kind"),
        Field("Right", "detected", "{:,}", note="Right: number of canaries found or coins guessed, of all."),
        Field("Of", "trials", "{:,}"),
        Field("Estimate", "estimate", "{:.2f}"),
        Field("At least", "low", "{:.2f}", note="At least: lower bound on epsilon, of one user or record."),
        Field("Delta", "delta", "{:.2g}"),
    ),
    (
        Field("Ledger's", "allowed", "{:.3g}", is_late=True),
        Field("Ledger", "verdict"),
        Field("Needed", "needed", "{:,}", note=NEEDED),
        Field("Limit", "refutable", "{:.2f}", note=LIMIT),
        Field("p", "p_value", "{:.2g}"),
    ),
)


def audit(
    *runs: Path | str,
    round: int | None = None,
    epoch: float | None = None,
    threshold: int | None = None,
    delta: float | None = None,
) -> pd.DataFrame:
    """Audit the privacy of runs with their canaries, like `flsim audit`.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        round: the evaluated round to audit; by default the last one of each run.
        epoch: the number of passes over all records to audit at, instead of `round`.
        threshold: largest rank at which a canary counts as found, fixed before ranks are known; by default a thousandth
            of the references, and 100 from 100,000 references on.
        delta: delta of the claim; that of each run if not given.

    Returns:
        Rows with the columns of `flsim.attacks.audit.audit.COLUMNS`. A run without canaries, canary users and noise has
        no row.

    Raises:
        InputError: there is no such run or evaluation, or there are fewer references than the threshold.

    Examples:
        >>> rows = flsim.audit("runs/demo")                                    # doctest: +SKIP
        >>> rows[rows["kind"] == "bound"][["setting", "method", "low", "delta"]]               # doctest: +SKIP
    """
    refuse_two_points(round, epoch)
    subjects = over_runs(runs, lambda path: subject_of(path, round, epoch, delta))
    return pd.concat([audit_subject(subject, threshold).frame for subject in subjects.values()], ignore_index=True)


def audit_subject(subject: Subject, threshold: int | None = None) -> Result:
    """Return the rows of one run, with the columns of `COLUMNS`, and sentences that explain them.

        tpr              share of canaries of rank <= threshold, at a false-positive rate of threshold / (R + 1);
                         "allowed" is the largest that the claim leaves to an attacker
        epsilon          lower bound under pure DP, replace-one, of one unit; with "coins", at the claim's delta (or 0)
        trade-off        whether the ledger's curve is refuted, by ranks or coins; see `LedgerTest.verdict`
        epsilon, GDP     epsilon at the claim's delta, if the mechanism is Gaussian
        epsilon, canary users          estimate at the run's delta from the cosines of canary users, of one user
        epsilon, canary users left out    the same estimate from canary users that took no part: the level of chance
        participation, noise    whether the rounds refute the sampler or the noise that the ledger states
        epsilon, controls    planted canaries against never-planted ones, at one threshold

    ``detected`` counts canaries found, or right guesses, among ``trials``. Raises InputError for a threshold above R.
    """
    at_least_one(**{} if threshold is None else {"threshold": threshold})
    has_ranks = len(subject.ranks) > 0
    fixed = guesses.default_threshold(subject.references) if threshold is None else threshold
    if has_ranks and fixed > subject.references:
        raise InputError(
            f"--threshold {fixed}: there are {subject.references} references; name a rank of at most "
            f"{subject.references}"
        )
    detections = ranks.detections_by_level(subject.ranks, subject.references).values() if has_ranks else ()
    rows = [rate_at(subject, detection) for detection in detections]
    rows += [*of_ranks(subject, fixed)] if has_ranks else []
    rows += [*of_coins(subject), *of_canary_users(subject), *of_rounds(subject)]
    table = pd.DataFrame(rows).reindex(columns=list(COLUMNS))
    results = subject.results
    table = table.assign(run=results.name, setting=results.setting, round=subject.round, unit=subject.unit)
    return Result(frame=table.astype(COLUMNS), notes=tuple(_notes(subject, table)))


def audit_simulation(
    state: State,
    planted: Planted,
    model: ModelHParams,
    algorithm: FedAvg | Central,
    rows: pd.DataFrame | None = None,
    *,
    seed: int = 0,
    start: State | None = None,
    threshold: int | None = None,
    delta: float | None = None,
) -> pd.DataFrame:
    """Audit the privacy of a simulation with its canaries, like `audit` for run folders.

    Args:
        state: a state of `flsim.simulate`.
        planted, model, algorithm, seed, start: the arguments of that simulation.
        rows: rows of `flsim.evaluate` of that state, for the ranks of canaries; None to audit only canary users.
        threshold: see `audit`.
        delta: delta of the claim; by default that of a run with these settings.

    Returns:
        Rows with the columns of `flsim.attacks.audit.audit.COLUMNS`, for the run "simulation".

    Raises:
        InputError: `rows` have another round or other canaries, the settings are inconsistent, or there are fewer
            references than the threshold.

    Examples:
        >>> rows = flsim.evaluate(state, users, model, references=20_000)      # doctest: +SKIP
        >>> flsim.audit_simulation(state, users, model, algorithm, rows)       # doctest: +SKIP
    """
    refuse_not_planted(planted)
    measured = SCHEMA.empty_table().to_pandas() if rows is None else rows
    if rows is not None and not (rows["round"] == state.round).all():
        raise InputError(f"rows: some rows are not of round {state.round}, that of the state; evaluate this state")
    named, known = set(measured["canary"]) - {""}, {canary.id for canary in planted.canaries}
    if named and named != known:
        names = ", ".join(sorted(named ^ known)[:3])
        raise InputError(f"rows: these canaries are not in `planted`, such as {names}; evaluate with `planted`")
    results = RunResults(
        name="simulation",
        label=type(algorithm).__name__,
        status="completed",
        reason=None,
        round=state.round,
        rounds=state.round,
        rows=measured,
        roster=planted.roster,
        seed=seed,
        partition=planted.partition,
    )
    users = planted.users
    injected = np.unique(users.extra.rounds[users.extra.rounds >= 0]) + 1
    rounds = max(1, state.round)
    config = algorithm.config(planted, model, rounds, seed)
    training = config.training_of(users, rounds, "cpu")
    subject = subject_with(
        results,
        state.round,
        state,
        delta,
        config,
        protected=len(users) if config.unit == "user" else int(users.user_offsets[-1]),
        canaries=planted.canaries,
        users=lambda: users,
        first=lambda: (start or training.first_state()).params,
        note=ABOUT_INJECTIONS.format(f"in rounds {', '.join(map(str, injected))}") if len(injected) else "",
        executes_code=True,
    )
    return audit_subject(subject, threshold).frame


def ceiling(groups: Sequence[int], references: int) -> float:
    """Return the largest lower bound on epsilon, replace-one, of ranks, from the units of each canary [m]."""
    return guesses.epsilon_of_ranks(len(groups), guesses.default_threshold(references), references, groups)


def ceiling_of_coins(groups: Sequence[int], delta: float) -> float | None:
    """Return the largest lower bound on epsilon, replace-one, of coins; None for too few units of canaries [m]."""
    guessed = 2 * _of_each_kind(len(groups))
    return coins.epsilon_of_coins(len(groups), guessed, guessed, delta, users=max(groups)) if guessed else None


def pooled(subjects: Sequence[Subject]) -> Subject:
    """Return runs of one setting as one subject of an audit of ranks; each canary is in one run."""
    return replace(
        subjects[0],
        ranks=np.concatenate([subject.ranks for subject in subjects]),
        groups=np.concatenate([subject.groups for subject in subjects]),
        references=min(subject.references for subject in subjects),
        control_ranks=np.concatenate([subject.control_ranks for subject in subjects]),
        coins=None,
        canary_users=None,
        participation=None,
        noise=None,
    )


def _of_each_kind(canaries: int) -> int:
    """Return the number of coins that are guessed as planted, and as not planted; 0 if there are too few canaries."""
    return round(OF_EACH_KIND * canaries) if canaries >= 1 / OF_EACH_KIND else 0


def rate_at(subject: Subject, detection: Mapping[str, float]) -> dict[str, Any]:
    """Return the row of the canaries that a test of ranks finds; see `detection_at`."""
    largest, claim = int(subject.groups.max()), subject.claim
    return {
        **detection,
        "method": "tpr",
        "kind": "heuristic",  # the rate of false alarms is exact, but the interval assumes independent canaries
        "neighbours": "replace-one",
        "group": largest,
        "n_in": detection["trials"],
        "n_out": subject.references,
        "confidence": CONFIDENCE,
        "allowed": None if claim is None else 1 - claim.least_of_group(largest)(1 - detection["fpr_high"]),
    }


def of_ranks(subject: Subject, threshold: int) -> Iterator[dict[str, Any]]:
    """Yield rows with the bounds from ranks of at most `threshold`."""
    canaries, claim, largest = len(subject.ranks), subject.claim, int(subject.groups.max())
    hits = int((subject.ranks <= threshold).sum())
    low = guesses.epsilon_of_ranks(hits, threshold, subject.references, subject.groups.tolist())
    common = {
        "neighbours": "replace-one",
        "group": largest,
        "n_in": canaries,
        "n_out": subject.references,
        "threshold": threshold,
        "detected": hits,
        "trials": canaries,
        "confidence": CONFIDENCE,
    }
    yield common | {"method": "epsilon", "kind": "bound", "low": low, "delta": 0.0}
    if claim is not None:
        test = LedgerTest.of_ranks(canaries, threshold, subject.references, largest * claim.steps)
        yield common | {"method": "trade-off", "kind": "bound"} | test.verdict(claim, hits)
        of_one = test.mu_refuted(hits)
        yield common | {
            "method": "epsilon, GDP",
            "kind": "estimate",
            "neighbours": claim.convention.relation,
            "estimate": epsilon_of_gaussian(of_one, claim.delta) if of_one else 0.0,
            "delta": claim.delta,
            "allowed": claim.epsilon,
        }
    if len(subject.control_ranks):
        alarms = int((subject.control_ranks <= threshold).sum())
        controls = ranks.epsilon_of_threshold(hits, canaries, alarms, len(subject.control_ranks))
        yield common | {
            "method": "epsilon, controls",
            "kind": "heuristic",
            "n_out": len(subject.control_ranks),
            "fpr": alarms / len(subject.control_ranks),
            "low": controls / largest,
            "delta": 0.0,
        }


def of_coins(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield rows with the bound from coins of canaries; empty if there are too few canaries."""
    tossed, claim = subject.coins, subject.claim
    if tossed is None or not len(tossed.ranks):
        return
    largest = int(tossed.groups.max())
    neighbours = 1 if claim is None else largest * claim.steps
    of_what = {"neighbours": "replace-one", "group": largest}
    yield from _of_guesses("coins", of_what, -tossed.ranks, tossed.planted, claim, neighbours)


def of_canary_users(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield rows with the estimate and the bound of canary users: one user's updates are in the sums, or are not."""
    users, claim = subject.canary_users, subject.claim
    if users is None:
        return
    of_what: dict[str, Any] = {"neighbours": "zero-out", "group": 1}
    common = of_what | {
        "kind": "estimate",
        "n_in": len(users.members),
        "n_out": len(users.others),
        "delta": users.delta,
    }
    if (estimate := users.estimate(users.members)) is not None:
        allowed = None if claim is None else claim.epsilon
        yield common | {"method": "epsilon, canary users", "estimate": estimate, "allowed": allowed}
    if (chance := users.estimate(users.others)) is not None:
        yield common | {"method": "epsilon, canary users left out", "estimate": chance}
    if users.has_coins:
        # Under either relation of a ledger a user can be replaced by a user that sends nothing, or be removed.
        of_what["allowed"] = None if claim is None else claim.epsilon
        yield from _of_guesses("canary users by coins", of_what, users.cosines, users.present, claim, neighbours=1)


def of_rounds(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield rows with the tests of the rounds; empty without a ledger with known distributions."""
    for method, test in (("participation", subject.participation), ("noise", subject.noise)):
        if test is not None and subject.claim is not None:
            yield {
                "method": method,
                "kind": "bound",
                "neighbours": subject.claim.convention.relation,
                "n_in": test.rounds,
                "n_out": 0,
                "confidence": CONFIDENCE,
                "refuted": test.p_value < 1 - CONFIDENCE,
                "p_value": test.p_value,
            }


def _of_guesses(
    name: str,
    of_what: dict[str, Any],
    scores: NDArray[np.float64],
    planted: NDArray[np.bool_],
    claim: Claim | None,
    neighbours: int,
) -> Iterator[dict[str, Any]]:
    """Yield the bound from guesses of coins, and whether they refute the ledger's trade-off function, if any."""
    canaries = len(scores)
    if not (each_kind := _of_each_kind(canaries)):
        return
    right = coins.correct_guesses(scores, planted, each_kind)
    common = of_what | {
        "kind": "bound",
        "n_in": int(planted.sum()),
        "n_out": int((~planted).sum()),
        "threshold": each_kind,
        "detected": right,
        "trials": 2 * each_kind,
        "confidence": CONFIDENCE,
    }
    delta = 0.0 if claim is None else claim.delta
    low = coins.epsilon_of_coins(canaries, 2 * each_kind, right, delta, users=of_what["group"])
    yield common | {"method": f"epsilon, {name}", "low": low, "delta": delta}
    if claim is not None:
        verdict = LedgerTest(canaries, 2 * each_kind, neighbours).verdict(claim, right)
        yield common | {"method": f"trade-off, {name}", "allowed": None} | verdict


def to_text(subject: Subject, audited: Result) -> str:
    title = f"{subject.results.setting} ({subject.results.name}), after round {subject.round:,}"
    return text_of(title, tables(audited.frame).values(), audited.notes)


def tables(frame: pd.DataFrame, labels: Sequence[Field] = ()) -> dict[str, Table]:
    """Return the tables of rows of audits by title: of found canaries, and of statements, with labels of their rows."""
    rates, others = frame[frame["method"] == "tpr"], frame[frame["method"] != "tpr"]
    verdicts = pd.Series(map(in_words, others.to_dict("records")), others.index, "object")
    others = others.assign(verdict=verdicts)
    kinds = " ".join(text for kind, text in KINDS.items() if kind in set(others["kind"]))
    by_title = {
        "Detected canaries": table_of(rates, [*labels, Field("FPR", "fpr", "{:.2g}", note=FPR)], [RATES]),
        "Statements about epsilon": table_of(others, [*labels, Field("Method", "method", note=kinds)], STATEMENTS),
    }
    return {title: table for title, table in by_title.items() if len(table.frame)}


def to_json(subject: Subject, audited: Result) -> dict[str, Any]:
    """Return the audit of one run for JSON: ``run``, ``setting``, ``round``, ``rows`` and ``notes``."""
    results = subject.results
    return {"run": results.name, "setting": results.setting, "round": subject.round} | audited.to_json()


def _notes(subject: Subject, table: pd.DataFrame) -> Iterator[str]:
    """Yield sentences that explain the rows, and finally the missing statements."""
    claim, users, unit = subject.claim, subject.canary_users, subject.unit
    if claim is not None:
        yield (
            f"The ledger claims epsilon {claim.epsilon:.3g} at delta {claim.delta:.3g} for one {unit} "
            f"({claim.convention.name})."
        )
    if claim is not None and set(table["method"]) <= {"participation", "noise"}:
        yield "The run has no canaries or canary users that could test the claim."
    if users is not None and len(users.members):
        moved = float(users.members.mean()) * users.dimension**0.5
        yield (
            f"On average, the model moved {moved:.2f} standard deviations of chance along the updates of canary users."
        )
    for name, test in (("participation", subject.participation), ("noise", subject.noise)):
        if test is not None:
            yield f"The {name} of {test.rounds:,} rounds was recomputed from the seed; the ledger states {test.stated}."
    if len(subject.ranks):
        low, high = int(subject.groups.min()), int(subject.groups.max())
        size = f"{low}" if low == high else f"{low} to {high}"
        counted = "" if subject.is_exact else " (copies are counted instead of users, because the corpus is missing)"
        yield (
            f"Each canary is shared by {size} {unit}s{counted}. A canary of g {unit}s bounds the epsilon of "
            f"one {unit} by a g-th of the bound; all figures are for one {unit}."
        )
    if subject.note:
        yield subject.note
    if needs := list(_missing(subject, set(table["method"]))):
        yield f"Not available, with the required settings: {'; '.join(needs)}."


def _missing(subject: Subject, methods: set[str]) -> Iterator[str]:
    """Yield the statements that are missing for a run, each with the setting that it needs."""
    if subject.results.is_elsewhere:
        if "epsilon, coins" not in methods:
            yield "a bound from guesses of coins, of at least 10 canaries (flsim data canaries --set coins=true)"
        return
    if "epsilon" not in methods:
        source = ' with canaries.source "words"' if "is_natural" in subject.results.roster else ""
        yield f"a bound from ranks (canaries.count{source})"
    if not methods & {"epsilon, coins", "epsilon, canary users by coins"}:
        yield "a bound from guesses of coins of at least 10 canaries (canaries.coins)"
    if subject.unit == "user" and "epsilon, canary users" not in methods:
        users = subject.canary_users
        what = (
            "a model with more parameters" if users and users.is_too_small(users.members) else "audit.update_canaries"
        )
        yield f"an estimate from canary users ({what})"
    if subject.claim is None and not subject.note:
        yield 'a test of the ledger (privacy.mechanism "dp")'
