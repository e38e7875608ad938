"""Train runs of the experiments on one machine, without Ray and Flower: many small runs at the same time.

    python -m experiments.local_runs table1 --device cpu --workers 8 --out runs/table1
    python -m experiments.local_runs ten-times dp-small --out runs/gpu --seconds 450

Experiments, in the order of the command line; each finished run is added to the archives in `--out`, so an end at any
time loses unfinished runs only:

- `table1`: Table 1 of Thakkar et al. (2020), tier `smoke` of `table1.toml`. Learning rates are searched between the one
  in `tuned/table1-smoke.toml` and its double, in steps of a factor of 1.2 and with six seeds, and below it if a seed
  diverges even there. A learning rate at which a seed diverged gets no further seeds.
  Seeds 10 to 19 are then trained at the chosen learning rate and at half of it (`chosen`).
- `table2` and `four-settings`: the same for three settings of Table 2, and for the four settings on synthetic text,
  with seeds 10 to 14.
- `ten-times`: four settings with ten times the users (see `docs/result-ten-times.md`), seeds 0 to 9.
- `dp-small`: `dp-small.toml` with seeds 0 to 4: FedAvg, clip, and clip with noise multiplier 1.
- `SWEEP:TIER:FIRST-LAST` or `SWEEP:TIER:FIRST-LAST:GRID`, such as `secret-sharer-once:small:101-400`: all runs of a
  tier, or of one grid of it, with these seeds; with `--half`, at half of their learning rates.

Directions that were stated before the first run. Each is tested over seeds, with a two-sided t test of paired
differences at 5%, and Holm's correction over the four sizes of Table 1:

1. `table1`: for each of four cohorts of FedAvg, canaries have a higher mean exposure under IID data than under non-IID
   data, at the chosen learning rates and at half of them. The same for each of four batch sizes of SGD. Whether FedAvg
   or SGD has the higher exposure under IID data is tested without a direction.
2. `ten-times`: canaries of IID data have a higher mean exposure than those of non-IID data at the searched learning
   rates. They also do at learning rates with which both partitions end at about the same perplexity after equal epochs.
3. `secret-sharer-once:small:101-400` (section 4.1 of The Secret Sharer): more than half of 300 new networks prefer the
   secret that they read once to another number (two-sided binomial test).
4. `secret-sharer-table1:smoke:6-25`: over 20 new seeds, a network of two recurrent layers has another mean exposure
   than one of one layer (GRU and LSTM; no direction, as the paper has one for each).
5. `dp-small`: mean exposure is lower with the clip than without it, and lower with noise (epsilon 8.6) than with
   only the clip. Perplexity rises in the same order.
6. `secret-sharer-table2:smoke:6-25`: over 20 new seeds, networks of 75 units have a higher exposure than
   networks of 45 units, at batch sizes 8 and 32. Exposure at batch size 32 is compared with exposure at batch size 8
   without a direction: the paper found a higher exposure, and five earlier seeds a lower one.
7. `shadows:users:0-15`: the attack on users with the highest AUROC on one random half of 2,000 users has an AUROC above
   0.5 on the other half.
8. `table2`: for both partitions, at the chosen learning rates and at half of them, mean exposure at the end is lower
   with the clip than without it. It is higher for IID than for non-IID data, with and without the clip.
9. `four-settings`: FedAvg has a higher mean exposure at the end with IID than with non-IID data, at the chosen learning
   rates and at half of them. SGD is tested without a direction.
10. `table3:smoke:0-4 --half`: as at the chosen learning rates, mean exposure at the end is higher with IID than with
   non-IID data for SGD, Momentum, FedAvg, and FedAvg with Adam. It is higher with Adam than with SGD for both
   partitions, and higher with Momentum than with SGD for IID data.
11. `table4:smoke:0-4 --half`: as at the chosen learning rates, mean exposure after ten epochs is higher with cohorts of
   4 than of 40 users, and with batches of 32 than of 256 records.
12. `flsim demo --seed N` for seeds 10 to 29: mean exposure is higher with IID than with non-IID data, at the end of
   training and at equal perplexity. At equal perplexity, seeds 5 to 9 left this open.

The same command with the same `--out` continues what is not finished.

A run folder is that of `flsim run`. The script needs torch, numpy, pandas, pyarrow, scipy and pydantic, and Triton on a
GPU. Several processes share a GPU, because small cohorts fill less than half of it; start NVIDIA MPS before, so that
their kernels run at the same time.
"""

import argparse
import json
import math
import re
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flsim.algorithms import checkpoint
from flsim.base.errors import Diverged
from flsim.base.files import write_json
from flsim.base.progress import say
from flsim.data.synthetic import make_synthetic
from flsim.measures.built_in import PERPLEXITY
from flsim.runs.config import Config
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.runs.sweeps.definition import load, planned_runs

HERE = Path(__file__).parent
STEP = 1.2  # factor between learning rates of a refined search, and the margin to the edge of stability
QUICK = (
    "model.embedding=8", "model.units=8", "canaries.count=1", "evaluation.references=100", "evaluation.test_users=2",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run to train.

    Attributes:
        name: the name of the run, and of its folder in `--out`.
        config: the settings.
        facts: what distinguishes the run in its experiment, such as the learning rate; copied to its outcome.
        is_search: whether only the utility of the last round is measured.
        also: further measures, as `evaluation.also`.
        evaluate_from: the part of training before which nothing is evaluated, between 0 and 1.
    """

    name: str
    config: Config
    facts: Mapping[str, Any]
    is_search: bool = False
    also: tuple[str, ...] = ()
    evaluate_from: float = 1.0


@dataclass(frozen=True)
class Machine:
    """Where runs are trained.

    Attributes:
        runs: folder of run folders.
        device: torch device.
        until: time (`time.time`) after which a run stops, with a checkpoint.
        corpora: folder of corpora.
        is_quick: whether corpora and models are tiny, which only tries the script.
    """

    runs: Path
    device: str
    until: float
    corpora: Path
    is_quick: bool

    def synthetic(self, sweep: Path, tier: str, seed: int) -> Path:
        """Return the corpus of a tier for a seed, and make it if it does not exist."""
        path = self.corpora / f"{sweep.stem}-{tier}-{seed}"
        if not path.exists():
            made = load(sweep).tiers[tier].corpus.synthetic
            if made is None:
                raise ValueError(f"{sweep}: tier {tier} has no synthetic corpus")
            if self.is_quick:
                made = type(made)(users=200, words_per_user=100, vocabulary_size=500, topics=5, test_users=4)
            make_synthetic(path, made, seed)
        return path

    @property
    def overrides(self) -> list[str]:
        return list(QUICK) if self.is_quick else []


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        name, facts, is_search: as in `Job`.
        status: "completed", "diverged" or "interrupted".
        rounds: number of completed rounds.
        perplexity: perplexity on test users after the last round; infinite if the run diverged, NaN if interrupted.
        training_seconds: seconds of training, while other runs trained too.
        evaluation_seconds: seconds of evaluations.
    """

    name: str
    facts: Mapping[str, Any]
    is_search: bool
    status: str
    rounds: int
    perplexity: float
    training_seconds: float
    evaluation_seconds: float


def train(job: Job, machine: Machine) -> Outcome:
    """Train and evaluate a run in a separate process. A run that was begun is continued.

    Raises:
        TimeoutError: the time is over before the run begins.
    """
    if time.time() > machine.until:
        raise TimeoutError(f"{job.name}: not begun, as the time was over; raise --seconds")
    torch.set_num_threads(1)
    folder = machine.runs / job.name
    run = Run.open(folder) if folder.exists() else Run.create(job.config, folder)
    rounds, status, perplexity, evaluating = 0, "completed", math.nan, 0.0
    began = time.time()
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is not None and checkpoint.round_of(newest) == run.rounds:
        newest.unlink()  # killed before its evaluation, so the last rounds are trained again

    def stops(round_: int) -> bool:
        is_evaluated = run.is_evaluated_at(round_) and round_ >= job.evaluate_from * run.rounds
        return is_evaluated or time.time() > machine.until

    try:
        for state in run.training(machine.device).states(run.latest_state(), run.rounds, stops):
            rounds = state.round
            if rounds < run.rounds and not run.is_evaluated_at(rounds):
                run.save(state)
                status, perplexity = "interrupted", math.nan
                break
            path, before = run.save(state), time.time()
            rows = evaluate_checkpoint(
                run.path, path, machine.device, also=() if job.is_search else job.also, utility_only=job.is_search
            )
            perplexity = next(row.value for row in rows if row.metric == PERPLEXITY.name)
            evaluating += time.time() - before
        run.mark("completed" if status == "completed" else "interrupted")
    except Diverged as error:
        run.mark("diverged", str(error))
        status, perplexity = "diverged", math.inf
    seconds = time.time() - began - evaluating
    return Outcome(job.name, job.facts, job.is_search, status, rounds, perplexity, seconds, evaluating)


def stable(perplexities: Mapping[float, Sequence[float]]) -> list[float]:
    """Return the tried learning rates below the lowest one at which a tuning seed diverged, ascending."""
    diverged = (rate for rate, values in perplexities.items() if not math.isfinite(sum(values)))
    limit = min(diverged, default=math.inf)
    return sorted(rate for rate in perplexities if rate < limit)


def chosen(perplexities: Mapping[float, Sequence[float]]) -> float:
    """Return the stable learning rate with the lowest mean perplexity over tuning seeds, with a margin to divergence.

    If it is the highest stable one, the limit is stability, or unknown. Then the result is the highest tried learning
    rate that is lower by the factor `STEP` at least, or the best one divided by `STEP`.

    Args:
        perplexities: the perplexities of tuning seeds by learning rate; infinite for a run that diverged.

    Examples:
        >>> chosen({0.2: [150.0], 0.25: [130.0], 0.3: [140.0]}), chosen({0.2: [150.0], 0.25: [130.0], 0.3: [math.inf]})
        (0.25, 0.2)
    """
    rates = stable(perplexities)
    best = min(rates, key=lambda rate: sum(perplexities[rate]) / len(perplexities[rate]))
    if best < rates[-1]:
        return best
    return max((rate for rate in rates if rate * STEP <= best * (1 + 1e-2)), default=best / STEP)


@dataclass
class Pool:
    """Processes that train, and the outcomes so far.

    Attributes:
        executor: the processes.
        machine: folders and device of training.
        out: folder of outcomes and archives.
        matching: regular expression of names of runs of a sweep that are trained.
        at_half: whether runs of a sweep are trained at half of their learning rates.
        outcomes: the outcomes so far.
    """

    executor: ProcessPoolExecutor
    machine: Machine
    out: Path
    matching: str = ""
    at_half: bool = False
    outcomes: list[Outcome] = field(default_factory=list)

    def start(self, jobs: Iterable[Job]) -> list[Future[Outcome]]:
        """Hand jobs without an outcome to the processes, which begin them in this order."""
        finished = {outcome.name for outcome in self.outcomes if outcome.status != "interrupted"}
        return [self.executor.submit(train, job, self.machine) for job in jobs if job.name not in finished]

    def follow(self, futures: Iterable[Future[Outcome]]) -> None:
        """Record outcomes as they come; a failed run is reported and does not end the others."""
        archived = 0.0
        for future in as_completed(list(futures)):
            if error := future.exception():
                say(f"a run failed: {type(error).__name__}: {error}")
                continue
            say(json.dumps(asdict(future.result())))
            self.outcomes.append(future.result())
            write_json(self.out / "outcomes.json", {"outcomes": [asdict(outcome) for outcome in self.outcomes]})
            if not future.result().is_search and time.time() > archived + 10:
                _archive(self.machine.runs, self.out)
                archived = time.time()
        _archive(self.machine.runs, self.out)


def refined(
    pool: Pool, stem: str, tier: str, final_seeds: Iterable[int], only: Sequence[str] = ()
) -> Iterator[Future[Outcome]]:
    """Search learning rates near the edge of stability, and train seeds at the chosen one and at half of it.

    Args:
        pool: the processes.
        stem: the sweep, without `.toml`; its tier names a file of searched learning rates.
        tier: tier of the sweep.
        final_seeds: seeds that are reported.
        only: grids of the sweep; all if empty.
    """
    sweep = HERE / f"{stem}.toml"
    definition = load(sweep)
    seeds = range(1_000, 1_001 if pool.machine.is_quick else 1_006)  # never reported

    def configs(corpus: Path, seed: int) -> dict[str, Config]:
        entries = planned_runs(
            definition, definition.tiers[tier], corpus, str(sweep), [seed], only, pool.machine.overrides
        )
        return {entry.name.removesuffix(f"-seed{seed}"): entry.config for entry in entries}

    groups = configs(pool.machine.synthetic(sweep, tier, 1), 0)
    tried = {group: [_rate(config) * STEP**power for power in range(4)] for group, config in groups.items()}
    while True:
        for seed in seeds:
            perplexities = _of_search(pool, stem)
            jobs = [
                Job(
                    f"search/{stem}-{group}-{rate:.3g}-seed{seed}",
                    replace(_at_rate(groups[group], float(f"{rate:.3g}")), seed=seed),
                    {"sweep": stem, "group": group, "rate": float(f"{rate:.3g}"), "seed": seed},
                    is_search=True,
                )
                for group, rates in tried.items()
                for rate in rates
                if math.inf not in perplexities[group][float(f"{rate:.3g}")]  # no seed can make it stable again
            ]
            pool.follow(pool.start(jobs))
            finished = {outcome.name for outcome in pool.outcomes if outcome.status != "interrupted"}
            if not all(job.name in finished for job in jobs):
                say(f"{stem}: the search is not complete; run the command again to continue it")
                return
        perplexities = _of_search(pool, stem)
        unstable = [group for group, by_rate in perplexities.items() if not math.isfinite(sum(by_rate[min(by_rate)]))]
        if not unstable:
            break
        for group in unstable:  # a seed diverged even at the lowest learning rate
            tried[group].insert(0, tried[group][0] / STEP)
    rates = {group: chosen(by_rate) for group, by_rate in perplexities.items()}
    write_json(pool.out / f"{stem}-rates.json", rates)
    corpus = pool.machine.synthetic(sweep, tier, 0)
    final: list[Job] = []
    for seed in final_seeds:
        for group, config in configs(corpus, seed).items():
            for share, suffix in ((0.5, "half"), (1.0, "chosen")):
                rate = rates[group] * share
                facts = {"group": group, "rate": rate, "share": share, "seed": seed}
                final.append(Job(f"{stem}-{group}-{suffix}-seed{seed}", _at_rate(config, rate), facts, also=("space",)))
    yield from pool.start(final)


def _of_search(pool: Pool, stem: str) -> dict[str, dict[float, list[float]]]:
    """Return the perplexities of tuning seeds so far, by group and learning rate."""
    perplexities: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for outcome in pool.outcomes:
        if outcome.is_search and outcome.facts["sweep"] == stem and outcome.status != "interrupted":
            perplexities[outcome.facts["group"]][outcome.facts["rate"]].append(outcome.perplexity)
    return perplexities


def ten_times(pool: Pool) -> Iterator[Future[Outcome]]:
    """Train FedAvg for every seed from 0 to 9, IID at two learning rates and non-IID at one.

    The learning rates 0.3 (IID) and 0.2 (non-IID) were searched (`results/ten-times-rates.csv`). At 0.19, an IID run
    is expected to end with the perplexity of a non-IID run: log-perplexity of the searched runs, interpolated.
    """
    sweep, tier = HERE / "four-settings.toml", "ten-times"
    corpus, definition = pool.machine.synthetic(sweep, tier, 0), load(sweep)
    settings = [("non-iid", 0.2, range(4, 10)), ("iid", 0.19, range(10)), ("iid", 0.3, range(4, 10))]
    jobs: list[Job] = []
    for partition, rate, seeds in settings:
        overrides = [f"local.learning_rate={rate}", *pool.machine.overrides]
        for entry in planned_runs(
            definition, definition.tiers[tier], corpus, str(sweep), list(seeds), ["fedavg"], overrides
        ):
            if entry.axes["data.partition"] == partition:
                facts = {"partition": partition, "rate": rate, "seed": entry.seed}
                name = f"ten-times-{partition}-{rate}-seed{entry.seed}"
                also = ("space",) if rate < 0.3 else ()
                jobs.append(Job(name, entry.config, facts, also=also, evaluate_from=0.7))
    yield from pool.start(jobs)


def dp_small(pool: Pool) -> Iterator[Future[Outcome]]:
    """Train users of real posts with FedAvg, with a clip, and with clip and noise, five seeds each."""
    settings = {
        "none": ["privacy={}"],
        "clip": ["privacy.mechanism=clip", "privacy.noise_multiplier=0"],
        "dp": [],
    }
    corpus = pool.machine.corpora / "stackexchange-100"
    jobs: list[Job] = []
    for seed in range(5):
        for name, overrides in settings.items():
            common = [f"data.corpus={corpus}", f"seed={seed}", *pool.machine.overrides]
            config = load_config(HERE / "dp-small.toml", [*overrides, *common])
            facts = {"privacy": name, "seed": seed}
            jobs.append(Job(f"dp-small-{name}-seed{seed}", config, facts, evaluate_from=0.25))
    yield from pool.start(jobs)


def plain(pool: Pool, name: str) -> Iterator[Future[Outcome]]:
    """Train runs of `SWEEP:TIER:FIRST-LAST[:GRID]` whose names match `--matching`, and evaluate them at the end."""
    stem, tier, seeds, *only = name.split(":")
    first, last = map(int, seeds.split("-"))
    sweep = HERE / f"{stem}.toml"
    corpus, definition = pool.machine.synthetic(sweep, tier, 0), load(sweep)
    overrides = pool.machine.overrides
    yield from pool.start(
        Job(
            f"{stem}-{entry.name}",
            _at_rate(entry.config, _rate(entry.config) / 2) if pool.at_half else entry.config,
            {**entry.axes, "seed": entry.seed},
            also=("space",) if stem in ("table3", "table4") else (),  # for RS among as many references as in the paper
        )
        for entry in planned_runs(
            definition, definition.tiers[tier], corpus, str(sweep), range(first, last + 1), only, overrides
        )
        if re.search(pool.matching, entry.name)
    )


EXPERIMENTS: dict[str, Callable[[Pool], Iterator[Future[Outcome]]]] = {
    "table1": partial(refined, stem="table1", tier="smoke", final_seeds=range(10, 20)),
    "table2": partial(refined, stem="table2", tier="smoke", final_seeds=range(10, 15), only=("fedavg", "clip", "dp")),
    "four-settings": partial(refined, stem="four-settings", tier="demo", final_seeds=range(10, 15)),
    "ten-times": ten_times,
    "dp-small": dp_small,
}


def main() -> None:
    """Train the runs of the experiments that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.local_runs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "experiments", nargs="+", metavar="EXPERIMENT", help=", ".join([*EXPERIMENTS, "SWEEP:TIER:0-9"])
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of outcomes and archives")
    parser.add_argument("--runs", type=Path, help="folder of run folders (default: --out)")
    parser.add_argument("--corpora", type=Path, default=Path("corpora"), help="folder of corpora (default: corpora)")
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--workers", type=int, default=8, help="runs that train at the same time (default: 8)")
    parser.add_argument("--seconds", type=float, default=7 * 86_400, help="time for everything (default: a week)")
    parser.add_argument("--quick", action="store_true", help="tiny corpora and models, which only try the script")
    parser.add_argument("--matching", default="", help="regular expression: of SWEEP:..., only runs of such names")
    parser.add_argument("--half", action="store_true", help="of SWEEP:..., at half of the learning rates")
    arguments = parser.parse_args()
    runs = (arguments.runs or arguments.out).resolve()
    until = time.time() + arguments.seconds
    machine = Machine(runs, arguments.device, until, arguments.corpora.resolve(), arguments.quick)
    for folder in (arguments.out, runs / "search", machine.corpora):
        folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as executor:
        pool = Pool(executor, machine, arguments.out, arguments.matching, arguments.half)
        if (arguments.out / "outcomes.json").exists():
            stored = json.loads((arguments.out / "outcomes.json").read_text(encoding="utf-8"))["outcomes"]
            pool.outcomes = [Outcome(**outcome) for outcome in stored]
        for name in arguments.experiments:  # one after another, so that no search delays the record of finished runs
            pool.follow(EXPERIMENTS[name](pool) if name in EXPERIMENTS else plain(pool, name))


def _rate(config: Config) -> float:
    return float((config.local if hasattr(config, "local") else config.training).learning_rate)  # type: ignore[attr-defined]


def _at_rate(config: Config, rate: float) -> Config:
    """Return settings with another learning rate of SGD over records, or of local training."""
    part = "local" if hasattr(config, "local") else "training"
    return replace(config, **{part: replace(getattr(config, part), learning_rate=rate)})


def _archive(runs: Path, out: Path) -> None:
    """Write what `flsim table` reads of finished runs to rows.tgz, and final checkpoints of small models."""
    folders = [path for path in sorted(runs.iterdir()) if (path / "run.json").exists()]
    with tarfile.open(out / "rows.partial", "w:gz", compresslevel=1) as archive:
        for folder in folders:
            for part in ("config.toml", "run.json", "rows", "planted/roster.parquet", "planted/population.json"):
                if (folder / part).exists():
                    archive.add(folder / part, f"{folder.name}/{part}")
            newest = checkpoint.latest(folder / "checkpoints")
            if newest is not None and folder.name.startswith("dp-small"):
                archive.add(newest, f"{folder.name}/checkpoints/{newest.name}")
    (out / "rows.partial").replace(out / "rows.tgz")


if __name__ == "__main__":
    main()
