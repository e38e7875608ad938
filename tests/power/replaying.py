"""Replay of each state that a loss of power can cause: laid out in a folder, continued, and counted."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from power.disk import Disk, Op, State, digest, lay_out

from flsim.base.rng import stream

IS_WHOLE, SEED = bool(os.environ.get("CHAOS_KILLS")), int(os.environ.get("CHAOS_SEED", "0"))

GoOn = Callable[[Path], str]  # continues in a folder; returns the result in a word, or raises AssertionError


@dataclass
class Replay:
    """The results of the states of one recording.

    `ends` counts states by their result, in a word; `last` counts only the states that are possible once the command
    has ended. `wrong` has the errors, with the state's place."""

    name: str
    steps: int
    states: int
    distinct: int
    ends: Counter[str] = field(default_factory=Counter)
    last: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Return a row of the table in docs/reliability.md."""
        ends = ", ".join(f"{count:,} {end}" for end, count in self.ends.most_common())
        numbers = (self.steps, self.states, self.distinct, self.ends.total())
        return f"| {self.name} | {' | '.join(f'{number:,}' for number in numbers)} | {ends} |"


HEAD = "| recording | steps | states | that differ | tried | what came of them |\n|---|---:|---:|---:|---:|---|"


def replay(
    name: str,
    ops: Sequence[Op],
    scratch: Path,
    go_on: GoOn,
    sample: int | None,
    start: State | None = None,
    leave_out: str = "$.",
) -> Replay:
    """Lose power after each step, in every way that the disk simulates, and continue from each different state once.

    States are laid out in `scratch`, one at a time; `sample` of them are tried, spread over the steps, or all. The
    folder starts with `start`, all of which is safe. Power is not lost after steps with paths of the pattern
    `leave_out`."""
    disk, rng = Disk(start), stream(SEED, "power", name)
    by_digest: dict[str, tuple[int, State]] = {}
    equal, steps = Counter[str](), sum(not re.match(leave_out, op.path) for op in ops)
    for step, op in enumerate(ops):
        disk.apply(op)
        for state in () if re.match(leave_out, op.path) else disk.states(rng):
            equal[name_of := digest(state)] += 1
            if rng.random() < 1 / equal[name_of]:  # any of the equal states: they may differ in unread files
                by_digest[name_of] = step, state
    last = {digest(state) for state in disk.states(rng)}
    distinct = sorted(by_digest.values(), key=lambda tried: tried[0])
    made = Replay(name, steps, equal.total(), len(distinct))
    if sample is not None and sample < len(distinct):
        ends = [len(distinct) * place // sample for place in range(sample + 1)]
        distinct = [distinct[int(rng.integers(first, end))] for first, end in pairwise(ends)]
        distinct.append((len(ops) - 1, disk.synced()))
    for step, state in distinct:
        folder = scratch / "state"
        lay_out(state, folder)
        try:
            end = go_on(folder)
            made.ends[end] += 1
            if digest(state) in last:
                made.last[end] += 1
        except Exception as error:
            where = f"after step {step + 1} ({ops[step].kind} {ops[step].path})"
            made.wrong.append(f"{where}: {type(error).__name__}: {str(error)[:1000]}".replace(str(folder), ""))
        shutil.rmtree(folder)
    return made
