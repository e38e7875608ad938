"""Benchmark of forgetting in theory: formulas of `experiments.theory` and simulations, for result-forgetting-theory.md.

Jagielski et al. (2022), section 5 and appendix D.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.theory.deterministic_order import BITS, measured_steps_until_equal, steps_until_equal
from experiments.theory.federated_means import FederatedMeans, accuracy, separation
from experiments.theory.k_means import KMeansExperiment
from flsim.base.progress import progress
from flsim.show.table import Column, markdown

TRIALS = 2_000  # of k-means on each side
STAGES = (0, 1, 2, 5, 10, 20, 50)  # later data sets
RATES = (0.01, 0.1)
RUNS = 100  # pairs in a known order
ROUNDS = (1, 2, 5, 10)
SEEDS = 5  # of federated runs on each side, each of `POSITIONS` repetitions
POSITIONS = 200
RATE = 0.025  # of local steps
MOVED = 56  # either way: 7 standard deviations of users apart
POPULATION = 1_000
BY_COHORT = ((2, 1), (8, 1), (32, 1))  # (cohort, local steps)
BY_STEPS = ((2, 1), (2, 4), (2, 16))


def settings() -> list[FederatedMeans]:
    """Return the federated settings, without repeats."""
    return [
        FederatedMeans(MOVED, RATE, steps, cohort, POPULATION, max(ROUNDS), POSITIONS)
        for cohort, steps in dict.fromkeys((*BY_COHORT, *BY_STEPS))
    ]


def bench_forgetting(seeds: int = SEEDS) -> dict[str, Any]:
    """Return what each theorem says and what its simulation gives, as values for JSON.

    Args:
        seeds: number of federated runs on each side of a setting.
    """
    with progress("forgetting", 2 + len(settings()), unit="simulations") as advance:
        k_means = clusters()
        advance(1)
        order = known_order()
        advance(2)
        means = []
        for number, setting in enumerate(settings(), 3):
            means.append(federated(setting, seeds))
            advance(number)
    return {"k_means": k_means, "order": order, "means": means}


def clusters() -> list[dict[str, Any]]:
    """Return the attack's rates after each number of later data sets."""
    rates = KMeansExperiment().rates(TRIALS, max(STAGES))
    points = 3 * KMeansExperiment().later
    return [
        {"points": stage * points, "true": float(true), "false": float(false), "success": float(1 + true - false) / 2}
        for stage, (true, false) in enumerate(rates)
        if stage in STAGES
    ]


def known_order() -> list[dict[str, Any]]:
    """Return after how many steps pairs of runs are equal in floats, by the formula and measured."""
    return [
        {
            "floats": kind,
            "rate": rate,
            "expected": steps_until_equal(rate, 2, bits=bits),
            "measured": np.sort(measured_steps_until_equal(rate, kind, RUNS)).tolist(),
        }
        for kind, bits in BITS.items()
        for rate in RATES
    ]


def federated(setting: FederatedMeans, seeds: int) -> dict[str, Any]:
    """Return separation and accuracy after rounds, by the formula and from runs of the platform."""
    pairs, expected = setting.pairs(seeds), setting.expected
    (measured, errors), shares = separation(pairs), accuracy(pairs)
    return {
        "cohort": setting.cohort,
        "steps": setting.steps,
        "distance": expected.distance,
        "repetitions": pairs.shape[-1],
        "rounds": [
            {
                "round": round_,
                "separation": expected.separation(round_),
                "measured_separation": float(measured[round_ - 1]),
                "standard_error": float(errors[round_ - 1]),
                "success": expected.accuracy(round_),
                "measured_success": float(shares[round_ - 1]),
            }
            for round_ in ROUNDS
        ],
    }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as tables in Markdown."""
    tables = k_means_table(measured["k_means"]), order_table(measured["order"]), means_table(measured["means"])
    return "\n".join(tables).rstrip()


def k_means_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of k-means."""
    points = Column("Later points", [f"{row['points']:,}" for row in rows])
    rates = {"Accuracy": "success", "True positives": "true", "False positives": "false"}
    return markdown([points], [[Column(head, [f"{row[name]:.1%}" for row in rows]) for head, name in rates.items()]])


def order_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of runs in a known order."""
    labels = [
        Column("Floats", [row["floats"] for row in rows], is_number=False),
        Column("eta", [f"{row['rate']:g}" for row in rows]),
    ]
    steps = [
        Column("Steps by the formula", [f"{row['expected']:,.0f}" for row in rows]),
        Column("Median", [f"{np.median(row['measured']):,.0f}" for row in rows]),
        Column("Least and most", [f"{min(row['measured']):,} to {max(row['measured']):,}" for row in rows]),
    ]
    return markdown(labels, [steps])


def means_table(settings: Sequence[dict[str, Any]]) -> str:
    """Return the table of federated means."""
    rows = [setting | row for setting in settings for row in setting["rounds"]]
    labels = [
        Column(head, [str(row[name]) for row in rows])
        for head, name in {"Cohort": "cohort", "Local steps": "steps", "k": "round"}.items()
    ]
    both = [f"{row['measured_separation']:.2f} ± {row['standard_error']:.2f}" for row in rows]
    units = [
        Column("d_k", [f"{row['separation']:.2f}" for row in rows]),
        Column("of runs", both),
        Column("Accuracy", [f"{row['success']:.1%}" for row in rows]),
        Column("of runs", [f"{row['measured_success']:.1%}" for row in rows]),
    ]
    return markdown(labels, [units])
