"""User inference: detecting the users that took part in training from records that training did not read.

[K] Kandpal et al., "User Inference Attacks on Large Language Models" (2023), section 3.

For a user u with fresh records x_1, ..., x_m, from the distribution of u but not trained on, the attack computes

    T_u = (1/m) sum_i [ log p(x_i) - log p_ref(x_i) ],                                        [K] equation 2

which is larger if the model has learned the style of u.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from flsim.attacks.membership.attacked import CONFOUNDED, Attacked, AttackHParams, over_folders
from flsim.attacks.membership.built_in import blind_statistics, logistic
from flsim.attacks.membership.inference import success
from flsim.attacks.membership.targets import members_of, never_trained
from flsim.attacks.result import Result
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.extensions import restrict_custom_code
from flsim.base.rng import stream
from flsim.base.statistics import auroc
from flsim.data.corpus import Split
from flsim.data.records import Records, author_of
from flsim.data.withheld import held_out
from flsim.runs.folder import Run
from flsim.training.local import threads as threads_of_torch

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
        of `flsim.attacks.membership.attacked.SCHEMA`.

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
    rows = []
    for unit, side in units.items():
        scores, start = (user_statistics(values, by_reference, side.owners) for values in (trained, before))
        means = np.column_stack([user_statistics(column, np.zeros(len(column)), side.owners) for column in blind.T])
        control = blind_area(means, side.is_member, stream(run.config.seed, "user halves", unit))
        tested, claimed = (scores, side.is_member, side.authors), (claim, run.config.unit, steps_of(run, side))
        row = success(NAME, unit, *tested, run.config.seed, *claimed)
        controls = {
            "control_auroc": control,
            "is_confounded": control > CONFOUNDED,
            "untrained_auroc": auroc(start[side.is_member], start[~side.is_member]),
        }
        rows.append(row | controls)
    fresh = np.bincount(users.owners)
    note = f"Fresh records of a user: {fresh.min()} to {fresh.max()}, {fresh.mean():.1f} on average."
    return attacked.stored(rows, [note])


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
