"""The subject of an audit: ranks, the users or records that share each canary, and the claim of the ledger."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flsim.attacks.audit.claim import Claim, needs_custom_code
from flsim.attacks.audit.rounds import CanaryUsers, RoundTest, canary_users_of, independence, participation
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.extensions import is_custom, restrict_custom_code, short_name
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.models.architectures import build
from flsim.models.language_model import Params
from flsim.privacy.ledger import Unit
from flsim.results.store import RunResults, read_run
from flsim.runs.config.base import Config
from flsim.runs.elsewhere import canaries_of
from flsim.runs.folder import Run
from flsim.training.update import State


@dataclass(frozen=True)
class Coins:
    """Canaries planted by independent coins: ranks, coins, and the most units that each could affect, all [m]."""

    ranks: Floats
    planted: Flags
    groups: Ints


@dataclass(frozen=True)
class Subject:
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
    holders = held.user_offsets.searchsorted(held.overlay.records, side="right") - 1
    sharers = {
        canary.id: len(np.unique(holders[held.overlay.canaries == index])) for index, canary in enumerate(canaries)
    }
    return np.array([sharers[canary] for canary in planted["canary"]], np.int64).clip(1), True


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
