"""Amount of training of each row of a plan: how far its learning rates can carry the weights, and with which utility.

A model that is trained less memorizes less. Two rows compare as published ones do where their amounts are the same
share of the published amounts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from flsim.data.corpus import Split
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, of_model
from flsim.planning.scale import row_name, trained_on
from flsim.results.sweeps import WORLD, Sweep, is_sweep, read_sweep
from flsim.sweeps.definition import Planned

UTILITY: Quantity = next(quantity for quantity in of_model(QUANTITIES.values()) if quantity.is_log)


@dataclass(frozen=True)
class Amount:
    """The amount of training of a row, which is the same with all seeds.

    Attributes:
        name: the row's name, as `flsim.planning.scale.row_name` gives it.
        rate_steps: sum of learning rates over the steps that follow each other, by `Config.rate_steps`; None with a
            user's own server optimizer.
        epochs: number of passes over all records.
        utility: perplexity by world ("iid", "non-iid", or "" for neither), as far as known.
        world: "iid" or "non-iid" where the row's worlds have rates of their own; None where the amount is of both.
    """

    name: str
    rate_steps: float | None
    epochs: float
    utility: Mapping[str, float] = field(default_factory=dict)
    world: str | None = None


def amounts_of(
    rows: Mapping[str, Sequence[Planned]], train: Split, utility: Mapping[str, Mapping[str, float]] | None = None
) -> tuple[Amount, ...]:
    """Return the amount of each row, or of each of its worlds where they have rates of their own.

    Args:
        rows: the runs of each row, at least one.
        train: the training users.
        utility: by row and world.
    """
    amounts = []
    for name, runs in rows.items():
        known = (utility or {}).get(name, {})
        of_worlds = {str(run.axes.get(WORLD, "")): _amount(name, run, train) for run in reversed(runs)}
        if len({(amount.rate_steps, amount.epochs) for amount in of_worlds.values()}) == 1:
            amounts.append(replace(next(iter(of_worlds.values())), utility=known))
            continue
        for world in sorted(of_worlds):
            utility_there = {world: known[world]} if world in known else {}
            amounts.append(replace(of_worlds[world], utility=utility_there, world=world))
    return tuple(amounts)


def _amount(name: str, run: Planned, train: Split) -> Amount:
    split = trained_on(run.config, train)
    epochs = run.config.rounds_over(split) / run.config.rounds_per_epoch(split)
    return Amount(name, run.config.rate_steps(split), epochs)


def published_utility(rows: Mapping[str, Sequence[Planned]]) -> dict[str, dict[str, float]]:
    """Return the published perplexity by row and world, of rows that stand for published ones."""
    utility: dict[str, dict[str, float]] = {}
    for name, runs in rows.items():
        for run in runs:
            value = (run.published or {}).get(UTILITY.name)
            if isinstance(value, int | float):
                utility.setdefault(name, {})[str(run.axes.get(WORLD, ""))] = float(value)
    return utility


def measured_utility(sweep: Sweep) -> dict[str, dict[str, float]]:
    """Return the perplexity of a sweep's completed runs at their ends, by row and world: the mean over seeds."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in sweep.runs:
        results = run.results
        if results is None or results.status != "completed" or not results.evaluated:
            continue
        value = results.of_model(UTILITY.name, results.evaluated[-1])
        if value is not None:
            worlds = values.setdefault(row_name(run), {})
            worlds.setdefault(str(run.axes.get(WORLD, "")), []).append(value)
    return {name: {world: float(np.mean(seeds)) for world, seeds in worlds.items()} for name, worlds in values.items()}


def sweep_of(folder: Path | None, name: str, tier: str | None) -> Sweep | None:
    """Return the sweep whose results belong to a plan: the one named, or else the one in runs/NAME-TIER; or None."""
    path = folder or Path("runs") / f"{name}-{tier}"
    if not is_sweep(path):
        return None
    sweep = read_sweep(path)
    return sweep if (sweep.name, sweep.tier) == (name, tier) else None


def beside(ours: Sequence[Amount], theirs: Sequence[Amount]) -> list[Amount] | None:
    """Return the published amount of each of our amounts; None if the rows are not the same."""
    by_name = {amount.name: amount for amount in theirs}
    is_alike = len(by_name) == len(theirs) and {*by_name} == {amount.name for amount in ours}
    return [_in_world(by_name[amount.name], amount.world) for amount in ours] if is_alike else None


def _in_world(amount: Amount, world: str | None) -> Amount:
    if world is None:
        return amount
    return replace(amount, utility={name: value for name, value in amount.utility.items() if name == world})


def shares_of(ours: Sequence[Amount], theirs: Sequence[Amount]) -> list[float | None]:
    """Return the shares of the published amounts, one beside another; None where one of them is not known."""
    return [
        amount.rate_steps / other.rate_steps if amount.rate_steps is not None and other.rate_steps else None
        for amount, other in zip(ours, theirs, strict=True)
    ]
