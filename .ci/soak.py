"""A long run of a small model, and the resources of each of its processes over the rounds: `make soak`.

A short run is a test.

Sources: /proc for memory, descriptors and threads, and the raylet's count of objects, as in `ray memory`. Slopes are
least squares over means of blocks of rounds after the warm-up. Consecutive samples are not independent, and would make
an interval too narrow.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import psutil
import typer
from matplotlib.figure import Figure
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
from scipy.stats import linregress, t

from flsim.base.progress import progress
from flsim.show.figure import DASHES, LINES, ROUNDS, write_figure

CONFIG = """
[data]
corpus = "corpus"
[canaries]
p_u = [0.2]
p_e = [0.5]
count = 4
[model]
embedding = 32
units = 64
[training]
rounds = {rounds}
cohort = 8
[local]
batch_size = 16
[evaluation]
every = {every}
references = 500
[system]
checkpoint_every = {every}
"""
USERS = ("--users", "40", "--words-per-user", "60", "--vocabulary", "2000", "--test-users", "4", "--heldout-users", "4")
WARM_UP = 0.2  # share of the rounds
BLOCKS = 20  # share of the rest
PAPER_ROUNDS = 7_840  # flat: the growth over the paper's run is below this share of the present value
SHARE = 0.10
TITLES = {"ray::Client": "client", "ray::_Evaluator": "evaluator", "DashboardAgent": "dashboard agent"}
TITLES |= {"RuntimeEnvAgent": "environments' agent"}
MEGABYTE = 2**20


@dataclass
class Held:
    """The resources of a process, a value for each sample.

    Attributes:
        kind: what it is.
        rounds: that were completed.
        resident: bytes in memory, with those of mapped files and those shared with other processes.
        own: bytes of them that are private to the process.
        descriptors: open files, sockets and the like.
        threads: their number.
    """

    kind: str
    rounds: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


@dataclass
class Objects:
    """The objects in Ray, a value for each sample.

    Attributes:
        rounds: that were completed.
        references: to objects, of all processes.
        owned: objects of which a process is the owner.
        stored: bytes in the object store; it frees unreferenced objects once a second.
    """

    rounds: list[int] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Soaked:
    """A run, sampled."""

    rounds: int
    seconds: float
    processes: list[Held]
    objects: Objects


def soak(folder: Path, rounds: int, every: int, seconds: float = 0.5) -> Soaked:
    """Train in the folder, in the process of the command, and sample its processes during training.

    Args:
        folder: an empty one.
        rounds: of the run.
        every: rounds between two evaluations.
        seconds: between two samples.
    """
    flsim = [sys.executable, "-m", "flsim"]
    subprocess.run(
        [*flsim, "data", "synthetic", "--out", "corpus", *USERS], cwd=folder, check=True, capture_output=True
    )
    (folder / "soak.toml").write_text(CONFIG.format(rounds=rounds, every=every))
    began, processes, objects = time.monotonic(), dict[int, Held](), Objects()
    ask: Callable[[], tuple[int, int, int]] | None = None
    with (folder / "said").open("wb") as output, progress("soak", rounds) as advance:
        command = [*flsim, "run", "soak.toml", "--out", "run"]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=output)
        try:
            while run.poll() is None:
                time.sleep(seconds)
                done = _rounds(folder / "run")
                if not 0 < done < rounds:
                    continue  # it starts, or ends
                advance(done)
                for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                    _sample(process, run.pid, done, processes)
                ask = ask or _asking(next(pid for pid, held in processes.items() if held.kind == "raylet"))
                for values, value in zip((objects.references, objects.owned, objects.stored), ask(), strict=True):
                    values.append(value)
                objects.rounds.append(done)
        finally:
            run.kill()
            run.wait()
    if run.returncode:
        raise RuntimeError((folder / "said").read_text())
    return Soaked(rounds, time.monotonic() - began, list(processes.values()), objects)


def _rounds(run: Path) -> int:
    return (run / "rounds.jsonl").read_text().count("\n") if (run / "rounds.jsonl").exists() else 0


def _sample(process: psutil.Process, driver: int, done: int, into: dict[int, Held]) -> None:
    try:
        with process.oneshot():
            memory, descriptors, threads = process.memory_info(), process.num_fds(), process.num_threads()
            name, line = process.name(), " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return
    if not line:  # it is ending: it has released its memory, and has no title
        return
    held = into.setdefault(process.pid, Held(""))
    known = (kind for part, kind in TITLES.items() if part in line)
    held.kind = "driver" if process.pid == driver else next(known, name)  # Ray's get their title once they have work
    held.rounds.append(done)
    held.resident.append(memory.rss)
    held.own.append(memory.rss - memory.shared)
    held.descriptors.append(descriptors)
    held.threads.append(threads)


def _asking(raylet: int) -> Callable[[], tuple[int, int, int]]:
    """Return a function that asks a raylet for references, objects that are owned, and bytes in the store."""
    line = psutil.Process(raylet).cmdline()
    address = next(part.partition("=")[2] for part in line if part.startswith("--gcs-address="))
    state = GlobalState()
    options = {"allow_cluster_id_nil": True, "fetch_cluster_id_if_nil": False}
    state._initialize_global_state(GcsClientOptions.create(address, None, **options))
    (node,) = state.node_table()
    state.disconnect()  # a process that is connected is ended when Ray is
    channel = grpc.insecure_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    stub, request = node_manager_pb2_grpc.NodeManagerServiceStub(channel), node_manager_pb2.GetNodeStatsRequest()
    last = (0, 0, 0)

    def ask() -> tuple[int, int, int]:
        nonlocal last
        try:
            reply = stub.GetNodeStats(request, timeout=10)
        except grpc.RpcError:  # it ends
            return last
        workers = reply.core_workers_stats
        references = sum(worker.num_object_refs_in_scope for worker in workers)
        owned = sum(worker.num_owned_objects for worker in workers)
        last = references, owned, reply.store_stats.object_store_bytes_used
        return last

    return ask


@dataclass(frozen=True)
class Slope:
    """Per 1,000 rounds, with its 95% interval."""

    value: float
    error: float

    @classmethod
    def fit(cls, rounds: list[int], values: list[int]) -> "Slope":
        """Least squares over means of blocks, Student's t."""
        blocks = [(np.mean(x), np.mean(y)) for x, y in _blocks(rounds, values)]
        fit = linregress(*zip(*blocks, strict=True))
        error = 0.0 if fit.slope == 0 else float(fit.stderr * t.ppf(0.975, len(blocks) - 2))
        return cls(1_000 * float(fit.slope), 1_000 * error)

    def is_flat(self, unit: float) -> str:
        """Return the interval of the growth over a run of the paper's length, as a share of `of`."""
        least, most = ((self.value + end) * PAPER_ROUNDS / 1_000 / unit for end in (-self.error, self.error))
        return "yes" if most < SHARE else "**no**" if least > SHARE else "unclear"


def _blocks(rounds: list[int], values: list[int]) -> list[tuple[list[int], list[int]]]:
    x, y = (np.array_split(item, min(BLOCKS, len(item) // 3)) for item in (rounds, values))
    return [(list(a), list(b)) for a, b in zip(x, y, strict=True)]


def after_warm_up(rounds: list[int], values: list[int], total: int) -> tuple[list[int], list[int]]:
    kept = [(x, y) for x, y in zip(rounds, values, strict=True) if x >= WARM_UP * total]
    return [x for x, _ in kept], [y for _, y in kept]


def describe(soaked: Soaked) -> str:
    """Return a table in Markdown, and its conclusion."""
    lines = [
        f"{soaked.rounds:,} rounds in {soaked.seconds:.0f} s, {len(soaked.objects.rounds)} samples; slopes after the "
        f"first {WARM_UP:.0%} of rounds, in KB a 1,000 rounds, with 95% intervals",
        "",
        "| process | MB first, last, peak | slope of resident | slope of its own | descriptors | threads | flat |",
        "|---|---|---:|---:|---|---|---|",
    ]
    lines += [_row(held, soaked.rounds) for held in sorted(soaked.processes, key=lambda item: -item.resident[-1])]
    objects = soaked.objects
    for name, values in (("references", objects.references), ("owned", objects.owned), ("bytes", objects.stored)):
        _, late = after_warm_up(objects.rounds, values, soaked.rounds)
        lines.append(
            f"| Ray objects: {name} | {_ends(late)}, most {max(late)} | | | | | {'**no**' if grows(late) else 'yes'} |"
        )
    rule = (
        f"flat: the upper end of the interval adds less than {SHARE:.0%} in {PAPER_ROUNDS:,} rounds, the paper's run; "
    )
    return "\n".join(
        [*lines, "", rule + "of descriptors, threads and objects: no more in the last fifth than in the first."]
    )


def _row(held: Held, total: int) -> str:
    if len(after_warm_up(held.rounds, held.rounds, total)[0]) < 9:  # three blocks of three
        return f"| {held.kind} | {_megabytes(held.resident)} | | | | | too short |"
    own, resident = (Slope.fit(*after_warm_up(held.rounds, series, total)) for series in (held.own, held.resident))
    descriptors, threads = (after_warm_up(held.rounds, series, total)[1] for series in (held.descriptors, held.threads))
    flat = "**no**" if grows(descriptors) or grows(threads) else resident.is_flat(held.resident[-1])
    slopes = " | ".join(f"{item.value / 1024:+,.0f} ± {item.error / 1024:,.0f}" for item in (resident, own))
    ends = f"{_ends(descriptors)} | {_ends(threads)}"
    return f"| {held.kind} | {_megabytes(held.resident)} | {slopes} | {ends} | {flat} |"


def grows(values: list[int]) -> bool:
    """Return whether all values of the last fifth exceed all of the first fifth, as with a leak."""
    fifth = max(1, len(values) // 5)
    return min(values[-fifth:]) > max(values[:fifth])


def _ends(values: list[int]) -> str:
    return f"{values[0]} to {values[-1]}"


def _megabytes(values: list[int]) -> str:
    return ", ".join(f"{item / MEGABYTE:.1f}" for item in (values[0], values[-1], max(values)))


def _draw(soaked: Soaked) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, held in enumerate(sorted(soaked.processes, key=lambda item: -item.resident[-1])):
        style: dict[str, Any] = {"color": LINES[index % len(LINES)], "linestyle": DASHES[index % len(DASHES)]}
        axes.plot(held.rounds, [item / MEGABYTE for item in held.resident], label=held.kind, **style)
    axes.set(xlabel=ROUNDS, ylabel="resident memory, MB", ylim=(0, None))
    figure.legend(loc="outside right upper")
    return figure


def main(
    rounds: Annotated[int, typer.Option(min=100)] = 2_000,
    every: Annotated[int, typer.Option(min=1, help="Rounds between two evaluations.")] = 100,
    out: Annotated[Path | None, typer.Option(help="Figure, .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all samples.")] = False,
) -> None:
    """Train for a long time, and report whether anything grows."""
    with tempfile.TemporaryDirectory(prefix="flsim-soak-") as folder:
        soaked = soak(Path(folder), rounds, every)
    if out:
        write_figure(lambda: _draw(soaked), out)
    typer.echo(json.dumps(asdict(soaked)) if as_json else describe(soaked))


if __name__ == "__main__":
    typer.run(main)
