"""Reports from simulated rows: runs whose canaries have exposures around a level that a test chooses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from flsim.report.gather import Gathered, RunView, Setting, SettingLine
from flsim.results.rows import SCHEMA, RunResults
from flsim.runs.config import (
    CentralConfig,
    CentralTrainingHParams,
    Config,
    DataHParams,
    FederatedConfig,
    TrainingHParams,
)

CANARIES = [f"c{index}" for index in range(8)]
REFERENCES = 1_000
CEILING = math.log2(REFERENCES + 1)
Level = Callable[[Config, int], float]


def run_of(config: Config, level: float, status: str = "completed", perplexity: float = 60.0) -> RunView:
    """Return a run whose canaries have exposures around a level, in bits, with a spread that sums to zero."""
    spread = np.linspace(-1, 1, len(CANARIES))
    bits = np.minimum(level + spread, CEILING)
    measured = [("exposure", canary, value) for canary, value in zip(CANARIES, bits, strict=True)]
    measured += [("rs", canary, float(value == CEILING)) for canary, value in zip(CANARIES, bits, strict=True)]
    measured += [("references", "", REFERENCES), ("perplexity", "", perplexity)]
    rows = pd.DataFrame([("run", 10, *row) for row in measured], columns=SCHEMA.names)
    roster = pd.DataFrame({"canary": CANARIES, "tokens": [[1]] * 8, "words": [["a"]] * 8, "sharers": [1] * 8})
    roster[["p_u", "p_e"]] = 0.1
    results = RunResults(
        f"{config.label}-{config.seed}", config.label, status, None, 10, 10, rows, roster, partition=config.partition,
        seed=config.seed, series=config.series, rounds_per_epoch=1.0,
    )  # fmt: skip
    return RunView(Path("runs") / config.label, results, config)


def gathered_of(configs: Sequence[Config], level: Level, seeds: int = 3) -> Gathered:
    """Return a report's runs: each configuration with all seeds, at the mean exposure that `level` returns."""
    lines: dict[str, SettingLine] = {}
    for config in configs:
        runs = [run_of(replace(config, seed=seed), level(config, seed)) for seed in range(seeds)]
        line = lines.setdefault(config.label, SettingLine(config.label))
        line.settings.append(Setting(config.setting, config.partition, runs))
    return Gathered([], list(lines.values()), [])


def table_1() -> list[Config]:
    """Return configurations in both partitions: SGD with two batch sizes, and FedAvg with three cohort sizes."""
    data = {partition: DataHParams(Path("corpus"), partition) for partition in ("iid", "non-iid")}
    sgd = [
        CentralConfig(data[partition], training=CentralTrainingHParams(steps=99, batch_size=size))
        for partition, size in product(data, (16, 32))
    ]
    federated = [
        FederatedConfig(data[partition], training=TrainingHParams(rounds=50, cohort=size))
        for partition, size in product(data, (4, 8, 16))
    ]
    return [*sgd, *federated]
