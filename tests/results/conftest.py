"""Fixtures that write run folders and sweeps as training leaves them, without checkpoints."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from helpers import Flsim
from ninety import PublishedRow, fedavg, of_ninety
from results.levels import measured as measured_at
from results.levels import planned_run, write_sweep

from flsim.results.rows import Row, RunResults, read_run, write_rows

MakeRun = Callable[..., Path]
MakeSeries = Callable[..., list[RunResults]]

GRID = tuple(product((1 / 5_000, 3 / 50_000, 1 / 50_000), (0.01, 0.1, 1.0)))


def canary_id(index: int) -> str:
    return f"c{index:02d}"


def roster(configurations: Sequence[tuple[float, float]], shift: int) -> pd.DataFrame:
    """Return a roster with one canary per configuration; `shift` changes the phrases."""
    count = len(configurations)
    return pd.DataFrame(
        {
            "canary": [canary_id(index) for index in range(count)],
            "tokens": [[index + 1 + shift, 2, 3, 4, 5] for index in range(count)],
            "words": [["a", "b", "c", "d", "e"]] * count,
            "p_u": [p_u for p_u, _ in configurations],
            "p_e": [p_e for _, p_e in configurations],
            **{f"{kind}{what}": [3] * count for kind in ("planned_", "") for what in ("sharers", "insertions")},
        }
    )


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder.

    `rounds` maps an evaluated round to {metric: one value per canary, or a number of the model}. There are `copies`
    canaries in each configuration of `grid`.
    """

    def make(
        rounds: Mapping[int, Mapping[str, Sequence[float] | float]] | None = None,
        name: str = "iid",
        grid: Sequence[tuple[float, float]] = GRID,
        copies: int = 1,
        shift: int = 0,
        **about: object,
    ) -> Path:
        folder = tmp_path / name
        (folder / "planted").mkdir(parents=True)
        configurations = [pair for pair in grid for _ in range(copies)]
        roster(configurations, shift).to_parquet(folder / "planted" / "roster.parquet")
        last = max(rounds, default=0) if rounds else 0
        described = {"name": name, "setting": "IID, FedAvg, b_u = 16", "status": "completed", "reason": None}
        (folder / "run.json").write_text(json.dumps({**described, "round": last, "rounds": last, **about}))
        for round_, metrics in (rounds or {}).items():
            rows = []
            for metric, values in metrics.items():
                if isinstance(values, int | float):
                    rows.append(Row(name, round_, metric, "", float(values)))
                else:
                    rows += [Row(name, round_, metric, canary_id(i), float(v)) for i, v in enumerate(values)]
            write_rows(folder, round_, rows)
        return folder

    return make


@pytest.fixture
def sweep_of(make_run: MakeRun, tmp_path: Path) -> Callable[..., Path]:
    """Write a sweep's folder: (grid, partition) -> what the run of each seed measured, None if it has not begun."""

    def make(
        series: Mapping[tuple[str, str], Sequence[Mapping[int, Mapping[str, Sequence[float] | float]] | None]],
        name: str = "sweep",
        published: Mapping[tuple[str, str], object] | None = None,
        tuned: str | None = None,
        **about: object,
    ) -> Path:
        (tmp_path / name / "runs").mkdir(parents=True)
        runs = []
        for (grid, partition), each in series.items():
            setting = f"{'IID' if partition == 'iid' else 'Non-IID'}, {grid}, b_u=40"
            for seed, rounds in enumerate(each):
                run = f"{grid}-{partition}-seed{seed}"
                runs.append(planned_run(run, grid, seed, partition, (published or {}).get((grid, partition))))
                if rounds is not None:
                    described = {"seed": seed, "series": f"{grid}-{partition}", "rounds_per_epoch": 1.0}
                    folder = make_run(rounds, name=run, shift=100 * seed, setting=setting, **(described | about))
                    folder.rename(tmp_path / name / "runs" / run)
        return write_sweep(tmp_path / name, runs, **({"tuned": tuned} if tuned else {}))

    return make


@pytest.fixture
def make_series(make_run: MakeRun) -> MakeSeries:
    """Write and read runs that differ in their seed: 0, 1, ... for each of `levels`.

    After `round` rounds, canary i has a seed's level + i / 2 bits. RS finds canaries of 4 bits and more, BS those of 6.
    Each seed has other phrases, which are the same in every series."""

    def make(
        levels: Sequence[float], name: str = "iid", round: int = 10, perplexity: float = 60, **about: object
    ) -> list[RunResults]:
        runs = []
        for seed, level in enumerate(levels):
            rounds = {round: measured_at(level) | {"perplexity": perplexity + seed}}
            given = {"seed": seed, "series": name, "rounds_per_epoch": 1.0} | about
            runs.append(read_run(make_run(rounds, name=f"{name}-{seed}", shift=100 * seed, **given)))
        return runs

    return make


@pytest.fixture
def flsim(flsim: Flsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Flsim:
    """Return a function that runs a command in the folder of the runs: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    return flsim


@pytest.fixture
def make(make_run: MakeRun) -> Callable[..., RunResults]:
    """Return a function that writes and reads a run of 90 canaries, of which RS and BS find given numbers."""

    def run(name: str, rs: int, bs: int | None = None, bits: float = 5.0, **about: object) -> RunResults:
        measured: dict[str, Sequence[float] | float] = {"rs": of_ninety(rs), "exposure": [bits] * 90}
        measured |= {"accuracy": 0.2, "perplexity": 70.0} | ({} if bs is None else {"bs": of_ninety(bs)})
        extra = about.pop("measured", {})
        assert isinstance(extra, dict)
        measured["references"] = 2_000_000  # section 4.1, as are canaries of 5 words and a prefix of 1
        folder = make_run({10: measured | extra}, name=name, copies=10, **{"setting": name, **about})
        (folder / "config.toml").write_text("[evaluation]\nprefix = 1\n")
        return read_run(folder)

    return run


@pytest.fixture
def four(make: Callable[..., RunResults]) -> dict[RunResults, PublishedRow]:
    """Return runs of two cohort sizes in both partitions; the paper has RS 66, 21, 69, 23 and BS 56, 0, 58, 1."""
    return {
        make("IID, FedAvg, b_u=4", 60, 20): fedavg("IID", 500),
        make("Non-IID, FedAvg, b_u=4", 40, 0): fedavg("Non-IID", 500),
        make("IID, FedAvg, b_u=8", 69, 20): fedavg("IID", 1000),
        make("Non-IID, FedAvg, b_u=8", 10, 20): fedavg("Non-IID", 1000),
    }
