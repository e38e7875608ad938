"""A plan as text for people, with at most 80 characters per line and short numbers."""

import math
from collections.abc import Iterator, Sequence

from flsim.measures.random_sampling import MEMORIZED
from flsim.planning.amounts_text import training
from flsim.planning.plan import Plan, Privacy
from flsim.planning.proof_text import proof
from flsim.planning.scale import Canaries, Row, Scale
from flsim.privacy.table import SOUND, STAR
from flsim.results.power import SD_CANARIES, SD_SEEDS
from flsim.show.formats import note
from flsim.show.layout import Column, markdown

RECORDS = "Sound: sensitivity S under add-or-remove-one of a record, with Poisson sampling.\n"
BUSY = 0.1  # share of the cores that others take, from which on times say so

COPIES = " Sharers: p_u x users. Copies: expected copies of a canary."


def page(plan: Plan) -> str:
    """Return the whole plan as text."""
    runs = sum(row.runs for row in plan.scale.rows)
    tier = f", tier {plan.tier}" if plan.tier else ""
    title = note(f"{plan.name}{tier}: {count(runs, 'run')} on {_machine(plan)}")
    sections = [
        _scale(plan),
        training(plan),
        _time(plan),
        _memory(plan),
        _disk(plan),
        _privacy(plan.privacy),
        proof(plan.provable),
        _power(plan),
    ]
    return "\n".join([title, *(text.rstrip("\n") + "\n" for text in [*sections, _against(plan)] if text)])


def duration(seconds: float) -> str:
    """Return an approximate duration: 40 s, 12 min, 3.5 h, 20 days."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        amount, most = seconds / size, {"s": 90, "min": 90, "h": 48}[unit]
        if amount < most:
            return f"{amount:.1f} {unit}" if amount < 9.95 and unit == "h" else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:,.1f} days" if seconds < 10 * 86_400 else f"{seconds / 86_400:,.0f} days"


def size(amount: float) -> str:
    """Return bytes in powers of ten: 4.1 GB."""
    return f"{amount:.0f} B" if amount < 1e3 else f"{_three(amount)}B"


def number(amount: float) -> str:
    """Return a short number: 11,896 or 92.9 M."""
    return f"{amount:,.0f}" if amount < 1e6 else _three(amount).rstrip()


def count(amount: int, what: str) -> str:
    return f"{amount:,} {what}{'s' * (amount != 1)}"


def share(fraction: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * fraction:.2g}%" if fraction < 0.995 else f"{100 * fraction:.0f}%"


def _three(amount: float) -> str:
    power = min(4, int(math.log10(max(amount, 1) * 1.0005) // 3))
    value = amount / 1000**power
    return f"{value:.{0 if value >= 99.95 else 1}f} {['', 'k', 'M', 'G', 'T'][power]}"


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _machine(plan: Plan) -> str:
    gpus = f" and {count(plan.machine.gpus, 'GPU')}" if plan.machine.gpus else ""
    return count(plan.machine.cores, "core") + gpus


def _heading(title: str) -> str:
    return f"## {title}\n\n"


def _scale(plan: Plan) -> str:
    ours, theirs = plan.scale, plan.published
    labels = [Column("", ["Users", "Records", "Vocabulary", "Canaries", "of all records"], is_number=False)]
    scales = {"Here": ours} | ({"Published": theirs} if theirs else {})
    units = [[Column(name, _facts(scale)) for name, scale in scales.items()]]
    names = Column("Rows", [row.name for row in ours.rows], is_number=False)
    counts = Column("Canaries", [str(canaries.count) for canaries in ours.canaries])
    text = "Length: number of rounds, each of `batch` users, or for SGD of steps, each of `batch` records."
    text += " Share: share of all users in a round." * any(row.share is not None for row in ours.rows)
    if ours.canaries:
        has_copies = ours.canaries[0].p_u is None
        text += " Copies: copies of a canary." if has_copies else COPIES
    if theirs is not None:
        text += f" Published: {plan.source}, {number(theirs.users.users)} users of about "
        text += f"{theirs.users.records / theirs.users.users:.0f} records."
    tables = [(labels, units), ([names], list(_rows(ours, theirs)))]
    tables += [([counts], list(_copies(ours, theirs)))] if ours.canaries else []
    return _heading("Scale") + "".join(markdown(*table) for table in tables) + note(text)


def _facts(scale: Scale) -> list[str]:
    users = scale.users
    records = f"{number(users.records)} ({_few(users.records / users.users)} a user)"
    return [number(users.users), records, number(users.vocabulary), str(scale.number), share(scale.share)]


def _rows(ours: Scale, theirs: Scale | None) -> Iterator[list[Column]]:
    def columns(rows: Sequence[Row], head: str) -> list[Column]:
        shares = [row.share for row in rows]
        return [
            Column(f"{head}batch", [number(row.size) for row in rows]),
            *([Column("share", ["" if share_ is None else share(share_) for share_ in shares])] if any(shares) else []),
            Column("epochs", [_few(row.epochs) for row in rows]),
        ]

    lengths = [
        Column("runs", [str(row.runs) for row in ours.rows]),
        Column("length", [number(r.length) for r in ours.rows]),
    ]
    yield [*lengths, *columns(ours.rows, "")]
    if theirs is not None and len(theirs.rows) == len(ours.rows):
        yield columns(theirs.rows, "publ. ")


def _copies(ours: Scale, theirs: Scale | None) -> Iterator[list[Column]]:
    def columns(canaries: Sequence[Canaries], head: str) -> list[Column]:
        copies = [Column("copies", [_few(group.copies) for group in canaries])]
        if any(group.window for group in canaries):
            copies.append(Column("planted", [group.window or "always" for group in canaries], is_number=False))
        if canaries[0].p_u is None:
            return copies
        return [
            Column(f"{head}p_u", [f"{group.p_u:.3g}" for group in canaries]),
            Column("p_e", [f"{group.p_e:g}" for group in canaries]),
            Column("sharers", [_few(group.sharers or 0) for group in canaries]),
            *copies,
        ]

    yield columns(ours.canaries, "")
    if theirs is not None and len(theirs.canaries) == len(ours.canaries):
        yield columns(theirs.canaries, "publ. ")


def _time(plan: Plan) -> str:
    time = plan.time
    if time is None:
        return ""
    text = f"About {duration(time.seconds)} ({duration(time.quickest)} to {duration(time.slowest)}), "
    text += "one run after another" if time.at_once == 1 else f"{time.at_once} runs at once"
    text += f"; measured in {duration(time.calibration)} on shortened copies of a few runs, trained as many at once."
    if plan.machine.busy is not None and plan.machine.busy > BUSY:
        text += (
            f" Other processes took {share(plan.machine.busy)} of the cores meanwhile: the times are for an equally "
            f"busy machine, and will be shorter on an idle one."
        )
    longest = sorted(time.runs, key=lambda name: -time.runs[name])
    listed = [(name, duration(time.runs[name])) for name in longest]
    listed_few = listed if len(listed) <= 8 else [*listed[:4], ("...", "..."), *listed[-3:]]
    table = markdown(
        [Column("Run", [name for name, _ in listed_few], is_number=False)],
        [[Column("Time", [time_ for _, time_ in listed_few])]],
    )
    return _heading("Time") + note(text) + "\n" + table


def _memory(plan: Plan) -> str:
    memory = plan.memory
    if memory is None:
        return ""
    kinds = ", ".join(f"{kind} {size(held)}" for kind, held in memory.of_run.items())
    text = f"About {size(memory.total)} at the peak, all processes together. A run takes {size(memory.run)} ({kinds}, "
    return _heading("Memory") + note(text + f"each at its own peak); what starts the runs {size(memory.rest)}.")


def _disk(plan: Plan) -> str:
    disk = plan.disk
    text = f"{size(disk.total)}: {count(disk.kept, 'checkpoint')} {size(disk.checkpoints)}, "
    text += f"planted canaries and IID twins {size(disk.planted)}, rows and logs {size(disk.rest)}"
    text += f", the corpus {size(disk.corpus)}" if disk.corpus else ""
    return _heading("Disk") + note(f"{text}; {size(disk.meanwhile)} more meanwhile.")


def _privacy(rows_of_privacy: Sequence[Privacy]) -> str:
    if not rows_of_privacy:
        return ""
    names = list(dict.fromkeys(name for row in rows_of_privacy for name in row.epsilons))
    columns = [
        Column(
            name + "*" * (name == "paper"),
            [_epsilon(row.epsilons.get(name), name in row.epsilons) for row in rows_of_privacy],
        )
        for name in names
    ]
    deltas = Column("delta", [f"{row.delta:.3g}" for row in rows_of_privacy])
    rows = Column(
        "Rows", [f"{row.name}" + ", of a record" * (row.unit == "record") for row in rows_of_privacy], is_number=False
    )
    star = STAR if "paper" in names else ""
    sound = SOUND if any(row.unit == "user" for row in rows_of_privacy) else RECORDS
    return _heading("Epsilon") + markdown([rows], [[deltas], *([column] for column in columns)]) + star + sound


def _epsilon(value: float | None, is_of_sampler: bool) -> str:
    if not is_of_sampler:
        return ""
    if value is None:
        return "-"
    return f"{value:.0e}" if value >= 1e6 else _few(value)


def _power(plan: Plan) -> str:
    """Return the section on power; each sentence is about one kind of test: over canaries, or over seeds."""
    power = plan.power
    if power is None:
        return ""
    canaries = f"{power.canaries:,} canar{'y' if power.canaries == 1 else 'ies'}"
    effect = f"{power.effect:g} {'bit' if power.effect == 1 else 'bits'}"
    seeds_needed = "no number of" if power.seeds_needed is None else f"{power.seeds_needed:,}"
    is_one = power.seeds == 1
    what, where = ("runs", canaries) if is_one else ("settings", f"{canaries} in each of {count(power.seeds, 'seed')}")
    text = (
        "One seed is tested over its canaries: about one pair of models, and not about other seeds. "
        if is_one
        else "Several seeds are tested over seeds: about the settings, and not about one pair of models. "
    )
    text += f"With {where} a mean difference in exposure between two {what}, such as twins, "
    text += "is not found" if power.bits is None else f"of {power.bits:.2g} bits is found with 80% power"
    text += f" (a canary has at most {power.most_bits:.1f} bits). "
    text += f"A difference of {effect} is found with {share(power.found)} power. "
    if power.canaries_needed is None:
        text += f"More canaries {'' if is_one else 'in each seed '}do not raise that to 80%"
    else:
        text += f"To find it with 80% takes {power.canaries_needed:,} canaries{'' if is_one else ' in each seed'}"
    text += (
        f". Other seeds are another question: over seeds, the same difference between two settings takes "
        f"{seeds_needed} seeds of {canaries}."
        if is_one
        else f"; {seeds_needed} seeds of {canaries} do."
        if power.canaries_needed is None
        else f", or {seeds_needed} seeds of {canaries}."
    )
    if power.counts is not None:
        text += f" Of one pair of models, McNemar's test over canaries finds a difference in {MEMORIZED.heading} of "
        text += f"{share(power.counts)} of canaries with 80% power."
    if power.tests > 1:
        text += (
            f" All of this is of one of the {power.tests} comparisons of this plan's table, which corrects for their "
        )
        text += "number (Holm): the power is the least, as if no other comparison found a difference."
    return _heading("Statistical power") + note(
        f"{text} Differences are assumed to spread by {SD_CANARIES:.1f} bits over canaries and {SD_SEEDS:.1f} between "
        f"seeds, as they did in the demo at a rate of 1."
    )


def _against(plan: Plan) -> str:
    if not plan.against:
        return ""
    lines = []
    for session in plan.against:
        seconds = duration(session.seconds) if session.seconds else "no time recorded"
        text = f"{count(session.runs, 'run')}: {seconds}, predicted {duration(session.predicted_seconds)}"
        if session.seconds:
            text += f" ({session.predicted_seconds / session.seconds - 1:+.0%})"
        if session.memory:
            text += f"; {size(session.memory)}, predicted {size(session.predicted_memory)}"
            text += f" ({session.predicted_memory / session.memory - 1:+.0%})"
        lines.append(note(text))
    return _heading("Predicted and recorded") + "".join(lines)
