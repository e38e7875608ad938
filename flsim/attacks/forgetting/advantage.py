"""The advantage of canaries from training, and its remaining share at the end of training.

It is the log-perplexity of a canary in arm OUT minus that in arm IN after the same round, in nats: the log-likelihood
that training has added. Intervals are over seeds, each with the mean over the canaries of a group.
"""

from typing import Any

import numpy as np
import pandas as pd

from flsim.attacks.result import mean_interval

OF_GROUP = [f"{name}{end}" for name in ("advantage", "left") for end in ("", "_low", "_high")]
OF_PAIR = ["left_difference", "left_difference_low", "left_difference_high"]


def by_seed(observed: pd.DataFrame) -> pd.DataFrame:
    """Return the mean advantage of a group's canaries for each seed, and its remaining share.

    The rows are seeds with evaluations of both arms after the window's end: ``advantage``, nats, at the first such
    evaluation, and ``left``, that at the last one as a share of it. ``left`` is NaN without a second one, if there is
    no advantage, or if its interval over seeds contains 0.
    """
    known = _known(observed)
    ended = known[known["round"] >= known["last_round"].astype("float64")]
    means = ended.groupby(["seed", "round"])["advantage"].mean().groupby("seed")
    first, last = means.first(), means.last()
    seeds = pd.DataFrame({"advantage": first, "left": (last / first).where((means.size() > 1) & (first > 0))})
    is_unclear = mean_interval(seeds["advantage"])[1] <= 0
    return seeds.assign(left=np.nan) if is_unclear else seeds


def advantage_curve(observed: pd.DataFrame) -> list[tuple[float, float, float, float]]:
    """Return each evaluated round with the mean advantage after it and the ends of its 95% interval over seeds."""
    means = _known(observed).groupby(["round", "seed"])["advantage"].mean()
    return [(float(str(at)), *mean_interval(of_round)) for at, of_round in means.groupby("round")]


def of_group(seeds: pd.DataFrame) -> dict[str, float]:
    """Return the means of `by_seed` over seeds with their 95% intervals, Student's t, by the names in `OF_GROUP`."""
    return {
        f"{name}{end}": value
        for name in ("advantage", "left")
        for end, value in zip(("", "_low", "_high"), mean_interval(seeds[name]), strict=True)
    }


def of_pair(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, Any]:
    """Return the remaining share in group a minus that in group b, paired by seed, by the names in `OF_PAIR`."""
    return dict(zip(OF_PAIR, mean_interval(a["left"] - b["left"]), strict=True))


def _known(observed: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of canaries that were used and are measured in both arms, with their ``advantage``."""
    advantages = observed.assign(advantage=observed["nats_out"] - observed["nats_in"])
    return advantages[advantages["uses"] > 0].dropna(subset=["advantage"])
