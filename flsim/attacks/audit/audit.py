"""`flsim audit`: its subject, evidence of canaries about the privacy of a training, and the claims of its ledger."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.attacks.audit import bounds
from flsim.attacks.audit.bounds import epsilon_of_gaussian
from flsim.attacks.audit.claim import Claim, LedgerTest, in_words, needs_custom_code
from flsim.attacks.audit.rounds import CanaryUsers, RoundTest, canary_users_of, independence, participation
from flsim.attacks.result import Result, text_of
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError, at_least_one
from flsim.base.extensions import is_custom, restrict_custom_code, short_name
from flsim.canaries.planting import counts_of
from flsim.canaries.population import Population
from flsim.canaries.spec import ABOUT_INJECTIONS, Canary
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import Params
from flsim.privacy.ledger import Unit
from flsim.results.rows import SCHEMA, RunResults, read_run, refuse_two_points
from flsim.results.sweeps import over_runs
from flsim.runs.config.base import Config
from flsim.runs.elsewhere import canaries_of
from flsim.runs.folder import Run
from flsim.runs.simulation import Central, FedAvg, Planted, refuse_not_planted
from flsim.show.table import Field, Table, table_of
from flsim.training.update import State

# The subject of an audit: ranks, the users or records that share each canary, and the claim of the ledger.


@dataclass(frozen=True)
class Coins:
    """Canaries planted by independent coins: ranks, coins, and the most units that each could affect, all [m]."""

    ranks: Floats
    planted: Flags
    groups: Ints


@dataclass(frozen=True)
class Subject:
    """What the tests of an audit read: one evaluated round of a run."""

    results: RunResults
    round: int
    unit: Unit  # the unit that the ledger protects, and that the bounds are about
    ranks: Floats  # [canaries], ranks of the planted canaries among `references` random phrases
    groups: Ints  # [canaries], number of units that share each canary, at least 1
    references: int  # R; 0 if no canary was ranked
    control_ranks: Floats  # [controls], ranks of canaries that were never planted
    coins: Coins | None
    is_exact: bool = True  # whether `groups` are exact; otherwise numbers of copies, which are at least as large
    claim: Claim | None = None  # None for a run without noise, or if the claim does not cover holders of canaries
    canary_users: CanaryUsers | None = None
    note: str = ""  # a sentence on the users whom an epsilon does not cover, or whose records are mostly canaries
    participation: RoundTest | None = None
    noise: RoundTest | None = None


def subject_with(
    results: RunResults,
    round_: int,
    state: State | None,
    delta: float | None,
    config: Config,
    *,
    protected: int,
    canaries: Sequence[Canary],
    users: Callable[[], Population],
    first: Callable[[], Params],
    note: str,
    executes_code: bool,
) -> Subject:
    """Return the subject of an audit of a training.

    `state` is that after the round; None if canary users and a ledger do not need it. `delta` is of the claim and of
    estimates; by default the reported one. The ledger protects `protected` units. `canaries` are in the order of the
    overlay. `users` returns the training users, or raises InputError without their corpus, and `first` the parameters
    before training. Unless `executes_code`, the claim of a custom sampler or noise is read from the rows.
    """
    ranked = _ranked(results, round_, is_natural=any(canary.is_natural for canary in canaries))
    none = np.empty(0, np.int64), True
    groups, is_exact = _groups(results, config.unit, users, canaries) if len(ranked["ranks"]) else none
    coins = _coins(config.unit, results, round_)
    subject = Subject(results, round_, config.unit, **ranked, groups=groups, is_exact=is_exact, coins=coins, note=note)
    if state is None:
        return subject
    ledger, reported = state.ledger, config.privacy.delta_for(protected) if delta is None else delta
    claim, cohorts, noise, moved = None, None, None, None
    if config.privacy.mechanism == "dp" and not note:
        if needs_custom_code(ledger) and not executes_code:
            claim = Claim.of_rows(results, round_, config.sampler, config.unit, delta)
        else:
            claim = Claim.of_ledger(ledger, config.sampler, reported)
    if config.canary_users.update_canaries:
        moved = canary_users_of(config.canary_users, config.seed, first(), state.params, reported)
    if claim is not None and config.unit == "user":
        cohorts = participation(ledger, config.seed, executes_code)
        noise = independence(ledger, config.seed, state.params, executes_code)
    return replace(subject, claim=claim, canary_users=moved, participation=cohorts, noise=noise)


def _ranked(results: RunResults, round_: int, is_natural: bool = False) -> dict[str, Any]:
    """Return ranks, references and ranks of controls, by the names of `Subject`; empty without ranks.

    Natural text ranks high among random words in any model. Guesses of its coins are still valid.
    """
    ranks, references = results.of_planted("rank", round_), results.references(round_)
    controls = results.of_controls("rank", round_)
    has_ranks = ranks is not None and references is not None and not is_natural
    return {
        "ranks": np.asarray(ranks if has_ranks else [], dtype=np.float64),
        "references": int(references or 0) if has_ranks else 0,
        "control_ranks": np.asarray([] if controls is None or is_natural else controls, dtype=np.float64),
    }


@restrict_custom_code()
def subject_of(path: Path, round: int | None = None, epoch: float | None = None, delta: float | None = None) -> Subject:
    """Read the data of a run for an audit, without executing code of the run.

    InputError for another folder, without this evaluation or a needed checkpoint, or for canary users of a custom
    model.
    """
    results = read_run(path)
    if results.is_elsewhere:
        return _of_measurements(path, results, results.at(round, epoch))
    run = Run.open(path)
    at, config = results.at(round, epoch), run.config
    needs_state = config.canary_users.update_canaries > 0 or config.privacy.mechanism == "dp"
    return subject_with(
        results,
        at,
        _state(run, at) if needs_state else None,
        delta,
        config,
        protected=run.population,
        canaries=run.canaries,
        users=lambda: run.users,
        first=lambda: _first_params(run),
        note=config.canaries.about_injections,
        executes_code=False,
    )


NO_LAW = (
    "The canaries were listed by hand. A rank is a p-value only of a phrase that was drawn at random before training, "
    "by a law that is recorded; flsim data canaries draws such phrases"
)


def _of_measurements(path: Path, results: RunResults, round_: int) -> Subject:
    """Return the subject of a model trained elsewhere, which has no ledger; InputError if its canaries have no law."""
    if results.settings.get("canaries.source") not in ("words", "template"):
        raise InputError(f"run {results.name}: has nothing that proves anything. {NO_LAW}")
    canaries, ranked = canaries_of(path), _ranked(results, round_)
    shared = results.planted["sharers" if canaries.unit == "user" else "insertions"].to_numpy("int64").clip(1)
    groups, coins = shared if len(ranked["ranks"]) else shared[:0], _coins(canaries.unit, results, round_)
    return Subject(results, round_, canaries.unit, **ranked, groups=groups, coins=coins, note=canaries.warning)


def _groups(
    results: RunResults, unit: Unit, users: Callable[[], Population], canaries: Sequence[Canary]
) -> tuple[Ints, bool]:
    """Return the number of units that share each planted canary; without a needed corpus, copies, and False."""
    planted = results.planted
    copies: Ints = planted["insertions"].to_numpy("int64")
    if unit == "record":
        return copies.clip(1), True
    if results.partition != "iid" or "pseudo_users" in planted:
        return planted["sharers"].to_numpy("int64").clip(1), True  # other canaries can have got all its records
    try:
        held = users()
    except InputError:
        return copies.clip(1), False
    sharers, _ = counts_of(held.overlay, held.user_offsets, len(canaries))
    by_canary = dict(zip((canary.id for canary in canaries), sharers.tolist(), strict=True))
    return planted["canary"].map(by_canary).to_numpy("int64").clip(1), True


def _coins(unit: Unit, results: RunResults, round_: int) -> Coins | None:
    """Return the canaries with coins for which a record was drawn; of an IID partition, users count as copies."""
    roster, ranks = results.roster, results.of_canaries("rank", round_)
    if "coin" not in roster or ranks is None or not roster["coin"].notna().any():
        return None
    tossed = roster[roster["coin"].notna() & (roster["planned_insertions"] > 0)]
    is_user = unit == "user" and results.partition != "iid" and tossed["p_u"].notna().all()
    groups = tossed["planned_sharers" if is_user else "planned_insertions"]
    return Coins(
        np.asarray(ranks.loc[tossed["canary"]], dtype=np.float64),
        np.asarray(tossed["coin"], dtype=np.bool_),
        np.asarray(groups, dtype=np.int64).clip(1),
    )


def _state(run: Run, round_: int) -> State:
    path = run.path / "checkpoints" / f"round-{round_:06d}.safetensors"
    if not path.exists():
        raise InputError(f"{path}: no such checkpoint, which has the ledger of this round; audit another --round")
    return run.load(path, executes_code=False)


def _first_params(run: Run) -> Params:
    if is_custom(run.config.model.architecture):
        raise InputError(
            f"{run.path}: an audit of canary users must execute the custom model "
            f"{short_name(run.config.model.architecture)}, and flsim audit executes no code of a run; audit it "
            "in Python with flsim.audit_simulation"
        )
    network = build(run.corpus.layout.vocabulary_size, run.config.model).initialize(run.config.seed)
    return {name: value.detach() for name, value in network.trainable.items()}


def claim_of(run: Run, state: State, delta: float | None = None) -> Claim | None:
    """Return the claim of a state's ledger, at the run's delta by default, or None without noise.

    It is also None if only code of the run can account for the ledger and no evaluation stored the claim.
    """
    config = run.config
    if config.privacy.mechanism != "dp":
        return None
    if needs_custom_code(state.ledger):
        return Claim.of_rows(read_run(run.path), state.round, config.sampler, config.unit, delta)
    return Claim.of_ledger(state.ledger, config.sampler, run.delta if delta is None else delta)


# The evidence of an audit as rows.

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
RIGHT = (
    Field("Right", "detected", "{:,}", note="Right: number of canaries found, or of correct guesses, among Of."),
    Field("Of", "trials", "{:,}"),
)
STATEMENTS = (
    (
        Field("Kind", "kind"),
        *RIGHT,
        Field("Estimate", "estimate", "{:.2f}"),
        Field("At least", "low", "{:.2f}", note="At least: lower bound on epsilon, of one user or record."),
        Field("Delta", "delta", "{:.2g}"),
    ),
    (Field("Ledger's", "allowed", "{:.3g}"),),
)
TESTS = (
    *RIGHT,
    Field("Ledger", "verdict"),
    Field("Needed", "needed", "{:,}", note=NEEDED),
    Field("Limit", "refutable", "{:.2f}", note=LIMIT),
    Field("p", "p_value", "{:.2g}"),
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
    fixed = bounds.default_threshold(subject.references) if threshold is None else threshold
    if has_ranks and fixed > subject.references:
        raise InputError(
            f"--threshold {fixed}: there are {subject.references} references; name a rank of at most "
            f"{subject.references}"
        )
    detections = bounds.detections_by_level(subject.ranks, subject.references).values() if has_ranks else ()
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
    return bounds.epsilon_of_ranks(len(groups), bounds.default_threshold(references), references, groups)


def ceiling_of_coins(groups: Sequence[int], delta: float) -> float | None:
    """Return the largest lower bound on epsilon, replace-one, of coins; None for too few units of canaries [m]."""
    guessed = 2 * _of_each_kind(len(groups))
    return bounds.epsilon_of_coins(len(groups), guessed, guessed, delta, users=max(groups)) if guessed else None


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
    low = bounds.epsilon_of_ranks(hits, threshold, subject.references, subject.groups.tolist())
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
            "estimate": epsilon_of_gaussian(of_one, claim.delta),
            "delta": claim.delta,
            "allowed": claim.epsilon,
        }
    if len(subject.control_ranks):
        alarms = int((subject.control_ranks <= threshold).sum())
        controls = bounds.epsilon_of_threshold(hits, canaries, alarms, len(subject.control_ranks))
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
    right = bounds.correct_guesses(scores, planted, each_kind)
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
    low = bounds.epsilon_of_coins(canaries, 2 * each_kind, right, delta, users=of_what["group"])
    yield common | {"method": f"epsilon, {name}", "low": low, "delta": delta}
    if claim is not None:
        verdict = LedgerTest(canaries, 2 * each_kind, neighbours).verdict(claim, right)
        yield common | {"method": f"trade-off, {name}", "allowed": None} | verdict


def to_text(subject: Subject, audited: Result) -> str:
    title = f"{subject.results.setting} ({subject.results.name}), after round {subject.round:,}"
    return text_of(title, tables(audited.frame).values(), audited.notes)


def tables(frame: pd.DataFrame, labels: Sequence[Field] = ()) -> dict[str, Table]:
    """Return the tables of rows of audits by title: found canaries, statements, tests, with labels of their rows."""
    frame = frame.assign(verdict=pd.Series(map(in_words, frame.to_dict("records")), frame.index, "object"))
    is_rate, is_test = frame["method"] == "tpr", frame["verdict"].notna()
    statements = frame[~is_rate & ~is_test]
    kinds = " ".join(text for kind, text in KINDS.items() if kind in set(statements["kind"]))
    method = Field("Method", "method")
    by_title = {
        "Detected canaries": table_of(frame[is_rate], [*labels, Field("FPR", "fpr", "{:.2g}", note=FPR)], [RATES]),
        "Statements about epsilon": table_of(statements, [*labels, replace(method, note=kinds)], STATEMENTS),
        "Tests of the ledger": table_of(frame[is_test], [*labels, method], [TESTS]),
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
        yield f"{claim.stated(unit)}."
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
