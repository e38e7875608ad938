"""A plan: what can be computed or measured about runs before they are trained, and its page."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flsim.attacks.audit.audit import ceiling, ceiling_of_coins
from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.canaries.planting import say_crowded
from flsim.canaries.spec import configurations, expected_copies
from flsim.data.corpus import Corpus, Split, position_type
from flsim.data.stores import located
from flsim.measures.built_in import MEMORIZED
from flsim.models.architectures import weights_of
from flsim.planning import measure
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import Ledger
from flsim.privacy.sampling import Relation
from flsim.privacy.table import STAR, report, soundness
from flsim.results import power
from flsim.runs.config import Config, load, toml
from flsim.runs.evaluate import EvaluationHParams
from flsim.runs.foresight import settled_on
from flsim.runs.sweeps import definition
from flsim.runs.sweeps.definition import Planned
from flsim.runs.sweeps.folder import corpus_of, corpus_or_its_settings, open_corpus, refuse_impossible_runs
from flsim.show.table import Column, markdown, note
from flsim.training.own_model import OPERATIONS

# Measured on runs of experiments/table1.toml, tier smoke; small in comparison with checkpoints.
CHECKPOINT_HEADER = 900
LINE, EVALUATION = 880, 4_200  # a line of rounds.jsonl, and the rows of an evaluation, each with its tensorboard/
ROWS_CANARY = 30
ROSTER, ROSTER_CANARY = 6_000, 60
REST = 6_000  # settings, status, log
KEPT = 2  # states of a user that a resume may need, on average


@dataclass(frozen=True)
class Disk:
    """Disk space of runs, in bytes; `meanwhile` is for three checkpoints of runs that train, one being written."""

    total: int = measure.cell("Disk after training", measure.size)
    checkpoints: int = measure.cell("Disk of checkpoints", measure.size)
    kept: int = measure.cell("Number of checkpoints", measure.with_unit("{:,}", "checkpoints"))
    planted: int = measure.cell("Disk of planted canaries and IID twins", measure.size)
    rest: int = measure.cell("Disk of rows, logs and states of users", measure.size)
    corpus: int = measure.cell("Disk of the corpus, if the sweep makes it", measure.size)
    meanwhile: int = measure.cell("Additional disk during training", measure.size)


def disk_of(runs: Sequence[Planned], train: Split, at_once: int, corpus: int) -> Disk:
    """Return the disk space of all runs; `corpus` is the size of the corpus if the sweep makes it, else 0."""
    disks = [run_disk(run.config, measure.trained_on(run.config, train)) for run in runs]
    summed = Disk(*map(sum, zip(*map(astuple, disks), strict=True)))
    meanwhile = sum(sorted((disk.meanwhile for disk in disks), reverse=True)[:at_once])
    return replace(summed, total=summed.total + corpus, corpus=corpus, meanwhile=meanwhile)


def checkpoint_bytes(config: Config, vocabulary: int) -> int:
    """Return the bytes of a checkpoint: parameters in float32, the optimizer's state, and a header."""
    copies = 1 + config.optimizer_slots(vocabulary)
    return (4 * weights_of(vocabulary, config.model) + CHECKPOINT_HEADER) * copies


def run_disk(config: Config, train: Split) -> Disk:
    """Return the disk space of the folder of a run that trains on these users."""
    users, records, vocabulary = len(train), train.records, train.layout.vocabulary_size
    rounds, evaluations, kept = (
        config.rounds_over(train),
        measure.evaluations_of(config, train),
        measure.checkpoints_of(config, train),
    )
    one = checkpoint_bytes(config, vocabulary)
    canaries = len(configurations(config.canaries)) + config.canaries.controls
    planted = ROSTER + ROSTER_CANARY * canaries + round(10 * expected_copies(config.canaries, records))
    if config.data.partition == "iid":
        planted += np.dtype(position_type(records)).itemsize * records + 8 * (users + 1)
    lines = rounds if config.has_a_line_per_round else evaluations + rounds // config.system.checkpoint_every
    rest = REST + lines * LINE + evaluations * (EVALUATION + ROWS_CANARY * canaries)
    if config.slots_kept_by_users:
        sampled = users * (1 - (1 - min(1.0, config.round_size / users)) ** rounds)
        rest += round(KEPT * sampled * 4 * weights_of(vocabulary, config.model) * config.slots_kept_by_users)
    return Disk(kept * one + planted + rest, kept * one, kept, planted, rest, corpus=0, meanwhile=3 * one)


def corpus_bytes(corpus: Corpus) -> int:
    """Return the bytes of all files of a corpus."""
    return sum(path.stat().st_size for path in corpus.path.rglob("*") if path.is_file())


BOUNDS = (
    "Bounds are the largest lower bounds on epsilon of one unit (a user or a record) of one run that `flsim audit` can "
    "prove with 95% confidence. A result near a bound is limited by the number of canaries."
)
HALVED = (
    "Neighbours: under add-or-remove-one a bound is half of the bound under replace-one, because to replace a unit is "
    "to remove it and to add another one."
)
two_digits = "{:.2f}".format


@dataclass(frozen=True)
class Provable:
    """The largest lower bounds on epsilon of one unit that the canaries of equal rows can prove.

    `relation` is the difference between neighbours in the run's ledger, or "replace-one" without a ledger, as in an
    audit. Values that do not apply are None: bounds of coins without coins or with too few of them, and values of
    canary users without these users. `note` is a sentence on what an epsilon is not about.
    """

    name: str = measure.cell("Row, first of", is_number=False)
    rows: int = measure.cell("rows", measure.number)
    unit: str = measure.cell("unit", is_number=False)
    canaries: int = measure.cell(
        "canaries", measure.number, "Canaries: planted ones; with coins half of all, as is expected."
    )
    group: int = measure.cell(
        "sharers", measure.number, "Sharers: largest expected number of units that share a canary."
    )
    epsilon: float = measure.cell("ranks", two_digits, "Ranks: bound from ranks, at delta 0.")
    coins: float | None = measure.cell(
        "coins", two_digits, "Coins: bound from guesses of the coins, at the row's delta."
    )
    canary_users: float | None = measure.cell(
        "users", two_digits, "Users: bound from guesses of the coins of canary users, at the row's delta."
    )
    delta: float | None = measure.cell("delta", "{:.3g}".format)
    random_updates: float | None = measure.cell(
        "random", "{:.2g}".format, "Random: updates of canary users for each update of a user; they cost utility."
    )
    relation: str = measure.cell("neighbours", note=HALVED, is_number=False)
    note: str = ""


def provable_of(planned: Sequence[Planned], train: Split) -> tuple[Provable, ...]:
    """Return what each row with ranked canaries can prove in each partition, once for all seeds and equal rows."""
    configs = {name: runs[0].config for name, runs in measure.rows_of(planned).items()}
    return measure.once(
        (name, _provable(config, train))
        for name, config in configs.items()
        if not (config.evaluation.utility_only or config.canaries.is_natural) and configurations(config.canaries)
    )


def _provable(config: Config, train: Split) -> Provable:
    split = measure.trained_on(config, train)
    users, canaries, audit = measure.UserNumbers.counted(split), config.canaries, config.canary_users
    groups = groups_of(config, users)
    planted = groups[::2] if canaries.coins else groups  # half of each configuration
    relation: Relation = "replace-one"
    delta = 0.0
    if config.privacy.mechanism == "dp":
        relation = sound_convention(config.sampler).relation
        delta = config.privacy.delta_for(config.protected(split))
    steps = 1 if relation == "replace-one" else 2  # to replace a unit is to remove it and to add another
    of_coins = ceiling_of_coins(groups, delta) if canaries.coins else None
    return Provable(
        name="",
        rows=1,
        unit=config.unit,
        canaries=len(planted),
        group=max(groups),
        epsilon=ceiling(planted, canaries.references(config.evaluation.references, split.layout.words)) / steps,
        coins=None if of_coins is None else of_coins / steps,
        canary_users=ceiling_of_coins([1] * audit.update_canaries, delta) if audit.canary_coins else None,
        delta=delta if canaries.coins or audit.canary_coins else None,
        random_updates=audit.random_updates(users.users) if audit.update_canaries else None,
        relation=relation,
        note=canaries.about_injections,
    )


def groups_of(config: Config, users: measure.UserNumbers) -> list[int]:
    """Return the expected number of units that share each canary, at least 1, counted as an audit counts them."""
    groups = []
    for one in configurations(config.canaries):
        insertions = one.p_u * one.p_e * users.records if one.copies is None else float(one.copies)
        is_sharers = config.unit == "user" and config.partition != "iid" and one.copies is None
        expected = one.p_u * users.users if is_sharers else insertions
        if one.users and config.unit == "user":
            expected = one.users
        units = users.users if config.unit == "user" else users.records
        groups.append(min(max(1, round(expected)), units))
    return groups


REQUEST, REPLY = 4, 8  # bytes of a trained weight: float32 to a client, and sums in float64 back
FINETUNING = (
    "By arithmetic, without weights. Memory: of one process that trains: the base, and for each of the users that "
    "train at once trained weights, activations and logits of a batch of the longest records. No layer is computed "
    "again to save memory. The machine's memory also holds the base for each process. Sent: to and from all clients in "
    f"a round. FLOP and time: of a round, or of a step; time on GPUs that compute {OPERATIONS / 1e12:.0f} TFLOP/s, as "
    "an H100 in large products; small models take longer."
)


@dataclass(frozen=True)
class Finetuning:
    """What equal rows of Hugging Face models need; None for values that do not apply."""

    name: str = measure.cell("Row, first of", is_number=False)
    rows: int = measure.cell("rows", measure.number)
    trained: int = measure.cell("trained", measure.number)
    base: int = measure.cell("base", measure.size)
    user: int = measure.cell("each user", measure.size)
    at_once: int = measure.cell("users", measure.number)
    memory: int = measure.cell("memory", measure.size)
    clients: int = measure.cell("clients", measure.number)
    sent: int | None = measure.cell("sent", measure.size)
    operations: float = measure.cell("FLOP", "{:.1e}".format)
    seconds: float | None = measure.cell("time", measure.duration)


def finetuning_of(planned: Iterable[Planned], train: Split) -> tuple[Finetuning, ...]:
    models = [run for run in planned if run.config.model.architecture == "hf"]
    return measure.once((measure.row_name(run), _finetuning(run.config, train)) for run in models)


def _finetuning(config: Config, train: Split) -> Finetuning:
    needs, users = config.footprint(train.layout), measure.trained_on(config, train)
    sent = config.clients * needs.trained * (REQUEST + REPLY) or None
    records = users.records / config.rounds_per_epoch(users)  # of a round
    operations = needs.operations * records * (users.words / users.records + 1)
    seconds = None if needs.gpu is None else operations / (OPERATIONS * max(1, config.clients))
    sizes = needs.trained, needs.base, needs.user, needs.at_once, needs.memory
    return Finetuning("", 1, *sizes, config.clients, sent, operations, seconds)


MORE = f"> {power.MOST:,}"
FOUND = (
    f"Found: with 80% power by a t test on exposure or by McNemar's test over canaries on {MEMORIZED.heading}. The t "
    "test is over the canaries of one pair of models with one seed, and over seeds with several seeds. With several "
    "comparisons, power is that of one of them after Holm's correction, as if no other one found a difference. The "
    "deviations are those of the demo at a learning rate of 1 unless --sd-canaries and --sd-seeds state others."
)
RECORDS = "Sound: sensitivity S under add-or-remove-one of a record, with Poisson sampling.\n"


@dataclass(frozen=True)
class Request:
    """The input of a plan.

    `tier` is that of a sweep. Without a corpus (`is_there`), the plan assumes the published number of users, all equal.
    `makes` is the size of a corpus that the sweep makes. With `whole_cluster`, runs are trained one after another.
    """

    name: str
    tier: str | None
    planned: Sequence[Planned]
    train: Split
    is_there: bool = True
    makes: int = 0
    whole_cluster: bool = True
    published: measure.Scale | None = None
    source: str | None = None


@dataclass(frozen=True)
class Privacy:
    """Epsilon, by convention, of runs with equal releases; None if it cannot be computed, or is infinite."""

    name: str = measure.cell("Row, first of", is_number=False)
    unit: str = measure.cell("unit", is_number=False)
    delta: float = measure.cell("delta", "{:.3g}".format)
    epsilons: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Power:
    """The power of a comparison of two runs, such as twins, with the correction that the plan's table makes."""

    tests: int = measure.cell("Comparisons of the table", measure.with_unit("{:,}", "comparisons"))
    canaries: int = measure.cell("Canaries of a run", measure.with_unit("{:,}", "canaries"))
    seeds: int = measure.cell("Seeds", measure.with_unit("{:,}", "seeds"))
    most_bits: float = measure.cell("Exposure of a completely memorized canary", measure.with_unit("{:.1f}", "bits"))
    bits: float | None = measure.cell("Least difference in mean exposure found", measure.with_unit("{:.2g}", "bits"))
    percent: float | None = measure.cell(
        f"Least difference in {MEMORIZED.heading} found", measure.with_unit("{:.2g}", "%")
    )
    effect: float = measure.cell("Difference in mean exposure to find (--effect)", measure.with_unit("{:g}", "bits"))
    power: float = measure.cell("Power to find it", measure.with_unit("{:.2g}", "%"))
    canaries_needed: int | None = measure.cell(
        "Canaries of a run that find it", measure.with_unit("{:,}", "canaries", MORE)
    )
    seeds_needed: int | None = measure.cell(
        "Seeds that find it, in a test over seeds", measure.with_unit("{:,}", "seeds", MORE)
    )
    sd_canaries: float = measure.cell("Assumed standard deviation over canaries", measure.with_unit("{:.1f}", "bits"))
    sd_seeds: float = measure.cell("Assumed standard deviation between seeds", measure.with_unit("{:.1f}", "bits"))


@dataclass(frozen=True)
class Plan:
    """A complete plan, in the order of its page; parts that do not apply are None or have no rows."""

    name: str
    tier: str | None
    machine: measure.Machine
    time: measure.Time | None
    measurement: measure.Measurement | None
    disk: Disk
    times: tuple[measure.RunTime, ...]
    finetuning: tuple[Finetuning, ...]
    scale: measure.Scale
    published: measure.Scale | None
    source: str | None
    privacy: tuple[Privacy, ...]
    provable: tuple[Provable, ...]
    power: Power | None


def read_request(
    file: Path,
    folder: Path,
    tier: str | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    corpus: Path | str | None = None,
    overrides: Sequence[str] = (),
) -> Request:
    """Read the input of a plan from the file of a run, or of a sweep, which has grids; see `Request`.

    A synthetic corpus, which is made to be measured, goes to `folder`. Raises InputError if the file is wrong, an
    option does not apply to it, or no run could have its settings. It is also raised if the corpus does not exist and
    its users are not known.
    """
    if "grids" not in toml.read(file):
        for option, value in (("--tier", tier), ("--seeds", seeds), ("--only", only)):
            if value:
                raise InputError(f"{option} is for a sweep, and {file} is a run's configuration; remove it")
        config = load(file, overrides)
        if corpus is not None:
            config = replace(config, data=replace(config.data, corpus=located(corpus)))
        opened = Corpus.open(config.data.corpus)
        config = settled_on(config, opened)
        run = Planned(file.stem, file.stem, config.seed, {}, None, config)
        refuse_impossible_runs([run], opened)
        return Request(file.stem, None, [run], opened.split("train"))
    sweep, tier = definition.load(file), tier or "smoke"
    at = definition.tier_of(sweep, tier, str(file))
    users, makes = None, 0
    try:
        path = corpus or corpus_of(at, file, folder)
    except InputError as error:
        users = measure.published_users(sweep)
        if users is None:
            raise
        path = folder / "corpus"
        say(
            f"{error}; until the corpus exists, the plan assumes the published number of users, all equal, and "
            "measures no time or memory"
        )
    planned = definition.planned_runs(sweep, at, path, str(file), seeds, only, overrides)
    train = users.split() if users else None
    refuse_impossible_runs(planned, corpus_or_its_settings(at, path, folder) if train is None else train)
    if train is None:
        opened = open_corpus(at, path, folder)
        train = opened.split("train")
        planned = [replace(run, config=settled_on(run.config, opened)) for run in planned]
        makes = corpus_bytes(opened) if opened.path.parent == folder else 0
    return Request(
        file.stem,
        tier,
        planned,
        train,
        is_there=users is None,
        makes=makes,
        whole_cluster=at.whole_cluster,
        published=measure.published_scale(sweep, planned, str(file), only),
        source=sweep.published.source if sweep.published else None,
    )


def plan_of(
    request: Request,
    machine: measure.Machine,
    effect: float,
    spread: power.Spread = power.DEMO,
    measured: tuple[Mapping[str, measure.Cost], measure.Measurement] | None = None,
    at_once: int | None = None,
) -> Plan:
    planned, train, whole_cluster = request.planned, request.train, request.whole_cluster
    scale = measure.scale_of(measure.rows_of(planned), train, request.published)
    say_crowded(scale.share)
    slots = 1 if whole_cluster else max(machine.runs_at_once(run.config, at_once) for run in planned)
    slots = min(slots, len(planned))
    costs, measurement = measured or ({}, None)
    times = measure.times_of(planned, costs, train, machine, at_once, whole_cluster) if measurement else ()
    seeds = len({run.seed for run in planned})
    return Plan(
        request.name,
        request.tier,
        machine,
        measure.time_of(times, measurement.overhead) if measurement else None,
        measurement,
        disk_of(planned, train, slots, request.makes),
        times,
        finetuning_of(planned, train),
        scale,
        request.published,
        request.source,
        tuple(privacy_of(planned, train)),
        provable_of(planned, train),
        power_of(scale.number, seeds, planned[0].config.evaluation, effect, comparisons_of(planned), spread),
    )


def privacy_of(planned: Sequence[Planned], train: Split) -> list[Privacy]:
    """Return epsilon of runs with noise, under every convention for their sampler; once for equal releases."""
    by_release: dict[Any, Privacy] = {}
    for run in planned:
        config = run.config
        if config.privacy.mechanism != "dp":
            continue
        split = measure.trained_on(config, train)
        population = config.protected(split)
        entry, delta = config.planned(population, config.rounds_over(split)), config.privacy.delta_for(population)
        if (entry, delta) not in by_release:
            lines = [(line.convention.name, line.epsilon) for line in report(Ledger((entry,)), delta)]
            epsilons = {name: value if value is not None and math.isfinite(value) else None for name, value in lines}
            by_release[entry, delta] = Privacy(measure.row_name(run), config.unit, delta, epsilons)
    return list(by_release.values())


def comparisons_of(planned: Sequence[Planned]) -> int:
    """Return the number of comparisons of a plan's table: rows that have runs of both partitions; at least 1."""
    partitions: dict[str, set[str | None]] = {}
    for run in planned:
        partitions.setdefault(measure.row_name(run), set()).add(run.config.partition)
    return max(1, sum({"iid", "non-iid"} <= of_row for of_row in partitions.values()))


def power_of(
    canaries: int,
    seeds: int,
    evaluation: EvaluationHParams,
    effect: float,
    tests: int = 1,
    spread: power.Spread = power.DEMO,
) -> Power | None:
    """Return the power of one of `tests` comparisons, by `flsim.results.power`; None without canaries.

    Of k comparisons Holm's correction finds each one whose p is at most alpha / k, whatever the others are. Therefore
    the power is the least that the comparison has in the table.
    """
    if not canaries:
        return None
    alpha, most = power.ALPHA / tests, math.log2(evaluation.references + 1)
    bits = power.detectable_exposure(canaries, seeds, spread, alpha)
    counts = power.detectable_counts(canaries, alpha=alpha)
    return Power(
        tests,
        canaries,
        seeds,
        most_bits=most,
        bits=bits if bits <= most else None,
        percent=100 * counts if math.isfinite(counts) else None,
        effect=effect,
        power=100 * power.power_of_exposure(effect, canaries, seeds, spread, alpha),
        canaries_needed=power.canaries_for(effect, seeds, spread, alpha),
        seeds_needed=power.seeds_for(effect, canaries, spread, alpha),
        sd_canaries=spread.canaries,
        sd_seeds=spread.seeds,
    )


def page(plan: Plan) -> str:
    """Return the plan as text with at most 80 characters per line."""
    runs = sum(row.runs for row in plan.scale.rows)
    tier = f", tier {plan.tier}" if plan.tier else ""
    title = f"{plan.name}{tier}. Runs: {runs:,}. Cores: {plan.machine.cores}. GPUs: {plan.machine.gpus}."
    proof = "".join(map(note, dict.fromkeys(filter(None, [BOUNDS, *(row.note for row in plan.provable)]))))
    sections = {
        "Time, memory and disk" if plan.time else "Disk": measure.answers(
            *filter(None, (plan.time, plan.measurement, plan.disk))
        ),
        "Time of a run": measure.table(plan.times) if plan.times else "",
        "Training of Hugging Face models": measure.table(plan.finetuning, note(FINETUNING)) if plan.finetuning else "",
        "Scale and amount of training": measure.scale_tables(plan.scale, plan.published, plan.source),
        "Epsilon": _epsilons(plan.privacy) if plan.privacy else "",
        "Largest provable epsilon": measure.table(plan.provable, proof) if plan.provable else "",
        "Statistical power": measure.answers(plan.power) + note(FOUND) if plan.power else "",
    }
    texts = [f"## {head}\n\n{text.rstrip()}\n" for head, text in sections.items() if text]
    return "\n".join([note(title), *texts])


def _epsilons(rows: Sequence[Privacy]) -> str:
    names = dict.fromkeys(name for row in rows for name in row.epsilons)
    cells = [Column(name + "*" * (name == "paper"), [_epsilon(row, name) for row in rows]) for name in names]
    label, *others = measure.columns(rows)
    sound = soundness() if any(row.unit == "user" for row in rows) else RECORDS
    return markdown([label], [others, *([one] for one in cells)], (STAR if "paper" in names else "") + sound)


def _epsilon(row: Privacy, convention: str) -> str:
    if convention not in row.epsilons:
        return ""
    value = row.epsilons[convention]
    return "-" if value is None else f"{value:.0e}" if value >= 1e6 else measure.three_digits(value)
