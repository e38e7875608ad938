"""Run folders and a sweep as training writes them, with numbers that tests of reports know."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log2, nan
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.base.rng import stream
from flsim.canaries.population import Partition
from flsim.privacy.ledger import PrivacyHParams
from flsim.results.rows import Row, write_rows
from flsim.runs.config import CentralConfig, Config, DataHParams, FederatedConfig, TrainingHParams, dump
from flsim.runs.config.custom_code import with_copies

GRID = tuple(product((0.1, 0.05), (0.5, 1.0)))
COUNT, ROUNDS, REFERENCES = 4, (10, 20, 30), 1_000
CEILING = log2(REFERENCES + 1)
CANARIES = [f"c{index:02d}" for index in range(len(GRID) * COUNT)]


@dataclass(frozen=True)
class Made:
    """A written sweep, and what its runs contain, by their names."""

    path: Path
    settings: dict[str, str]
    rs: dict[str, int]  # number of canaries memorized at the end
    exposure: dict[str, float]  # mean exposure at the end


def roster(seed: int, copies: Sequence[int] = ()) -> pd.DataFrame:
    """Return `COUNT` canaries per configuration; with `copies`, canaries with exact insertions and no probabilities."""
    pairs = [pair for pair in GRID for _ in range(COUNT)] if not copies else [(nan, nan)] * len(CANARIES)
    planted = (
        [copies[index * len(copies) // len(CANARIES)] for index in range(len(CANARIES))]
        if copies
        else [6] * len(CANARIES)
    )
    return pd.DataFrame(
        {
            "canary": CANARIES,
            "tokens": [[index + 1 + 50 * seed, 2, 3, 4, 5] for index in range(len(CANARIES))],
            "words": [["a", "b", "c", "d", "e"]] * len(CANARIES),
            "p_u": [p_u for p_u, _ in pairs],
            "p_e": [p_e for _, p_e in pairs],
            "planned_sharers": [2] * len(CANARIES),
            "sharers": [2] * len(CANARIES),
            "planned_insertions": planted,
            "insertions": [number - 1 for number in planted] if not copies else planted,
        }
    )


def write_run(
    folder: Path,
    config: Config | None = None,
    setting: str = "IID, FedAvg, b_u=4",
    memorized: int = 5,
    rounds: Sequence[int] = ROUNDS,
    copies: Sequence[int] = (),
    model: Mapping[str, float] | None = None,
    **about: Any,
) -> Path:
    """Write a run whose first `memorized` canaries end at the ceiling of exposure; other exposures are random."""
    seed = config.seed if config else 0
    (folder / "planted").mkdir(parents=True)
    roster(seed, copies).to_parquet(folder / "planted" / "roster.parquet")
    last = max(rounds, default=0)
    told: dict[str, Any] = {"name": folder.name, "setting": setting, "status": "completed", "reason": None}
    told |= {"round": last, "rounds": 30, "rounds_per_epoch": 10.0, "seed": seed, "series": setting} | about
    (folder / "run.json").write_text(json.dumps(told))
    if config:
        dump(with_copies(config, folder), folder / "config.toml")
    drawn = stream(seed, "report-test", memorized).random(len(CANARIES))
    for place, round_ in enumerate(rounds):
        rows = []
        for index, canary in enumerate(CANARIES):
            known = index < memorized * (place + 1) // len(rounds)
            bits = CEILING if known else float(8 * drawn[index] * (place + 1) / len(rounds))
            for metric, value in (("exposure", bits), ("rs", float(known)), ("bs", float(known and index % 2))):
                rows.append(Row(folder.name, round_, metric, canary, value))
        measured = {"references": REFERENCES, "accuracy": 0.1 + place / 50, "perplexity": 90.0 - place} | dict(
            model or {}
        )
        rows += [Row(folder.name, round_, metric, "", value) for metric, value in measured.items()]
        write_rows(folder, round_, rows)
    (folder / "rounds.jsonl").write_text("".join(f'{{"round": {r}, "seconds": 1.5}}\n' for r in range(1, last + 1)))
    return folder


def write_sweep(path: Path, corpus: Path) -> Made:
    """Write a sweep of FedAvg, DP-FedAvg, SGD, a diverged, a running and a missing run; FedAvg has published rows."""
    made = Made(path, {}, {}, {})
    listed: list[dict[str, Any]] = []

    def add(name: str, config: Config, grid: str, published: dict[str, Any] | None = None, **given: Any) -> None:
        setting = given.pop("setting", config.setting)
        write_run(path / "runs" / name, config, setting=setting, **given)
        axes = {"data.partition": config.data.partition}
        listed.append({"name": name, "grid": grid, "seed": config.seed, "axes": axes, "published": published})
        made.settings[name], made.rs[name] = setting, given.get("memorized", 5)

    partitions: tuple[Partition, ...] = ("iid", "non-iid")
    for partition, seed in product(partitions, (0, 1)):
        data, rs, bs = ("IID", 65, 58) if partition == "iid" else ("Non-IID", 40, 31)
        row: dict[str, Any] = {"table": "9", "data": data, "optimizer": "FedAvg", "canaries": 90}
        row |= {"rs": rs, "bs": bs, "accuracy": 0.246}
        federated = FederatedConfig(DataHParams(corpus, partition), seed, training=TrainingHParams(rounds=30, cohort=4))
        add(f"fedavg-{partition}-{seed}", federated, "fedavg", row, memorized=(7 if partition == "iid" else 3) + seed)
        if seed == 0:
            private = PrivacyHParams("dp", 0.5, 1.0)
            epsilons = {"epsilon paper": 18.8, "epsilon replace-one-rdp": 152.8, "delta": 1e-3}
            add(f"dp-{partition}", replace(federated, privacy=private), "dp", memorized=1, model=epsilons)
            add(f"sgd-{partition}", CentralConfig(DataHParams(corpus, partition)), "sgd", memorized=4)
    hot = FederatedConfig(DataHParams(corpus), training=TrainingHParams(rounds=30, cohort=6))
    add("hot", hot, "hot", status="diverged", reason="the model of round 10 is not finite", rounds=())
    late = FederatedConfig(DataHParams(corpus), training=TrainingHParams(rounds=30, cohort=8))
    add("late", late, "late", status="running", rounds=(10, 20))
    listed.append({"name": "waits", "grid": "waits", "seed": 0, "axes": {}, "published": None})
    session = {"began": "2026-01-02T03:04:05Z", "seconds": 512.3, "peak_memory": 2**31, "cores": 2, "at_once": 2}
    about = {
        "name": "table9",
        "title": "Memorization <by> cohort & partition",
        "question": "Do users’ own data memorize less?",
        "tier": "smoke",
        "about": "12 users instead of 392,000.",
        "source": "Thakkar et al. (2020), Table 9",
        "command": "flsim sweep table9.toml --out table9",
        "commands": [
            {"command": "flsim sweep table9.toml --out table9 --only fedavg", "runs": ["fedavg-iid-0", "fedavg-iid-1"]},
            {"command": "flsim sweep table9.toml --out table9", "runs": ["dp-iid"]},
        ],
        "versions": {"torch": "2.13.0", "flwr": "1.41.0"},
        "runs": listed,
        "sessions": [{**session, "trained": ["fedavg-iid-0"], "failed": {"hot": "its loss was absurd"}}],
    }
    (path / "sweep.json").write_text(json.dumps(about))
    return made
