"""The largest provable epsilon of a plan is that of the audit itself, where every guess is right."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import PRIVATE, Experiment, Trained

from flsim.attacks.audit import coins
from flsim.attacks.audit.audit import audit, ceiling_of_coins
from flsim.attacks.audit.subject import Coins, Subject, subject_of
from flsim.canaries.spec import CanaryHParams
from flsim.planning.plan import groups_of, least_alphas, proof_table, provable_of
from flsim.planning.scale import Users
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.sweeps.definition import Planned

COINS = ("canaries.coins=true", "canaries.p_u=[0.1]", "canaries.p_e=[0.2]", "canaries.count=30")
TEMPLATE = ("canaries.source='template'", "canaries.template='w4 {w1} w7'")  # fewer fillings than references
AXES: tuple[dict[str, Any], ...] = ({"batch": 4}, {"batch": 8})
USERS = Users(24, 192, 960, 40)  # of `Experiment`


def certain(subject: Subject, groups: Sequence[int], planted: Sequence[int]) -> Subject:
    """Return the run with these groups, as if its model ranked each planted canary first and each other one last."""
    sizes, coin = np.array(groups), np.zeros(len(groups), np.bool_)
    coin[::2] = True
    tossed = None
    if subject.coins is not None:
        tossed = Coins(np.where(coin, 1.0, subject.references + 1.0), coin, sizes)
    return replace(subject, ranks=np.ones(len(planted)), groups=np.array(planted), coins=tossed)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [((*COINS, "data.world='non-iid'"), 1), ((), 1), (PRIVATE, 2), (TEMPLATE, 1)],
    ids=["coins", "plain", "dp", "template"],
)
def test_a_plan_says_what_an_audit_of_perfect_ranks_proves(
    trained_here: Trained, settings: tuple[str, ...], steps: int
) -> None:
    """Half of the coins' canaries are planted; an epsilon of replacing is twice one of adding or removing."""
    run = trained_here(*settings)
    config = Run.open(run).config
    (bound,) = provable_of([Planned("run", "run", 0, {}, None, config)], USERS.split())
    groups = groups_of(config, USERS)
    subject = certain(subject_of(run), groups, groups[::2] if config.canaries.coins else groups)
    rows = {row["method"]: row for row in audit(subject).to_dict("records")}
    assert (subject.references < config.evaluation.references) == bool(config.canaries.template)
    assert rows["epsilon"]["detected"] == rows["epsilon"]["n_in"] == bound.canaries
    assert bound.epsilon == pytest.approx(rows["epsilon"]["low"] / steps, rel=1e-9)
    assert bound.epsilon > 0
    assert bound.group == rows["epsilon"]["group"]
    assert bound.relation == ("add-or-remove-one" if steps == 2 else "replace-one")
    if config.canaries.coins:
        assert bound.coins == pytest.approx(rows["epsilon, coins"]["low"] / steps, rel=1e-9)
    else:
        assert bound.coins is None
        assert "epsilon, coins" not in rows


def test_units_are_counted_as_an_audit_counts_them(experiment: Experiment) -> None:
    """24 users and 192 records at p_u = 0.2: 5 users, or 19 and 38 records, which are synthetic users of a twin."""
    configs = {world: load(experiment.config, (f"data.world='{world}'",)) for world in ("non-iid", "iid")}
    assert groups_of(configs["non-iid"], USERS) == [5] * 4
    assert groups_of(configs["iid"], USERS) == [19] * 2 + [24] * 2, "there are no more users"
    exact = replace(configs["non-iid"], canaries=CanaryHParams(insertions=(1, 7), count=1))
    assert groups_of(exact, USERS) == [1, 7]


def test_a_group_of_any_size_has_a_bound() -> None:
    """An IID twin's canary has hundreds of users: e^(users x epsilon) is no float."""
    few, many = (coins.epsilon_of_coins(100, 20, 20, 0.0, users=users) for users in (1, 500))
    assert many == pytest.approx(few / 500, rel=1e-5), "pure DP of a group is so many times one's"
    assert coins.epsilon_of_coins(100, 20, 20, 1e-5, users=500) < many


def test_a_plan_has_the_least_alpha_that_forgetting_can_show() -> None:
    """Beta quantiles: 0.626 for 48 canaries, 0.572 for 144. Arm OUT and canaries without windows have none."""
    windowed = CanaryHParams(insertions=(1, 4, 10), count=16, windows=((0.0, 0.5), (0.5, 0.6)))
    assert least_alphas(windowed, seeds=3) == pytest.approx((0.626, 0.572), abs=5e-4)
    assert least_alphas(CanaryHParams(injections=(0.5,), count=10), seeds=1)[1] is None
    assert least_alphas(replace(windowed, arm="out"), seeds=3) == least_alphas(CanaryHParams(), seeds=3) == (None, None)


def test_canary_users_have_a_bound_and_a_cost(experiment: Experiment) -> None:
    """40 users by coins, half of which take part: 20 random updates for 24 users."""
    settings = (*PRIVATE, "audit.update_canaries=40", "audit.canary_coins=true")
    planned = [Planned("run", "run", 0, {}, None, load(experiment.config, settings))]
    (row,) = provable_of(planned, USERS.split())
    assert row.random_updates == pytest.approx(20 / 24)
    assert row.delta is not None
    assert row.canary_users == ceiling_of_coins([1] * 40, row.delta)
    assert re.search(r"users *\|.*random", proof_table([row]))
