"""Attacks with further models: shadow models (LiRA and RMIA), and user inference."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy

from flsim.attacks.membership.candidates import blind_statistics, log_probabilities, logistic, members_of, never_trained
from flsim.attacks.membership.inference import (
    CONFIDENCE,
    FOLDER,
    LEVELS,
    Attacked,
    AttackHParams,
    attacked_model,
    blind_control,
    column,
    over_folders,
    success,
)
from flsim.attacks.result import Result
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.extensions import restrict_custom_code
from flsim.base.files import refuse_unwritable
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.statistics import RESAMPLES, auroc, roc
from flsim.data.corpus import Shadow, Split, held_out
from flsim.data.records import Records, author_of
from flsim.results.sweeps import are_of_one_length, expanded, named_apart, run_folders
from flsim.runs.folder import Run
from flsim.training.update import threads as threads_of_torch

# LiRA, the likelihood-ratio attack with shadow models.
#
# Carlini et al., "Membership Inference Attacks From First Principles" (2022), sections 4 and 5 and Algorithm 1. Shadow
# models are trained like the target, each on a random half of the data, with a point x (IN) or without it (OUT). The
# scores phi(x) of both kinds, for a sequence the mean log-likelihood, are assumed to be normal:
#
#     online     log N(phi; m_in, s_in^2) - log N(phi; m_out, s_out^2)
#     offline    Phi((phi - m_out) / s_out): the probability that a model without x scores below the target
#
# Shapes: S shadow models, N points. Larger scores mean membership.

FEW = 64  # shadow models, below which the paper uses one variance for all points
SMALLEST = 1e-30  # added to a standard deviation, which avoids a division by zero for equal scores


def lira_online(phi: Floats, shadows: Floats, is_in: Flags) -> Floats:
    """Return the log of the ratio of the two likelihoods, float64 [N], for scores `phi` [N] by the target model.

    `shadows` [S, N] are scores by the shadow models, which were trained on the points `is_in` [S, N].
    """
    (m_in, s_in), (m_out, s_out) = (_normal(shadows, side) for side in (is_in, ~is_in))
    return _log_density(phi, m_in, s_in) - _log_density(phi, m_out, s_out)


def lira_offline(phi: Floats, shadows: Floats, is_in: Flags) -> Floats:
    """Return the probability that a model without the point scores below the target, float64 [N]; see `lira_online`."""
    mean, deviation = _normal(shadows, ~is_in)
    return np.asarray(scipy.special.ndtr((phi - mean) / deviation))


def _normal(shadows: Floats, side: Flags) -> tuple[Floats, Floats]:
    """Return mean [N], NaN without a model, and deviation [N] of each point's scores by the models of a side."""
    counts, mean, squares = moments_of_side(shadows, side)
    if len(shadows) < FEW:
        variance = np.full(shadows.shape[1], squares.sum() / max(1, counts.sum()))
    else:
        variance = squares.sum(axis=0) / counts.clip(1)
    return mean, np.sqrt(variance) + SMALLEST


def moments_of_side(values: Floats, side: Flags) -> tuple[Ints, Floats, Floats]:
    """Return number [N] and mean [N] of each column's values of one side, and squared deviations [S, N], else 0."""
    counts = side.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(side, values, 0.0).sum(axis=0) / counts
    return counts, mean, np.where(side, (values - mean) ** 2, 0.0)


def _log_density(values: Floats, mean: Floats, deviation: Floats) -> Floats:
    return np.asarray(-(((values - mean) / deviation) ** 2) / 2 - np.log(deviation) - np.log(2 * np.pi) / 2)


# RMIA, the robust attack by pairwise likelihood ratios.
#
# Zarifzadeh, Liu and Shokri, "Low-Cost High-Power Membership Inference Attacks" (2024), section 3, as in its authors'
# ml_privacy_meter (modules/mia/attacks/rmia.py, commit e384af8), except that OUT models are chosen by their masks.
#
#     ratio(x) = p(x | theta) / p(x),        p(x): the mean of p(x | theta') over reference models theta'
#     score(x) = share of the population z with  ratio(x) / ratio(z) > gamma
#
# Offline, p(x) is approximated by (1 + a) / 2 p_out(x) + (1 - a) / 2, which assumes probabilities near 1 for members.
# For a sequence, p is therefore e to the mean log-likelihood per token.
#
# Shapes: S reference models, N points, Z points of a population that the target was not trained on.

GAMMA = 1.0
OFFLINE_A = 0.3  # to be tuned on a pair of reference models, never on the target


def online_ratios(target: Floats, references: Floats) -> Floats:
    """Return p(x | theta) over its mean by the reference models [S, N], of which half read x: float64 [N]."""
    return np.asarray(target / references.mean(axis=0))


def offline_ratios(target: Floats, references: Floats, is_in: Flags, a: float = OFFLINE_A) -> Floats:
    """Return p(x | theta) over p(x) by the models without x, as near as `a` (1: their mean), float64 [N]."""
    out = np.where(is_in, 0.0, references).sum(axis=0) / (~is_in).sum(axis=0)
    return np.asarray(target / ((1 + a) / 2 * out + (1 - a) / 2))


def rmia_scores(ratios: Floats, population: Floats, gamma: float = GAMMA) -> Floats:
    """Return the share of the population [Z] whose ratio is exceeded gamma times by that of each point [N]."""
    below = np.searchsorted(np.sort(gamma * population), ratios, side="left")
    return np.asarray(below / len(population), np.float64)


# User inference: detecting the users that took part in training from records that training did not read.
#
# [K] Kandpal et al., "User Inference Attacks on Large Language Models" (2023), section 3.
#
# For a user u with fresh records x_1, ..., x_m, from the distribution of u but not trained on, the attack computes
#
#     T_u = (1/m) sum_i [ log p(x_i) - log p_ref(x_i) ],                                        [K] equation 2
#
# which is larger if the model has learned the style of u.

RECORDS = 50  # largest number of fresh records of a user, as in [K]
NAME = "likelihood-ratio"


@dataclass(frozen=True, eq=False)
class FreshRecords:
    """Records of training users and of other users that training did not read."""

    records: Records
    owners: Ints  # int64 [N], the user of each record
    users: tuple[str, ...]  # U names, such as ``"train:17"``
    authors: tuple[str, ...]  # U authors of the users
    is_member: Flags  # bool [U], whether the user took part in training
    shares: Floats  # float64 [U], alpha_u: share of the user in the trained records

    def by_author(self) -> "FreshRecords":
        """Return the same records with users merged into authors."""
        authors, place = np.unique(np.array(self.authors, object), return_inverse=True)
        is_member = np.bincount(place, self.is_member) > 0
        names, shares = tuple(map(str, authors)), np.bincount(place, self.shares).astype(np.float64)
        return FreshRecords(self.records, place[self.owners], names, names, is_member, shares)


def user_statistics(log_probs: Floats, reference_log_probs: Floats, owners: Ints) -> Floats:
    """Return T_u of each user, [K] equation 2, from log-probabilities [N] of fresh records and their users [N]."""
    counts = np.bincount(owners)
    return np.asarray(np.bincount(owners, log_probs - reference_log_probs) / counts)


def fresh_records(run: Run, rounds: int, count: int, most: int = RECORDS) -> FreshRecords:
    """Draw users and their fresh records, as a function of the run's seed.

    Members are training users of whom training read a record. Others are users by authors who are not in training:
    held-out and test users, or training users whom the coins of `data.shadow` exclude. The same share of records is
    fresh for both. `count` limits members and others, `most` the records of a user. Raises InputError if there are too
    few.
    """
    share, train = run.config.data.user_holdout, run.corpus.split("train")
    if not share:
        raise InputError(
            f"{run.path}: the run trains on all records of its users, so there are no fresh records; set "
            "data.user_holdout, e.g. to 0.1"
        )
    read = members_of(run, rounds)
    members, sizes = np.unique(train.owners(read), return_counts=True)
    authors = {author_of(train.names[user]) for user in members.tolist()}
    if run.config.data.shadow == "user":  # users whom coins excluded and whose authors have no participating user
        outside = [user for user, name in enumerate(train.names) if author_of(name) not in authors]
        others = [(train, np.setdiff1d(np.array(outside, np.int64), getattr(run.train, "users", [])))]
    else:
        others = [(split, np.unique(split.owners(positions))) for split, positions in never_trained(run.corpus)[0]]
    fresh_of_users = list[tuple[Records, str, str, float]]()
    for split, users, is_in in [(train, members, True), *((split, users, False) for split, users in others)]:
        part = "in" if is_in else split.folder.name
        places = np.sort(stream(run.config.seed, "user inference", part).permutation(len(users))[:count])
        for user in users[places].tolist():
            if len(records := fresh_of(split, user, share, most)):
                of_read = sizes[np.searchsorted(members, user)] / len(read) if is_in else 0.0
                fresh_of_users.append((records, f"{split.folder.name}:{user}", author_of(split.names[user]), of_read))
    parts, names, of_authors, shares = zip(*fresh_of_users, strict=True) if fresh_of_users else ((),) * 4
    is_member = np.array(shares) > 0
    if not is_member.any() or is_member.all():
        raise InputError(
            f"{run.path}: there are fresh records of {int(is_member.sum())} users that took part, and of "
            f"{int((~is_member).sum())} other users, which is too few for an attack; set a larger "
            "data.user_holdout"
        )
    owner = np.repeat(np.arange(len(names)), [len(records) for records in parts])
    return FreshRecords(Records.joined(parts), owner, names, of_authors, is_member, np.array(shares))


def infer_users(
    *runs: Path | str,
    users: int = 1_000,
    round: int | None = None,
    reference: Path | str | None = None,
    delta: float | None = None,
    device: str = "cpu",
) -> pd.DataFrame:
    """Attack the membership of users like `flsim membership --unit user`, and store the rows in the run folders.

    The attack is that of Kandpal et al. (2023), section 3, on records of users that training did not read.

    Args:
        runs: run folders and folders of sweeps, with `data.user_holdout`; or folders that hold some.
        users: largest number of users that took part, and of others.
        round: round of the attacked checkpoint; the newest of each run if not given.
        reference: checkpoint of a run on another corpus with this vocabulary; by default the reference is the
            frequency of single words.
        delta: delta of the claim for the rows; that of each run if not given.
        device: torch device, such as "cuda".

    Returns:
        A row per run for users and, if the corpus cuts authors into several users, a row for authors, with the columns
        of `flsim.attacks.membership.inference.SCHEMA`.

    Raises:
        InputError: there is no such run or checkpoint, or a run has no fresh records.
        Diverged: a log-probability is not finite.

    Examples:
        >>> rows = flsim.infer_users("runs/holdout", users=500)                                # doctest: +SKIP
        >>> rows[["setting", "unit", "auroc", "control_auroc"]]                                # doctest: +SKIP
    """
    hparams = AttackHParams(users, round, None if reference is None else Path(reference), delta, device)
    return over_folders(runs, lambda path: attack_users(path, hparams))


@restrict_custom_code("architecture")
def attack_users(path: Path, hparams: AttackHParams) -> Result:
    with threads_of_torch(1):
        attacked = Attacked.open(path, hparams)
        run, claim = attacked.run, attacked.claim
        users = fresh_records(run, attacked.state.round, hparams.count)
        both = attacked.before_both(users.records, [str(place) for place in range(len(users.records))])
        trained, before = (one.log_probs.sum(1) for one in both)
        by_reference, blind = both[0].reference_log_probs.sum(1), blind_statistics(both[0])
    units = {"user": users}
    if len(set(users.authors)) < len(users.users):
        units["author"] = users.by_author()
    rows, verdicts = [], list[str]()
    for unit, side in units.items():
        scores, start = (user_statistics(values, by_reference, side.owners) for values in (trained, before))
        means = np.column_stack([user_statistics(column, np.zeros(len(column)), side.owners) for column in blind.T])
        control = blind_area(means, side.is_member, stream(run.config.seed, "user halves", unit))
        tested, claimed = (scores, side.is_member, side.authors), (claim, run.config.unit, steps_of(run, side))
        row = success(NAME, unit, *tested, run.config.seed, *claimed)
        controls, verdict = blind_control(control, control, row["n_in"], row["n_out"])
        verdicts.append(verdict)
        rows.append(row | controls | {"untrained_auroc": auroc(start[side.is_member], start[~side.is_member])})
    fresh = np.bincount(users.owners)
    note = f"Fresh records of a user: {fresh.min()} to {fresh.max()}, {fresh.mean():.1f} on average."
    return attacked.stored(rows, [verdicts[0], note])


def blind_area(statistics: Floats, is_member: Flags, rng: np.random.Generator) -> float:
    """Return the area of a logistic regression on the statistics [U, F], each half of the users by the other half."""
    is_first = np.zeros(len(is_member), np.bool_)
    for side in (np.flatnonzero(is_member), np.flatnonzero(~is_member)):
        is_first[rng.permutation(side)[: len(side) // 2]] = True
    areas = []
    for fit in (is_first, ~is_first):
        if is_member[fit].all() or not is_member[fit].any():
            return float("nan")  # too few users to learn from half of them
        scores = logistic(statistics[fit], is_member[fit])(statistics[~fit])
        areas.append(auroc(scores[is_member[~fit]], scores[~is_member[~fit]]))
    return float(np.mean(areas))


def steps_of(run: Run, side: FreshRecords) -> int | None:
    """Return the number of steps of the ledger that cover any of the complete users or authors.

    None for synthetic users of an IID partition, and for a ledger of records, which make no claim about a user.
    """
    if run.config.unit != "user" or run.config.data.partition == "iid":
        return None
    users_of = Counter(author_of(name) for name in run.corpus.split("train").names)
    return 1 if side.users != side.authors else max(users_of[author] or 1 for author in side.authors)


def fresh_of(split: Split, user: int, share: float, most: int = RECORDS) -> Records:
    """Return the fresh records of a user: held-out records, or as many of a user outside training."""
    first, last = split.user_offsets[user : user + 2].tolist()
    held = held_out(last - first, user, share)
    if len(held) > most:
        held = stream(0, "fresh records", user).choice(held, most, replace=False)
    return split.records_at(first + held)


# Attacks with shadow models: runs of several seeds, each trained on a random half of the users or records.
#
# Every run of `data.shadow` is the target once (leave-one-out). Coins decided membership, so no control is needed.

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
        online, offline = online_ratios(z, z_of_others), offline_ratios(z, z_of_others, z_of_others < 0)
        values = (
            phi,
            lira_online(phi, of_others, is_in),
            lira_offline(phi, of_others, is_in),
            rmia_scores(online_ratios(np.exp(phi), p), online),
            rmia_scores(offline_ratios(np.exp(phi), p, is_in), offline),
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
        pooled = np.concatenate(members), np.concatenate(others)
        rng = stream(seed, "shadow bootstrap", name)
        draws = rng.integers(len(scores), size=(RESAMPLES, len(scores)))
        n_in, n_out = map(len, pooled)
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
            if at:  # if no run has a hit, all draws are 0; the interval also covers independent members
                independent = roc(*pooled).at(float(at))
                low, high = min(low, independent.low), max(high, independent.high)
            row |= {measure: of_scores(*pooled)}
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
        moments_of_side(shadows.phi, side) for side in (shadows.is_in, ~shadows.is_in)
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
    first = runs[0]
    unit = first.config.data.shadow
    if unit is None:
        raise InputError(f'{first.path}: trained on all users; set data.shadow = "user" or "record" for shadow models')
    if len(runs) < FEWEST:
        raise InputError(f"shadow models need at least {FEWEST} runs, found {len(runs)}; name a complete sweep")
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
