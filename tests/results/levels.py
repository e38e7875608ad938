"""Measures of a run with given exposures, tables of differences with a column per quantity, and folders of sweeps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.results.differences import Pair, differences, to_wide


def measured(level: float) -> dict[str, Sequence[float] | float]:
    """Return measures: canary i of 9 has `level` + i / 2 bits; RS finds those of 4 bits and more, BS those of 6."""
    bits = [level + index / 2 for index in range(9)]
    memorized = {metric: [float(each >= least) for each in bits] for metric, least in (("rs", 4), ("bs", 6))}
    return {"exposure": bits, **memorized, "references": 10_000, "accuracy": 0.2, "perplexity": 60 - level}


def beside_of(pairs: Sequence[Pair], **point: Any) -> pd.DataFrame:
    return to_wide(differences(pairs, **point))


def planned_run(name: str, grid: str, seed: int, partition: str, published: Any = None) -> dict[str, Any]:
    """Return a run as sweep.json describes it."""
    axes = {"data.partition": partition, "training.cohort": 40}
    return {"name": name, "grid": grid, "seed": seed, "axes": axes, "published": published}


def write_sweep(folder: Path, runs: Sequence[dict[str, Any]], **about: Any) -> Path:
    """Write the sweep.json of a folder."""
    words = dict.fromkeys(("question", "tier", "about", "command"), "-")
    file: dict[str, Any] = {"name": folder.name, "title": "Two grids", "source": None, "runs": runs}
    file |= {"versions": {}, "sessions": []}
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(file | words | about))
    return folder
