"""The most that the canaries of a run can prove, whatever the run memorizes: all guesses of an audit are right."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flsim.attacks.audit.audit import ceiling, ceiling_of_coins
from flsim.attacks.forgetting.success import least_alpha
from flsim.canaries.spec import ALWAYS, CanaryHParams, configurations
from flsim.data.corpus import Split
from flsim.planning.scale import Users, row_name, trained_on
from flsim.planning.text import cell, number, table
from flsim.privacy.ledger import sound_convention
from flsim.privacy.sampling import Relation
from flsim.results.sweeps import WORLD
from flsim.runs.config import Config
from flsim.runs.sweeps.definition import Planned
from flsim.show.table import note

BOUNDS = (
    "Bounds are the largest lower bounds on epsilon of one unit (a user or a record) of one run that `flsim audit` can "
    "prove with 95% confidence. A result near a bound is limited by the number of canaries."
)
HALVED = (
    "Under add-or-remove-one a bound is half of the bound under replace-one: to replace a unit is to remove it and to "
    "add another one."
)
two_digits = "{:.2f}".format


@dataclass(frozen=True)
class Provable:
    """The largest lower bounds on epsilon of one unit that the canaries of equal rows can prove.

    `relation` is what neighbours of the run's ledger differ in, and "replace-one" without a ledger, as in an audit.
    Values that do not apply are None: bounds of coins without coins or with too few of them, values of canary users
    without these users, and alphas without windows. `note` is a sentence on what an epsilon is not about.
    """

    name: str = cell("Row, first of", is_number=False)
    rows: int = cell("rows", number)
    unit: str = cell("unit", is_number=False)
    canaries: int = cell("canaries", number, "Canaries: planted ones; with coins half of all, as is expected.")
    group: int = cell("sharers", number, "Sharers: largest expected number of units that share a canary.")
    epsilon: float = cell("ranks", two_digits, "Ranks: bound from ranks, at delta 0.")
    coins: float | None = cell("coins", two_digits, "Coins: bound from guesses of the coins, at the row's delta.")
    canary_users: float | None = cell(
        "users", two_digits, "Users: bound from guesses of the coins of canary users, at the row's delta."
    )
    delta: float | None = cell("delta", "{:.3g}".format)
    random_updates: float | None = cell(
        "random", "{:.2g}".format, "Random: updates of canary users for each update of a user; they cost utility."
    )
    alpha: float | None = cell(
        "alpha", two_digits, "Alpha: the least that `flsim forgetting` can show with a group of canaries of all seeds."
    )
    pooled_alpha: float | None = cell("pooled", two_digits, "Pooled: alpha with the canaries of a window (--pool).")
    relation: str = cell("neighbours", is_number=False)
    note: str = ""


def provable_of(planned: Sequence[Planned], train: Split) -> tuple[Provable, ...]:
    """Return what each row can prove in each world, once for all seeds and for equal rows.

    Rows without ranked canaries are omitted.

    Args:
        planned: the runs.
        train: the corpus' training users.
    """
    named: dict[str, Provable] = {}
    for run in planned:
        name = " ".join(filter(None, (row_name(run), str(run.axes.get(WORLD, "")))))
        canaries, is_ranked = run.config.canaries, not run.config.evaluation.utility_only
        if name not in named and is_ranked and canaries.source != "heldout" and configurations(canaries):
            seeds = len({other.config.seed for other in planned if row_name(other) == row_name(run)})
            named[name] = _provable(run.config, train, seeds)
    equal: dict[Provable, list[str]] = {}
    for name, provable in named.items():
        equal.setdefault(provable, []).append(name)
    return tuple(replace(provable, name=same[0], rows=len(same)) for provable, same in equal.items())


def least_alphas(canaries: CanaryHParams, seeds: int) -> tuple[float | None, float | None]:
    """Return the least alphas that can be shown by canaries with windows: by those of a group, and of a window.

    Args:
        canaries: the settings.
        seeds: number of runs of arm "in" that differ only in their seed.

    Returns:
        None for canaries without windows; the second is None if a window has no more canaries than a group.
    """
    windows = Counter(one.window for one in configurations(canaries))
    if canaries.arm == "out" or not windows or set(windows) == {ALWAYS}:
        return None, None
    group, window = 2 * (canaries.count * seeds // 2), 2 * (min(windows.values()) * seeds // 2)
    return least_alpha(group), least_alpha(window) if window > group else None


def _provable(config: Config, train: Split, seeds: int) -> Provable:
    split = trained_on(config, train)
    users, canaries, audit = Users.counted(split), config.canaries, config.canary_users
    groups = groups_of(config, users)
    planted = groups[::2] if canaries.coins else groups  # half of each configuration
    relation: Relation = "replace-one"
    delta = 0.0
    if config.privacy.mechanism == "dp":
        relation = sound_convention(config.sampler).relation
        delta = config.privacy.delta_for(config.protected(split))
    steps = 1 if relation == "replace-one" else 2  # to replace a unit is to remove it and to add another
    of_coins = ceiling_of_coins(groups, delta) if canaries.coins else None
    alpha, pooled_alpha = least_alphas(canaries, seeds)
    return Provable(
        name="",
        rows=1,
        unit=config.unit,
        canaries=len(planted),
        group=max(groups),
        epsilon=ceiling(planted, canaries.references(config.evaluation.references, split.layout.words)) / steps,
        coins=None if of_coins is None else of_coins / steps,
        canary_users=ceiling_of_coins([1] * audit.update_canaries, delta) if audit.canary_coins else None,
        delta=delta if canaries.coins or audit.canary_coins else None,
        random_updates=audit.random_updates(users.users) if audit.update_canaries else None,
        alpha=alpha,
        pooled_alpha=pooled_alpha,
        relation=relation,
        note=canaries.about_injections,
    )


def groups_of(config: Config, users: Users) -> list[int]:
    """Return the expected number of units that share each canary, at least 1, counted as an audit counts them.

    In an IID twin the copies of a canary lie with about as many synthetic users.
    """
    groups = []
    for one in configurations(config.canaries):
        insertions = one.p_u * one.p_e * users.records if one.copies is None else float(one.copies)
        is_sharers = config.unit == "user" and config.world != "iid" and one.copies is None
        expected = one.p_u * users.users if is_sharers else insertions
        if one.users and config.unit == "user":
            expected = one.users
        units = users.users if config.unit == "user" else users.records
        groups.append(min(max(1, round(expected)), units))
    return groups


def proof_table(rows: Sequence[Provable]) -> str:
    """Return the table of what an audit can prove at most."""
    halved = HALVED if any(row.relation == "add-or-remove-one" for row in rows) else ""
    notes = dict.fromkeys([BOUNDS, halved, *(row.note for row in rows)])
    return table(rows, "".join(map(note, filter(None, notes))))
