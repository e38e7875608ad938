"""Time and memory of runs, predicted from short runs of each configuration, and the scale of an experiment.

    time of a run = start + rounds x measured round + evaluations x measured evaluation

A short run has three parts, each a round, or `STEPS` steps of central training. It is evaluated after the second and
the third part. The second part gives the time of a round, because the first one includes start-up. The second
evaluation gives the time of an evaluation, because the first one includes the start of the evaluator. The start is
the remaining time of the short run, from the start of its process to its end.

Training is assumed to wait for evaluations. If evaluators have separate cores, runs end earlier.
"""

import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flsim.base.errors import RunFailed
from flsim.base.machine import PeakMemory
from flsim.base.progress import progress
from flsim.canaries.spec import CanaryHParams, configurations, distinct_configurations, expected_share
from flsim.data.corpus import Split
from flsim.data.records import Layout
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, of_model
from flsim.results.rows import PARTITIONS, read_evaluations
from flsim.results.sweeps import PARTITION
from flsim.runs import roundlog
from flsim.runs.config import Config, dump
from flsim.runs.config.base import DataHParams, shared_rounds
from flsim.runs.sweeps.definition import Definition, Planned, Tier, TierCorpus, planned_runs
from flsim.show.table import Column, markdown, note
from server.launch import share
from server.sweep import SweepJob, train_all

# Scale of an experiment, next to the published one: users, cohorts, epochs, amounts of training, copies of canaries.
#
# The amount of training is the sum of learning rates over the steps that follow each other. A model that is trained
# less memorizes less. Two rows compare as published ones do if their amounts are the same share of the published
# amounts.

UTILITY: Quantity = next(quantity for quantity in of_model(QUANTITIES.values()) if quantity.is_log)

Text = Callable[[Any], str]
Row_ = TypeVar("Row_", bound=Any)


@dataclass(frozen=True)
class Presented:
    """The presentation of a field in tables: a heading or question, the text of a value, and a note below the table."""

    heading: str
    text: Text = str
    note: str = ""
    is_number: bool = True


def cell(heading: str, text: Text = str, note: str = "", is_number: bool = True) -> Any:
    """Return a field of a dataclass that is a cell of tables; see `Cell`."""
    return field(metadata={"cell": Presented(heading, text, note, is_number)})


def columns(rows: Sequence[Any], names: str = "", head: str = "") -> list[Column]:
    """Return the columns of rows of one class that are not empty, by default all; `head` begins the first heading."""
    filled = list[Column]()
    for item in fields(rows[0]):
        values = [getattr(row, item.name) for row in rows]
        if "cell" in item.metadata and (not names or item.name in names.split()):
            form: Presented = item.metadata["cell"]
            cells = ["" if value in (None, "", {}) else form.text(value) for value in values]
            if any(cells):
                heading = head * (not filled) + form.heading
                filled.append(Column(heading, cells, form.is_number, note=form.note))
    return filled


def table(rows: Sequence[Any], more: str = "") -> str:
    """Return the table of rows of one class, then `more`."""
    label, *others = columns(rows)
    return markdown([label], [[column] for column in others], more)


def answers(*parts: Any) -> str:
    """Return a table of question, value and unit with the fields of some objects, whose texts end with a unit."""
    answered = [(item.metadata["cell"], getattr(part, item.name)) for part in parts for item in fields(part)]
    texts = [form.text(value).rpartition(" ") for form, value in answered]
    cells = [Column("Value", [text[0] for text in texts]), Column("Unit", [text[2] for text in texts], is_number=False)]
    return markdown([Column("Question", [form.heading for form, _ in answered], is_number=False)], [cells])


def once(named: Iterable[tuple[str, Row_]]) -> tuple[Row_, ...]:
    """Return equal rows once, each with the first of its names and their number."""
    names: dict[Row_, dict[str, None]] = {}
    for name, row in named:
        names.setdefault(row, {})[name] = None
    return tuple(replace(row, name=next(iter(same)), rows=len(same)) for row, same in names.items())


def with_unit(template: str, unit: str, missing: str = "none") -> Text:
    """Return a function that formats numbers of a unit; `missing` is the text for None."""
    return lambda value: f"{missing if value is None else template.format(value)} {unit}"


def duration(seconds: float) -> str:
    """Return an approximate duration: 0.042 s, 40 s, 12 min, 3.5 h, 20 days."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    for unit, size_, most in (("s", 1.0, 90), ("min", 60.0, 90), ("h", 3600.0, 48)):
        amount = seconds / size_
        if amount < most:
            return f"{amount:.1f} {unit}" if amount < 9.95 and unit == "h" else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:,.1f} days" if seconds < 10 * 86_400 else f"{seconds / 86_400:,.0f} days"


def size(amount: float) -> str:
    """Return bytes in powers of ten: 4.1 GB."""
    return f"{amount:.0f} B" if amount < 1e3 else f"{_three(amount)}B"


def number(amount: float) -> str:
    """Return a short number: 11,896 or 92.9 M."""
    return f"{amount:,.0f}" if amount < 1e6 else _three(amount).rstrip()


def percent(fraction: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * fraction:.2g}%" if fraction < 0.995 else f"{100 * fraction:,.0f}%"


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all digits of a larger integer."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _three(amount: float) -> str:
    power = min(4, int(math.log10(max(amount, 1) * 1.0005) // 3))
    value = amount / 1000**power
    return f"{value:.{0 if value >= 99.95 else 1}f} {['', 'k', 'M', 'G', 'T'][power]}"


AMOUNT = (
    "Amount: sum of learning rates over steps that follow each other. Of SGD this is learning rate x steps; of FedAvg "
    "local rate x local steps of a user x rounds x server rate; with an adaptive server optimizer server rate x "
    "rounds. Momentum is not counted."
)


@dataclass(frozen=True)
class UserNumbers:
    """The numbers of the training users."""

    users: int
    records: int
    words: int
    vocabulary: int

    @classmethod
    def counted(cls, users: Split) -> "UserNumbers":
        return cls(len(users), users.records, users.words, users.layout.vocabulary_size)

    def split(self) -> Split:
        """Return as many equal users, without records and their memory, to compute how long a run trains."""
        return Split(
            Layout(self.vocabulary, 20),
            np.broadcast_to(np.uint16(0), self.words),
            np.broadcast_to(np.int64(0), self.records + 1),
            np.linspace(0, self.records, self.users + 1).astype(np.int64),
            Path(),
        )


def trained_on(config: Config, train: Split) -> Split:
    """Return the users that a run trains on, without the records that settings of `data` exclude, for counting."""
    return _trained_on(config.data, train, config.seed)


@lru_cache(maxsize=1_024)  # every part of a plan asks again; only counts and offsets of users are kept
def _trained_on(data: DataHParams, train: Split, seed: int) -> Split:
    split = data.without_withheld(train, seed)
    if split is train:
        return train
    return replace(UserNumbers.counted(split).split(), user_offsets=np.asarray(split.user_offsets))


def evaluations_of(config: Config, train: Split) -> int:
    """Return the number of a run's evaluations, on the users that it trains on."""
    schedule = config.evaluation
    epochs = schedule.every_epochs
    interval = schedule.every if epochs is None else max(1.0, epochs * config.rounds_per_epoch(train))
    return 1 + math.floor(round((config.rounds_over(train) - 1) / interval, 6))


def checkpoints_of(config: Config, train: Split) -> int:
    """Return the number of checkpoints that a run keeps: evaluated ones, and the one its other arm begins with."""
    rounds, per_epoch = config.rounds_over(train), config.rounds_per_epoch(train)
    parting = shared_rounds(config, rounds)
    return evaluations_of(config, train) + (0 < parting < rounds and not config.evaluation.is_due(parting, per_epoch))


# Of published experiments, by the file with their numbers. Thakkar et al. (2020), section 4.1: 392,000 users of about
# 2,000 words each, and 10,000 words. Its "93K examples" in total can only be 93 million, 237 a user.
PUBLISHED = {"thakkar2020.csv": UserNumbers(392_000, 392_000 * 237, 392_000 * 2_000, 10_000)}


@dataclass(frozen=True)
class ScaleRow:
    """A row of the sweep's table in one partition, over all seeds.

    `utility` is the published perplexity, if it is known. `amount` is None with a custom server optimizer.
    """

    name: str = cell("Row", is_number=False)
    runs: int = cell("runs", number)
    length: int = cell("length", number, "Length: number of rounds, or of steps of SGD.")
    size: int = cell("batch", number, "Batch: users of a round, or records of a step.")
    of_users: float | None = cell("share", percent, "Share, next to the batch: share of all users in a round.")
    epochs: float = cell("epochs", three_digits)
    amount: float | None = cell("amount", three_digits, AMOUNT)
    utility: float | None = cell(UTILITY.heading, UTILITY.format.format, f"{UTILITY.heading}: perplexity.")
    of_published: float | None = cell("share", percent, "Share, next to the amount: share of the published amount.")


@dataclass(frozen=True)
class PlannedCanaries:
    """A configuration of canaries: with probabilities p_u and p_e, or with a number of copies."""

    count: int = cell("Canaries", number)
    p_u: float | None = cell("p_u", "{:.3g}".format)
    p_e: float | None = cell("p_e", "{:g}".format)
    sharers: float | None = cell("sharers", three_digits, "Sharers: their expected number, p_u x users.")
    copies: float = cell("copies", three_digits, "Copies: expected copies of a canary, if no other claims its records.")
    window: str = cell("planted", is_number=False)


@dataclass(frozen=True)
class Scale:
    """The size of an experiment.

    `share` is the expected share of all records that are canaries, and `number` that of canaries, in the run with most.
    """

    users: UserNumbers
    rows: tuple[ScaleRow, ...]
    canaries: tuple[PlannedCanaries, ...]
    share: float
    number: int


def scale_of(rows: Mapping[str, Sequence[Planned]], train: Split, published: Scale | None = None) -> Scale:
    """Return the scale of runs on these users, by row (`rows_of`); `published` is that of the same rows."""
    configs = [runs[0].config for runs in rows.values()]
    trained = list(
        dict.fromkeys((config.canaries, UserNumbers.counted(trained_on(config, train))) for config in configs)
    )
    others = published.rows if published else [None] * len(rows)
    return Scale(
        UserNumbers.counted(train),
        tuple(_row(name, runs, train, row) for (name, runs), row in zip(rows.items(), others, strict=True)),
        tuple(dict.fromkeys(canaries for settings, counts in trained for canaries in canaries_of(settings, counts))),
        max(expected_share(settings, counts.records) for settings, counts in trained),
        max(len(configurations(settings)) for settings, _ in trained),  # those that are compared
    )


def rows_of(planned: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Return the runs of each row of the sweep's table in each partition, by name."""
    rows: dict[str, list[Planned]] = {}
    for run in planned:
        rows.setdefault(row_name(run, with_partition=True), []).append(run)
    return rows


def _row(name: str, runs: Sequence[Planned], train: Split, published: ScaleRow | None) -> ScaleRow:
    config = runs[0].config
    users = trained_on(config, train)
    rounds, amount = config.rounds_over(users), config.rate_steps(users)
    return ScaleRow(
        name,
        len(runs),
        rounds,
        config.round_size,
        config.round_size / len(users) if config.unit == "user" else None,
        rounds / config.rounds_per_epoch(users),
        amount,
        None,
        amount / published.amount if amount is not None and published and published.amount else None,
    )


def canaries_of(hparams: CanaryHParams, users: UserNumbers) -> tuple[PlannedCanaries, ...]:
    """Return each configuration once, in its order."""
    if not hparams.count:
        return ()
    return tuple(
        PlannedCanaries(hparams.count, None, None, None, float(one.copies), one.when)
        if one.copies is not None
        else PlannedCanaries(
            hparams.count, one.p_u, one.p_e, one.p_u * users.users, one.p_u * one.p_e * users.records, one.when
        )
        for one in distinct_configurations(hparams)
    )


def published_users(definition: Definition) -> UserNumbers | None:
    """Return the numbers of the published training users; None if they are not known."""
    return PUBLISHED.get(definition.published.file) if definition.published else None


def published_scale(
    definition: Definition, planned: Sequence[Planned], source: str, only: Sequence[str] = ()
) -> Scale | None:
    """Return the scale of published runs, which `planned` reproduces, in the same rows; None without known users."""
    tier = Tier(about="", corpus=TierCorpus(path=Path()), seeds=tuple(dict.fromkeys(run.seed for run in planned)))
    users = published_users(definition)
    published = planned_runs(definition, tier, Path(), source, only=only) if users else []
    if not users or len(published) != len(planned):
        return None
    counterparts = {run.name: other for run, other in zip(planned, published, strict=True)}
    rows = {name: [counterparts[run.name] for run in runs] for name, runs in rows_of(planned).items()}
    scale = scale_of(rows, users.split())
    known = [(runs[0].published or {}).get(UTILITY.name) for runs in rows.values()]
    utility = [float(value) if isinstance(value, int | float) else None for value in known]
    with_utility = [replace(row, utility=value) for row, value in zip(scale.rows, utility, strict=True)]
    return replace(scale, rows=tuple(with_utility))


def row_name(run: Planned, with_partition: bool = False, without: Collection[str] = ()) -> str:
    """Return the name of the row of a table that a run is in, without the seed, and without some settings."""
    axes = [_setting_text(key, value) for key, value in run.axes.items() if key not in (PARTITION, *without)]
    partition = PARTITIONS.get(str(run.axes.get(PARTITION)), "") if with_partition else ""
    return ", ".join(filter(None, (" ".join([run.grid, *axes]), partition)))


def _setting_text(key: str, value: object) -> str:
    if isinstance(value, str):
        return value
    listed = ", ".join(map(str, value)) if isinstance(value, Sequence) else value
    return f"{key.rpartition('.')[2]} {listed}"


def scale_tables(scale: Scale, published: Scale | None, source: str | None) -> str:
    scales = {"": scale} | ({"publ. ": published} if published else {})
    names = ["Users", "Records", "Records of a user", "Vocabulary", "Canaries", "Canaries, share of all records"]
    facts = [Column("Published" if head else "Here", _facts(one)) for head, one in scales.items()]
    sizes = [columns(one.rows, "size of_users epochs", head) for head, one in scales.items()]
    sizes[0] = columns(scale.rows, "runs length") + sizes[0]
    amounts = [columns(one.rows, "amount utility", head) for head, one in scales.items()]
    amounts.append(columns(scale.rows, "of_published"))
    label = columns(scale.rows, "name")
    text = note(f"Published: {source}, with defaults for settings that the paper does not state.") if published else ""
    tables = [
        markdown([Column("Quantity", names, is_number=False)], [facts]),
        markdown(label, sizes),
        markdown(label, [unit for unit in amounts if unit], text),
    ]
    if scale.canaries:
        alike = {head: one.canaries for head, one in scales.items() if len(one.canaries) == len(scale.canaries)}
        copies = [columns(canaries, "p_u p_e sharers copies window", head) for head, canaries in alike.items()]
        tables.append(markdown(columns(scale.canaries, "count"), copies))
    return "\n".join(tables)


def _facts(scale: Scale) -> list[str]:
    users = scale.users
    counts = [number(users.users), number(users.records), three_digits(users.records / users.users)]
    return [*counts, number(users.vocabulary), number(scale.number), percent(scale.share)]


# Short runs, and the times that they predict.

STEPS = 20  # steps of central training in a part of a short run: a single step is too short to be measured
PARTS, EVALUATIONS = 3, 2  # of a short run
# Settings that do not change the time of a round or of an evaluation. Rows that differ only in these settings are
# measured once.
SAME_TIME = {
    *("data.shadow", "canaries.arm", "local.learning_rate", "training.learning_rate", "training.server_learning_rate"),
    *("privacy.clip", "privacy.noise_multiplier", "privacy.delta"),
}
MEMORY_EVERY = 1.0  # seconds between two measurements of memory
NOTE = (
    "Time = start + rounds x round + evaluations x evaluation. Each configuration was measured by a short run of three "
    f"rounds, or of 3 x {STEPS} steps of central training, with two evaluations: Round is the second round, Evaluation "
    "the second evaluation, Start all other time of the short run. At once: runs that this machine trains at the same "
    "time. With several runs at once the time of all runs is the sum of time / runs at once, and at least the longest "
    "run."
)


@dataclass(frozen=True)
class Machine:
    """The machine that trains: its numbers of cores and GPUs."""

    cores: int
    gpus: int

    def runs_at_once(self, config: Config, at_once: int | None = None) -> int:
        """Return how many runs of a configuration fit on the machine, at most `at_once`."""
        cpus, gpus = share(config, [{"CPU": self.cores, "GPU": self.gpus}])
        by_gpus = int(self.gpus / gpus + 1e-9) if gpus else self.cores  # shares of GPUs are fractions
        return max(1, min(int(self.cores // max(cpus, 1)), by_gpus, at_once or self.cores))


@dataclass(frozen=True)
class Cost:
    """Measured times of a configuration, in seconds; `start` includes the end of the process."""

    start: float
    round: float
    evaluation: float


@dataclass(frozen=True)
class Measurement:
    """The measurement of short runs: memory, and what their times depend on."""

    memory: int = cell("Peak memory of all processes, measured", size)
    at_once: int = cell("Runs at once during the measurement", with_unit("{:,}", "runs"))
    overhead: float = cell("Start and end of the cluster, measured", duration)
    seconds: float = cell("Duration of the measurement", duration)
    load: float = cell("Load before the measurement", with_unit("{:.1f}", "processes"))


@dataclass(frozen=True)
class RunTime:
    """The predicted time of runs of one configuration and length."""

    name: str = cell("Configuration", is_number=False)
    runs: int = cell("Runs", number)
    at_once: int = cell("At once", number)
    start: float = cell("Start", duration)
    rounds: int = cell("Rounds", number)
    round: float = cell("Round", duration)
    evaluations: int = cell("Eval.", number)
    evaluation: float = cell("Evaluation", duration)
    seconds: float = cell("Time", duration, NOTE)


@dataclass(frozen=True)
class Time:
    """The predicted time of all runs, in seconds."""

    seconds: float = cell("Time of all runs, as many at once as fit", duration)
    at_once: int = cell("Largest number of runs at once", with_unit("{:,}", "runs"))
    one_by_one: float = cell("Time of all runs, one after another", duration)
    longest: float = cell("Time of the longest run", duration)


def short_run(config: Config) -> Config:
    """Return the settings of a short run: three parts, evaluated after the second and the third one."""
    part = 1 if config.has_a_line_per_round else STEPS
    tracking = tuple(tracker for tracker in config.system.tracking if tracker == "tensorboard")
    system = replace(config.system, tracking=tracking)
    if not config.has_a_line_per_round:
        system = replace(system, checkpoint_every=part)
    evaluation = replace(config.evaluation, every=(PARTS - 1) * part, every_epochs=None)
    canaries = config.canaries  # windows and injections become fractions of training: a short run has fewer rounds
    if canaries.injections:
        last = max(1.0, *canaries.injections) / 0.8  # an injection has a round after it
        canaries = replace(canaries, injections=tuple(at / last for at in canaries.injections))
    else:
        last = max(1.0, *(end for _, end in canaries.windows))
        canaries = replace(canaries, windows=tuple((begin / last, end / last) for begin, end in canaries.windows))
    return replace(config.lasting(PARTS * part), canaries=canaries, evaluation=evaluation, system=system)


def configuration_of(run: Planned) -> str:
    """Return the name of a configuration, whose runs have equally long rounds and evaluations."""
    return row_name(run, without=SAME_TIME)


def measure(
    planned: Sequence[Planned], machine: Machine, at_once: int | None = None, whole_cluster: bool = False
) -> tuple[dict[str, Cost], Measurement]:
    """Return the times of each configuration, by name, and how short runs were measured.

    They are trained in a temporary folder, which is removed in any case. There are at least as many short runs as the
    sweep trains at the same time, so that the times include the competition between runs. With `whole_cluster`, runs
    are trained one after another. Raises RunFailed if a short run failed.
    """
    configs = {configuration_of(run): run.config for run in planned}
    slots = 1 if whole_cluster else max(machine.runs_at_once(config, at_once) for config in configs.values())
    slots = min(slots, len(planned))
    load, began = os.getloadavg()[0], time.time()
    with scratch() as folder:
        jobs, names = [], {}
        for index, name in enumerate(islice(cycle(configs), max(len(configs), slots))):
            short, config = f"short{index}", short_run(configs[name])
            dump(config, folder / f"{short}.toml")
            jobs.append(SweepJob(short, config, folder / f"{short}.toml", folder / short, folder / f"{short}.log"))
            names[short] = name
        costs, seconds = dict[str, list[Cost]](), list[float]()
        title = f"measuring {PARTS} rounds and {EVALUATIONS} evaluations of each configuration"
        with progress(title, len(jobs), unit="runs") as advance, PeakMemory(os.getpid(), MEMORY_EVERY) as memory:
            for job in train_all(jobs, None, at_once, whole_cluster):
                if job.failure:
                    raise RunFailed(f"the measurement failed, therefore nothing is predicted: {job.failure}")
                seconds.append(job.seconds)
                costs.setdefault(names[job.name], []).append(cost_of(folder / job.name, job.seconds))
                advance(len(seconds))
        total = time.time() - began
    medians = {
        name: Cost(*(statistics.median(values) for values in zip(*map(astuple, observed), strict=True)))
        for name, observed in costs.items()
    }
    return medians, Measurement(memory.total, slots, max(0.0, total - sum(seconds) / slots), total, load)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed after the block."""
    with tempfile.TemporaryDirectory(prefix="flsim-plan-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def cost_of(run: Path, seconds: float) -> Cost:
    """Return the times of a short run of so many seconds from its logs; raise RunFailed if these lack any."""
    lines = roundlog.read(run)
    stored = [attempt for attempt in read_evaluations(run) if attempt.outcome == "stored"]
    if len(lines) != PARTS or len(stored) != EVALUATIONS:
        raise RunFailed(
            f"the measurement failed, therefore nothing is predicted: a short run has {len(lines)} lines of rounds and "
            f"{len(stored)} evaluations; look for what it lacks with `flsim run`, or use --no-calibration"
        )
    rounds = lines[-1]["round"]
    round_ = lines[1]["seconds"] / (lines[1]["round"] - lines[0]["round"])
    evaluation = max(stored, key=lambda attempt: attempt.ended).seconds
    return Cost(max(0.0, seconds - rounds * round_ - EVALUATIONS * evaluation), round_, evaluation)


def times_of(
    planned: Sequence[Planned],
    costs: Mapping[str, Cost],
    train: Split,
    machine: Machine,
    at_once: int | None = None,
    whole_cluster: bool = False,
) -> tuple[RunTime, ...]:
    """Return the times of runs by configuration and length, the longest first."""
    rows = Counter[RunTime]()
    for run in planned:
        users, cost = trained_on(run.config, train), costs[name := configuration_of(run)]
        rounds, evaluations = run.config.rounds_over(users), evaluations_of(run.config, users)
        slots = 1 if whole_cluster else machine.runs_at_once(run.config, at_once)
        seconds = cost.start + rounds * cost.round + evaluations * cost.evaluation
        parts = (cost.start, rounds, cost.round, evaluations, cost.evaluation)
        rows[RunTime(name, 0, slots, *parts, seconds)] += 1
    counted = [replace(row, runs=runs) for row, runs in rows.items()]
    return tuple(sorted(counted, key=lambda row: -row.seconds))


def time_of(times: Sequence[RunTime], overhead: float) -> Time:
    """Return the time of all runs: the sum of time / runs at once, but at least the longest run, and the overhead."""
    longest, runs = max(row.seconds for row in times), sum(row.runs for row in times)
    return Time(
        seconds=overhead + max(longest, sum(row.runs * row.seconds / row.at_once for row in times)),
        at_once=min(runs, max(row.at_once for row in times)),
        one_by_one=sum(row.runs * row.seconds for row in times),
        longest=longest,
    )
