"""The largest epsilon that `flsim audit` of a run can prove, whatever the run memorizes: all guesses are right."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flsim.audits.audit import ceiling, ceiling_of_coins
from flsim.canaries.spec import ALWAYS, CanaryHParams, configurations
from flsim.data.corpus import Split
from flsim.forgetting.success import least_alpha
from flsim.planning.scale import Users, trained_on
from flsim.privacy.ledger import Unit, sound_convention
from flsim.privacy.sampling import Relation
from flsim.results.sweeps import WORLD
from flsim.runs.config import Config
from flsim.sweeps.definition import Planned


@dataclass(frozen=True)
class Provable:
    """The largest lower bounds on epsilon of one unit that the canaries of a run can prove.

    Attributes:
        name: the run's row, with its world.
        unit: "user" or "record".
        relation: what neighbours of the run's ledger differ in; "replace-one" without a ledger, as in an audit.
        canaries: number of planted canaries; with coins half of all, as is expected.
        group: expected number of units that share a canary, of the configuration with the most of them.
        epsilon: bound from ranks, at delta 0.
        coins: bound from guesses of coins, at `delta`; None without coins, or where they are too few.
        delta: delta of `coins`, and of `canary_users`.
        canary_users: bound from guesses of the coins of canary users; None where no coins decide on them.
        cost: a sentence on what canary users cost; empty without any.
        note: a sentence on what an epsilon is not about; empty where it is about all who train.
        forgetting: a sentence on the least alpha that `flsim forgetting` can show; empty without windows.
    """

    name: str
    unit: Unit
    relation: Relation
    canaries: int
    group: int
    epsilon: float
    coins: float | None
    delta: float
    canary_users: float | None = None
    cost: str = ""
    note: str = ""
    forgetting: str = ""


def provable_of(planned: Sequence[Planned], names: Callable[[Planned], str], train: Split) -> tuple[Provable, ...]:
    """Return what each row can prove in each world, once for all seeds; nothing of rows whose canaries have no ranks.

    Args:
        planned: the runs.
        names: returns the name of a run's row.
        train: the corpus' training users.
    """
    rows: dict[str, Provable] = {}
    for run in planned:
        name = " ".join(filter(None, (names(run), str(run.axes.get(WORLD, "")))))
        canaries, is_ranked = run.config.canaries, not run.config.evaluation.utility_only
        if name not in rows and is_ranked and canaries.source != "heldout" and configurations(canaries):
            rows[name] = _provable(name, run.config, train)
            seeds = len({other.config.seed for other in planned if names(other) == names(run)})
            rows[name] = replace(rows[name], forgetting=least_alphas(run.config.canaries, seeds))
    return tuple(rows.values())


def least_alphas(canaries: CanaryHParams, seeds: int) -> str:
    """Return a sentence on the least alpha that groups of canaries with windows can show; empty for other canaries.

    Args:
        canaries: the settings.
        seeds: number of runs of arm "in" that differ only in their seed.
    """
    windows = Counter(one.window for one in configurations(canaries))
    if canaries.arm == "out" or not windows or set(windows) == {ALWAYS}:
        return ""
    group, window = 2 * (canaries.count * seeds // 2), 2 * (min(windows.values()) * seeds // 2)
    pooled = f", and below {least_alpha(window):.2f} for the {window:,} of a window (--pool)" if window > group else ""
    return (
        f"`flsim forgetting` cannot show an alpha below {least_alpha(group):.2f} for the {group:,} canaries of a group "
        f"in {seeds} seed{'s' * (seeds != 1)}{pooled}."
    )


def _provable(name: str, config: Config, train: Split) -> Provable:
    split = trained_on(config, train)
    users = Users.counted(split)
    groups, has_coins = groups_of(config, users), config.canaries.coins
    planted = groups[::2] if has_coins else groups  # half of each configuration
    relation: Relation = "replace-one"
    delta = 0.0
    if config.privacy.mechanism == "dp":
        relation = sound_convention(config.sampler).relation
        delta = config.privacy.delta_for(config.protected(split))
    steps = 1 if relation == "replace-one" else 2  # to replace a unit is to remove it and to add another
    audit = config.canary_users
    of_coins = ceiling_of_coins(groups, delta) if has_coins else None
    return Provable(
        name,
        config.unit,
        relation,
        len(planted),
        max(groups),
        ceiling(planted, config.canaries.references(config.evaluation.references, split.layout.words)) / steps,
        None if of_coins is None else of_coins / steps,
        delta,
        ceiling_of_coins([1] * audit.update_canaries, delta) if audit.canary_coins else None,
        audit.cost(users.users) if audit.update_canaries else "",
        config.canaries.about_injections,
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
