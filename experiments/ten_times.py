"""Summary of Federated Averaging at ten times the demo's scale, from the stored measurements.

    python -m experiments.local_runs ten-times --out runs/ten-times      # trains and evaluates the runs
    python -m experiments.ten_times                                      # prints the tables of docs/result-ten-times.md

The settings are those of the tier "ten-times" of `four-settings.toml`: 4,000 users, the paper's model, 628 rounds of 51
users. Directions that were stated before the runs. Each is tested over seeds, by a two-sided t test of paired
differences at 5%:

1. Canaries of IID data have a higher mean exposure than those of non-IID data after 8 epochs, at the learning rates
   that were searched for each partition (0.3 and 0.2).
2. They also have a higher mean exposure at learning rates with which both partitions end at about the same perplexity
   (0.19 and 0.2).
"""

from pathlib import Path

import pandas as pd
from scipy import stats

RESULTS = Path(__file__).parent / "results" / "ten-times.parquet"
NON_IID = ("non-iid", 0.2)
COLUMNS = ["exposure", "space_exposure", "rs", "bs", "accuracy", "perplexity"]


def summary(rows: pd.DataFrame) -> str:
    """Return means by partition, learning rate and round, and differences between the partitions over seeds.

    Args:
        rows: columns partition, learning_rate, seed, round, metric, canary and value.
    """
    settings = ["partition", "learning_rate"]
    means = rows.groupby([*settings, "round", "seed", "metric"])["value"].mean().unstack("metric")[COLUMNS]
    by_round = means.groupby([*settings, "round"])
    lines = [by_round.mean().round(3).assign(seeds=by_round.size()).to_string(), ""]
    earlier, last = sorted(rows["round"].unique())
    compared = [(0.3, earlier, earlier), (0.3, last, last), (0.3, earlier, last), (0.19, last, last)]
    for rate, iid_round, non_iid_round in compared:
        for quantity in COLUMNS:
            by_seed = means[quantity].unstack("seed")
            iid, non_iid = by_seed.xs(("iid", rate, iid_round)), by_seed.xs((*NON_IID, non_iid_round))
            if (text := _interval(iid - non_iid)) is not None:
                name = f"IID at {rate}, round {iid_round}, minus non-IID, round {non_iid_round}: {quantity}"
                lines.append(f"{name} {text}")
    return "\n".join(lines)


def _interval(differences: pd.Series) -> str | None:
    """Return the mean over seeds with its 95% interval and p (Student's t), if there are two seeds at least."""
    values = differences.dropna().to_numpy()
    if len(values) < 2:
        return None
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return f"{values.mean():+.3f} ({low:.3f} to {high:.3f}), p = {test.pvalue:.2g}, {len(values)} seeds"


if __name__ == "__main__":
    print(summary(pd.read_parquet(RESULTS)))  # noqa: T201
