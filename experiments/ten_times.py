"""Federated Averaging at ten times the demo's scale on one GPU: a search of learning rates, then pairs of runs.

    python -m experiments.ten_times --out runs/ten-times --seconds 3600
    python -m experiments.ten_times --summary experiments/results/ten-times.parquet     # of the stored measurements

The settings are those of the tier "ten-times" of `four-settings.toml`: 4,000 users, the paper's model, 628 rounds of 51
users. Stage 1 trains one run for each partition (IID, non-IID) and each learning rate of `GRID`, on another corpus and
with a seed that is not reported. It chooses a learning rate for each partition by `chosen`. Stage 2 trains one run of
each partition for every seed from 0 to 9, and evaluates it after 6 and 8 epochs. Run folders are those of `flsim run`.

Directions that were stated before the first run, each tested over seeds (t test of paired differences, two-sided, 5%):

1. Canaries of IID data have a higher mean exposure than those of non-IID data after 8 epochs.
2. They have a higher mean exposure at equal perplexity, too.

The script needs torch, Triton, numpy, pandas, pyarrow and pydantic, but neither Ray nor Flower. Several processes share
the GPU, because a cohort of 51 users fills less than half of it; start NVIDIA MPS before, so that their kernels run at
the same time. Each finished run is added to the archives in `--out`, so an end at any time loses unfinished runs only.
"""

import argparse
import json
import math
import tarfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

from flsim.algorithms import checkpoint
from flsim.base.errors import Diverged
from flsim.base.files import write_json
from flsim.base.progress import say
from flsim.data.synthetic import make_synthetic
from flsim.measures.built_in import PERPLEXITY
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.runs.sweeps.definition import load, planned_runs

SWEEP, TIER = Path(__file__).parent / "four-settings.toml", "ten-times"
GRID = {"iid": (0.2, 0.25, 0.3, 0.36), "non-iid": (0.15, 0.2, 0.25, 0.3)}
TUNING_SEED, TUNING_CORPUS_SEED = 1_000, 1  # never reported
SEEDS = range(10)
MARGIN = 1.2  # factor between a learning rate at the edge of stability and the one that is used
KEPT_PAIRS = 5  # of final checkpoints, for measures that take too long here
QUICK = (
    "model.embedding=8", "model.units=8", "training.epochs=2", "canaries.count=1", "evaluation.references=100",
    "evaluation.test_users=2",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run to train.

    Attributes:
        folder: the run folder; a run that was begun there is continued.
        corpus: the folder of the corpus.
        partition: "iid" or "non-iid".
        rate: the learning rate of local training.
        seed: the seed of the run.
        is_search: whether only the utility of the last round is measured.
        device: torch device.
        overrides: further settings, as ``section.key=value``.
        until: time (`time.time`) after which the run is stopped, with a checkpoint.
    """

    folder: Path
    corpus: Path
    partition: str
    rate: float
    seed: int
    is_search: bool
    device: str
    overrides: tuple[str, ...]
    until: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        partition, rate, seed, is_search: as in `Job`.
        status: "completed", "diverged" or "interrupted".
        rounds: number of completed rounds.
        perplexity: perplexity on test users after the last round; infinite if the run diverged, NaN if interrupted.
        training_seconds: seconds of training, while other runs trained too.
        evaluation_seconds: seconds of evaluations.
    """

    partition: str
    rate: float
    seed: int
    is_search: bool
    status: str
    rounds: int
    perplexity: float
    training_seconds: float
    evaluation_seconds: float


def train(job: Job) -> Outcome:
    """Train and evaluate a run in a separate process."""
    if time.time() > job.until:
        raise TimeoutError(f"{job.folder.name}: began too late; raise --seconds")
    torch.set_num_threads(2)
    overrides = [f"local.learning_rate={job.rate}", *job.overrides]
    (entry,) = (
        entry
        for entry in planned_runs(
            load(SWEEP), load(SWEEP).tiers[TIER], job.corpus, str(SWEEP), [job.seed], ["fedavg"], overrides
        )
        if entry.axes["data.partition"] == job.partition
    )
    run = Run.open(job.folder) if job.folder.exists() else Run.create(entry.config, job.folder)
    state, status, perplexity, evaluating = run.latest_state(), "completed", math.nan, 0.0
    training = run.federated.training_of(run.users, run.rounds, job.device)
    began = time.time()
    try:
        for round_ in training.rounds(state, run.rounds, training.send_in_process()):
            state, total = round_.state, round_.total
            run.log_round(round=state.round, loss=total.counts.loss / total.counts.tokens, users=total.counts.users)
            if job.is_search and state.round < run.rounds:
                continue
            if run.is_evaluated_at(state.round) and 2 * state.round > run.rounds:
                path, before = run.save(state), time.time()
                rows = evaluate_checkpoint(run.path, path, job.device, also=(), utility_only=job.is_search)
                perplexity = next(row.value for row in rows if row.metric == PERPLEXITY.name)
                evaluating += time.time() - before
            elif time.time() > job.until:
                run.save(state)
                status, perplexity = "interrupted", math.nan
                break
        run.mark("completed" if status == "completed" else "interrupted")
    except Diverged as error:
        run.mark("diverged", str(error))
        status, perplexity = "diverged", math.inf
    training_seconds = time.time() - began - evaluating
    return Outcome(
        job.partition, job.rate, job.seed, job.is_search, status, state.round, perplexity, training_seconds, evaluating
    )


def chosen(perplexities: Mapping[float, float]) -> float:
    """Return the learning rate with the lowest perplexity, or one with a margin if stability is the limit.

    If the next higher rate diverged, or there is none, the limit is stability or unknown. Then the rate is the highest
    one that is lower than the best one by the factor `MARGIN` at least, or the lowest rate.

    Args:
        perplexities: the perplexity by learning rate; infinite for a run that diverged.

    Examples:
        >>> chosen({0.2: 150.0, 0.25: 130.0, 0.3: 140.0}), chosen({0.2: 150.0, 0.25: 130.0, 0.3: math.inf})
        (0.25, 0.2)
    """
    rates = sorted(perplexities)
    best = min(rates, key=lambda rate: perplexities[rate])
    higher = [rate for rate in rates if rate > best]
    if higher and math.isfinite(perplexities[higher[0]]):
        return best
    return max((rate for rate in rates if rate * MARGIN <= best * (1 + 1e-9)), default=rates[0])


def main() -> None:
    """Train the runs that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m experiments.ten_times", description=(__doc__ or "").split("\n")[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="folder of outcomes, archives and run folders")
    task.add_argument("--summary", type=Path, metavar="FILE", help="only summarize the measurements of a Parquet file")
    parser.add_argument("--runs", type=Path, help="folder of run folders (default: in --out)")
    parser.add_argument("--corpus", type=Path, help="corpus of the tier; made if it does not exist")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8, help="runs that train at the same time (default: 8)")
    parser.add_argument("--seconds", type=float, default=3600, help="time for everything (default: 3600)")
    parser.add_argument("--rate", type=float, help="learning rate for both partitions; omits the search")
    parser.add_argument("--quick", action="store_true", help="tiny corpus and model, which only try the script")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary(pd.read_parquet(arguments.summary)))  # noqa: T201
        return
    until, runs = time.time() + arguments.seconds, arguments.runs or arguments.out
    corpora = {seed: arguments.out / f"corpus-{seed}" for seed in (0, TUNING_CORPUS_SEED)}
    corpora[0] = arguments.corpus or corpora[0]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (runs / "search").mkdir(parents=True, exist_ok=True)
    overrides = tuple(QUICK if arguments.quick else ()) + tuple(arguments.set)
    outcomes: list[Outcome] = []

    def follow(futures: Iterable[Future[Outcome]]) -> list[Outcome]:
        """Record outcomes as they come; a failed run is reported and does not end the others."""
        done = []
        for future in as_completed(futures):
            if error := future.exception():
                say(f"a run failed: {type(error).__name__}: {error}")
                continue
            done.append(future.result())
            say(json.dumps(asdict(future.result())))
            outcomes.append(future.result())
            write_json(arguments.out / "outcomes.json", {"outcomes": [asdict(outcome) for outcome in outcomes]})
            _archive(runs, arguments.out)
        return done

    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        makers = [
            pool.submit(_make, path, seed, arguments.quick) for seed, path in corpora.items() if not path.exists()
        ]
        for maker in makers:
            maker.result()
        common = (arguments.device, overrides, until)

        def job(partition: str, rate: float, seed: int, is_search: bool) -> Job:
            device, settings, end = common
            folder = runs / "search" / f"{partition}-{rate}" if is_search else runs / f"fedavg-{partition}-seed{seed}"
            corpus = corpora[TUNING_CORPUS_SEED if is_search else 0]
            return Job(folder, corpus, partition, rate, seed, is_search, device, settings, end)

        if arguments.rate is None:
            searched = [job(partition, rate, TUNING_SEED, True) for partition, rates in GRID.items() for rate in rates]
            tried = follow([pool.submit(train, one) for one in searched])
            perplexities = {
                partition: {outcome.rate: outcome.perplexity for outcome in tried if outcome.partition == partition}
                for partition in GRID
            }
            rates = {partition: chosen(by_rate) for partition, by_rate in perplexities.items()}
        else:
            rates = dict.fromkeys(GRID, arguments.rate)
        say(f"learning rates: {rates}")
        write_json(arguments.out / "rates.json", rates)
        jobs = [job(partition, rates[partition], seed, False) for seed in SEEDS for partition in GRID]
        follow([pool.submit(train, one) for one in jobs])


def summary(rows: pd.DataFrame) -> str:
    """Return means by partition and round, and the difference of exposure between the partitions over seeds.

    Args:
        rows: columns partition, seed, round, metric, canary and value.
    """
    means = rows.groupby(["partition", "round", "seed", "metric"])["value"].mean().unstack("metric")
    columns = ["exposure", "rs", "bs", "accuracy", "perplexity"]
    lines = [means[columns].groupby(["partition", "round"]).mean().round(3).to_string(), ""]
    iid, non_iid = means.loc["iid"], means.loc["non-iid"]
    earlier, last = sorted(rows["round"].unique())
    for round_ in (earlier, last):
        difference = iid["exposure"].loc[round_] - non_iid["exposure"].loc[round_]
        lines.append(f"IID minus non-IID, round {round_}: {_interval(difference)}")
    difference = iid["exposure"].loc[earlier] - non_iid["exposure"].loc[last]
    lines.append(f"IID in round {earlier} minus non-IID in round {last}: {_interval(difference)}")
    # Exposure of the IID run at the perplexity with which the non-IID run ends, on a line through its two evaluations.
    logs = np.log(iid["perplexity"])
    share = (np.log(non_iid["perplexity"].loc[last]) - logs.loc[earlier]) / (logs.loc[last] - logs.loc[earlier])
    growth = iid["exposure"].loc[last] - iid["exposure"].loc[earlier]
    difference = iid["exposure"].loc[earlier] + share * growth - non_iid["exposure"].loc[last]
    lines.append(f"IID minus non-IID at equal perplexity, extrapolated: {_interval(difference)}")
    return "\n".join(lines)


def _interval(differences: pd.Series) -> str:
    """Return the mean over seeds with its 95% interval and p (Student's t)."""
    values = differences.dropna().to_numpy()
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return f"{values.mean():+.2f} bits ({low:.2f} to {high:.2f}), p = {test.pvalue:.2g}, {len(values)} seeds"


def _make(path: Path, seed: int, is_quick: bool) -> None:
    """Make a corpus with the settings of the tier."""
    synthetic = load(SWEEP).tiers[TIER].corpus.synthetic
    if synthetic is None:
        raise ValueError(f"{SWEEP}: tier {TIER} has no synthetic corpus")
    if is_quick:
        synthetic = type(synthetic)(users=200, words_per_user=100, vocabulary_size=500, topics=5, test_users=4)
    make_synthetic(path, synthetic, seed)


def _archive(runs: Path, out: Path) -> None:
    """Write rows, settings and logs of runs to rows.tgz, and final checkpoints of the first pairs to pair-SEED.tar."""
    folders = [path for path in sorted(runs.glob("fedavg-*")) if (path / "run.json").exists()]
    partial = out / "rows.partial"
    with tarfile.open(partial, "w:gz") as archive:
        for folder in folders:
            for part in (folder / name for name in ("config.toml", "run.json", "rounds.jsonl", "rows")):
                if part.exists():  # a run that has just begun has no log yet
                    archive.add(part, f"{folder.name}/{part.name}")
    partial.replace(out / "rows.tgz")
    for seed in range(KEPT_PAIRS):
        pair = [runs / f"fedavg-{partition}-seed{seed}" for partition in GRID]
        target = out / f"pair-{seed}.tar"
        if target.exists() or not all((path / "run.json").exists() for path in pair):
            continue
        if {json.loads((path / "run.json").read_text())["status"] for path in pair} == {"completed"}:
            with tarfile.open(target, "w") as archive:
                for path in pair:
                    newest = checkpoint.latest(path / "checkpoints")
                    if newest is not None:
                        archive.add(newest, newest.relative_to(runs))


if __name__ == "__main__":
    main()
