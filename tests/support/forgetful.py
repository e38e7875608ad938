"""Observations of canaries whose forgetting is known: the distance between arms decays exponentially."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from flsim.attacks.forgetting.measure import TYPES

REFERENCES = 20_000
START = 6.0  # standard deviations between the arms' scores at k = 0
DECAY = {1: 5.0, 4: 15.0, 10: 40.0}  # by copies: rounds after which a factor e is left


def simulated(
    canaries: int = 48,
    seeds: int = 3,
    decay: Mapping[int, float] = DECAY,
    window: tuple[int | None, int | None] = (None, 50),
    rounds: int = 150,
    every: int = 10,
    has_twin: bool = True,
    seed: int = 0,
) -> pd.DataFrame:
    """Return what `flsim.attacks.forgetting.measure` would of runs whose canaries were last used in rounds 30 to 50."""
    rng = np.random.default_rng(seed)
    rows = []
    for run in range(seeds):
        for copies, rate in decay.items():
            for index in range(canaries):
                last, clean = int(rng.integers(30, 51)), float(rng.normal(40, 3))
                for at in range(every, rounds + 1, every):
                    since = at - last if at >= last else math.nan
                    distance = START * math.exp(-max(at - last, 0) / rate)
                    members, others = clean + rng.normal(0, 1) - distance, clean + rng.normal(0, 1)
                    p = max(1 / (REFERENCES + 1), math.exp(-rng.exponential() - distance))
                    row = {"run": f"run-{run}", "seed": run, "series": "s", "setting": "Non-IID, FedAvg, b_u=20"}
                    row |= {"canary": f"c{copies}-{index:02d}", "copies": copies}
                    row |= {"first_round": window[0], "last_round": window[1], "round": at, "since": since}
                    row |= {"last_use": last, "uses": 3, "nats_in": members}
                    row |= {"p_in": p, "bits_in": -math.log2(p)}
                    if has_twin:
                        q = rng.uniform(1 / (REFERENCES + 1), 1)
                        row |= {"clean": clean, "clean_round": window[1], "nats_out": others, "p_out": q}
                        row |= {"bits_out": -math.log2(q)}
                        row |= {"score_in": clean - members, "score_out": clean - others}
                    rows.append(row)
    return pd.DataFrame(rows).reindex(columns=list(TYPES)).astype(TYPES)
