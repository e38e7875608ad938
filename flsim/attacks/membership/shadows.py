"""Attacks with shadow models: runs of several seeds, each trained on a random half of the users or records.

Every run of `data.shadow` is the target once (leave-one-out). Coins decided membership, so no control is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from flsim.attacks.membership import lira, rmia
from flsim.attacks.membership.attacked import FOLDER, LEVELS, Attacked, AttackHParams, attacked_model, column
from flsim.attacks.membership.candidates import log_probabilities
from flsim.attacks.membership.inference import CONFIDENCE, success
from flsim.attacks.membership.targets import members_of, never_trained
from flsim.attacks.membership.users import RECORDS, fresh_of
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.extensions import restrict_custom_code
from flsim.base.files import refuse_unwritable
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.statistics import RESAMPLES, auroc, roc
from flsim.data.corpus import Split
from flsim.data.records import Records
from flsim.data.withheld import Shadow, held_out
from flsim.results.seeds import are_of_one_length, named_apart
from flsim.results.sweeps import expanded, run_folders
from flsim.runs.folder import Run
from flsim.training.local import threads as threads_of_torch

LOSS = "loss"  # the attack without shadow models
FEWEST = 4  # smallest number of runs: a target and three shadow models


@dataclass(frozen=True, eq=False)
class Shadows:
    """The scores of fixed targets by all runs."""

    unit: Shadow
    targets: tuple[str, ...]  # N names, such as ``"train:17"``
    phi: Floats  # float64 [S, N], mean log-likelihood per token of each target in each run
    is_in: Flags  # bool [S, N], whether each run's training read the target
    population: Floats  # float64 [S, Z], the same score of users or records outside the training of all runs


class _Side(NamedTuple):
    """Records of targets, the target of each record, and names and indices of the targets among those of a split."""

    records: Records
    owners: Ints
    names: tuple[str, ...]
    positions: Ints


def infer_by_shadows(
    *runs: Path | str, records: int = 1_000, round: int | None = None, device: str = "cpu"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Attack runs with each other as shadow models, like `flsim membership --shadows`, and store rows in the runs.

    Args:
        runs: folders of runs with `data.shadow` and of sweeps of them; runs that differ only in their seeds attack each
            other; at least 4.
        records: largest number of targets, which are users or records, and of others outside all training.
        round: round of the attacked checkpoints; the newest of each run if not given.
        device: torch device, such as "cuda".

    Returns:
        The rows of `success_of_shadows`, a row for each setting and attack; and those of `counterfactual`, a row for
        each setting and target. Both begin with ``setting`` and ``unit``.

    Raises:
        InputError: there is no such run or checkpoint, or runs are not shadow models of each other.

    Examples:
        >>> attacks, targets = flsim.infer_by_shadows("runs/shadows-demo")                     # doctest: +SKIP
        >>> targets.sort_values("memorization").tail()                                         # doctest: +SKIP
    """
    paths = run_folders(expanded(runs))
    attacks, targets = [], []
    for setting, of_setting, of_targets in by_setting(paths, AttackHParams(records, round, device=device)):
        attacks.append(of_setting.assign(setting=setting))
        targets.append(of_targets.assign(setting=setting, unit=of_setting["unit"].iloc[0]))
    first = ["setting", "unit"]
    every, of_every = (pd.concat(tables, ignore_index=True) for tables in (attacks, targets))
    return every.set_index(first).reset_index(), of_every.set_index(first).reset_index()


def by_setting(paths: Sequence[Path], hparams: AttackHParams) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield each setting with its two tables, see `infer_by_shadows`, and store rows in the folders of its runs."""
    names, series = named_apart(paths), dict[str, list[Path]]()
    for path in paths:
        series.setdefault(names[path]["series"], []).append(path)
    for path in paths:
        refuse_unwritable(path, FOLDER)
    for alike in series.values():
        shadows = collect(alike, hparams.count, hparams.round, hparams.device)
        store(alike, shadows, hparams)
        yield names[alike[0]]["setting"], success_of_shadows(shadows), counterfactual(shadows)


def store(paths: Sequence[Path], shadows: Shadows, hparams: AttackHParams) -> None:
    """Store the success of LiRA and RMIA on the targets of each run; intervals resample targets."""
    scores, targets = leave_one_out(shadows), np.array(shadows.targets, object)
    for index, path in enumerate(paths):
        attacked = Attacked.open(path, hparams)
        # the presence of a user is more than the replacement of their data, which a ledger of users covers
        claim, protects = attacked.claim if shadows.unit == "record" else None, attacked.run.config.unit
        rows = []
        for name in (name for name in scores if name != LOSS):  # the loss is an attack on a single run
            known = np.isfinite(scores[name][index])
            is_in = shadows.is_in[index, known]
            if is_in.any() and not is_in.all():
                of_run = scores[name][index, known], is_in, targets[known]
                rows.append(success(name, shadows.unit, *of_run, attacked.run.config.seed, claim, protects))
        if rows:
            attacked.stored(rows)


@restrict_custom_code("architecture")
def collect(paths: Sequence[Path], count: int = 1_000, round_: int | None = None, device: str = "cpu") -> Shadows:
    """Score the same targets by the models of all runs, which differ only in their seeds.

    At most `count` targets, and others from the held-out and test users, are drawn independent of coins. A user is
    scored by at most 50 records, if possible those that no run trains on. Raises InputError for runs that are no shadow
    models.
    """
    runs = [Run.open(path) for path in paths]
    unit = _refuse_unlike(runs)
    corpus, share = runs[0].corpus, runs[0].config.data.user_holdout
    train = corpus.split("train")
    (outside, positions), *_ = never_trained(corpus)[0]
    if unit == "user":
        positions = np.unique(outside.owners(positions))
    drawn_from = (train, _candidates(train, unit, share)), (outside, positions)
    sides = [_targets(split, unit, share, count, candidates) for split, candidates in drawn_from]
    both = Records.joined([side.records for side in sides])
    owners = np.concatenate([sides[0].owners, len(sides[0].names) + sides[1].owners])
    words = np.diff(both.offsets)
    tokens = np.bincount(owners, words + corpus.layout.ends_with_eos(words))
    phi, is_in, rounds = [], [], dict[int, Path]()
    with threads_of_torch(1):
        for run in tracked("scoring shadow models", runs):
            state, model = attacked_model(run, round_, device)
            rounds[state.round] = run.path
            if not are_of_one_length(rounds):
                raise InputError(
                    f"{rounds[min(rounds)]} and {rounds[max(rounds)]}: models after rounds {min(rounds):,} and "
                    f"{max(rounds):,} cannot be shadow models of each other; name --round, or exclude unfinished runs"
                )
            sums = log_probabilities(model, both, corpus.layout).sum(1)
            phi.append(np.bincount(owners, sums) / tokens)
            read = members_of(run, state.round)
            is_in.append(np.isin(sides[0].positions, train.owners(read) if unit == "user" else read))
    split = len(sides[0].names)
    scores = np.array(phi)
    return Shadows(unit, sides[0].names, scores[:, :split], np.array(is_in), scores[:, split:])


def leave_one_out(shadows: Shadows) -> dict[str, Floats]:
    """Return the scores of each attack, float64 [S, N] by name; NaN if other runs have only one side of a target."""
    attacks = (LOSS, "LiRA online", "LiRA offline", "RMIA online", "RMIA offline")
    scores = {name: np.full(shadows.phi.shape, np.nan) for name in attacks}
    for run in range(len(shadows.phi)):
        others = np.arange(len(shadows.phi)) != run
        phi, of_others, is_in = shadows.phi[run], shadows.phi[others], shadows.is_in[others]
        known = is_in.any(axis=0) & ~is_in.all(axis=0)
        phi, of_others, is_in = phi[known], of_others[:, known], is_in[:, known]
        p, z, z_of_others = np.exp(of_others), np.exp(shadows.population[run]), np.exp(shadows.population[others])
        online, offline = rmia.online_ratios(z, z_of_others), rmia.offline_ratios(z, z_of_others, z_of_others < 0)
        values = (
            phi,
            lira.lira_online(phi, of_others, is_in),
            lira.lira_offline(phi, of_others, is_in),
            rmia.rmia_scores(rmia.online_ratios(np.exp(phi), p), online),
            rmia.rmia_scores(rmia.offline_ratios(np.exp(phi), p, is_in), offline),
        )
        for name, of_attack in zip(attacks, values, strict=True):
            scores[name][run, known] = of_attack
    return scores


def success_of_shadows(shadows: Shadows, seed: int = 0) -> pd.DataFrame:
    """Return a row for each attack over all pairs of a run and a target, with bootstraps over runs (shared models)."""
    rows = []
    for name, scores in leave_one_out(shadows).items():
        known = np.isfinite(scores)
        members = [scores[run, known[run] & shadows.is_in[run]] for run in range(len(scores))]
        others = [scores[run, known[run] & ~shadows.is_in[run]] for run in range(len(scores))]
        rng = stream(seed, "shadow bootstrap", name)
        draws = rng.integers(len(scores), size=(RESAMPLES, len(scores)))
        n_in, n_out = sum(map(len, members)), sum(map(len, others))
        row = {"unit": shadows.unit, "attack": name, "kind": "estimate", "shadows": len(scores) - 1}
        row |= {"n_in": n_in, "n_out": n_out, "confidence": CONFIDENCE}
        measures: dict[str, Callable[[Floats, Floats], float]] = {"auroc": auroc}
        measures |= {column("tpr", level): _rate(level) for level in LEVELS if level * n_out >= 1}
        for measure, of_scores in measures.items():
            resampled = [
                of_scores(np.concatenate([members[run] for run in draw]), np.concatenate([others[run] for run in draw]))
                for draw in draws
            ]
            name_, _, at = measure.partition("_at_")
            suffix = f"_at_{at}" if at else ""
            low, high = np.nanquantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
            row |= {measure: of_scores(np.concatenate(members), np.concatenate(others))}
            row |= {f"{name_}_low{suffix}": float(low), f"{name_}_high{suffix}": float(high)}
        rows.append(row)
    return pd.DataFrame(rows)


def counterfactual(shadows: Shadows) -> pd.DataFrame:
    """Return counterfactual memorization of each target: the mean score in runs with it minus that in runs without it.

    Zhang et al., "Counterfactual Memorization in Neural Language Models" (2021), equation 1, with the mean
    log-likelihood per token. NaN for a target of all runs or of no run. Columns: target, n_in, n_out (numbers of runs),
    memorization (nats per token) and its standard error.
    """
    (n_in, mean_in, squares_in), (n_out, mean_out, squares_out) = (
        lira.moments_of_side(shadows.phi, side) for side in (shadows.is_in, ~shadows.is_in)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        variances = [squares.sum(axis=0) / (n - 1) / n for squares, n in ((squares_in, n_in), (squares_out, n_out))]
    return pd.DataFrame(
        {
            "target": shadows.targets,
            "n_in": n_in,
            "n_out": n_out,
            "memorization": mean_in - mean_out,
            "standard_error": np.sqrt(variances[0] + variances[1]),
        }
    )


def _rate(level: float) -> Callable[[Floats, Floats], float]:
    return lambda members, others: roc(members, others).at(level).tpr if level * len(others) >= 1 else np.nan


def _refuse_unlike(runs: Sequence[Run]) -> Shadow:
    if len(runs) < FEWEST:
        raise InputError(f"{len(runs)} runs: shadow models need at least {FEWEST}; name a complete sweep")
    first = runs[0]
    unit = first.config.data.shadow
    if unit is None:
        raise InputError(f'{first.path}: trained on all users; set data.shadow = "user" or "record" for shadow models')
    for run in runs[1:]:
        if (run.series, run.corpus.digest) != (first.series, first.corpus.digest):
            raise InputError(
                f"{run.path}: this run cannot be a shadow model of {first.path}, because they differ in more than "
                "their seeds"
            )
    seeds = [run.config.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{first.path}: two runs have the same seed; name each seed once")
    return unit


def _candidates(split: Split, unit: Shadow, share: float) -> Ints:
    """Return the users with records, or the records that are not held out, of a split."""
    offsets = np.asarray(split.user_offsets)
    if unit == "user":
        return np.flatnonzero(np.diff(offsets))
    is_held = np.zeros(split.records, np.bool_)
    if share:
        for user, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            is_held[first + held_out(last - first, user, share)] = True
    return np.flatnonzero(~is_held)


def _targets(split: Split, unit: Shadow, share: float, count: int, candidates: Ints) -> _Side:
    """Draw targets of a split, the same for all runs on the corpus."""
    order = stream(0, "shadow targets", unit, split.folder.name).permutation(candidates)[:count]
    chosen = np.sort(order).astype(np.int64)
    name = split.folder.name
    if unit == "record":
        owners, names = np.arange(len(chosen)), tuple(f"{name}:{position}" for position in chosen.tolist())
        return _Side(split.records_at(chosen), owners, names, chosen)
    if share:
        parts = [fresh_of(split, user, share) for user in chosen.tolist()]
    else:
        ends = [split.user_offsets[user : user + 2].tolist() for user in chosen.tolist()]
        parts = [split.records_at(np.arange(first, min(last, first + RECORDS))) for first, last in ends]
    has_any = np.array([len(part) > 0 for part in parts], np.bool_)
    chosen, texts = chosen[has_any], [part for part in parts if len(part)]
    owners = np.repeat(np.arange(len(texts)), [len(part) for part in texts])
    empty = split.records_at(np.empty(0, np.int64))
    return _Side(Records.joined([empty, *texts]), owners, tuple(f"{name}:{user}" for user in chosen.tolist()), chosen)
