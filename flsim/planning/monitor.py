"""Monitor of training runs: peak memory by kind of process, start of each run, and computation of other processes."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

EVERY = 1.0  # seconds between two looks; a look costs some milliseconds for each process
DRIVER, TRAINING, EVALUATOR, RAY = "driver", "training", "evaluator", "Ray"


class Watch:
    """Measurements of this process and all its descendants; see `watching`.

    Memory is proportional set size: a page that k processes share counts 1/k in each.

    Attributes:
        peak: bytes of all processes.
        of_run: largest bytes that a run's processes of a kind held together, by kind of process.
        run: largest bytes that all processes of one run held.
        rest: bytes of processes that belong to no run.
        began: seconds since 1970 when the process of a run started, by run folder.
        others: share of all cores that other processes took since the start. It is slightly too high, because the last
            second of a process of ours is not seen.
    """

    def __init__(self) -> None:
        self.peak = self.run = self.rest = 0
        self.of_run: dict[str, int] = dict.fromkeys((DRIVER, TRAINING, EVALUATOR, RAY), 0)
        self.began: dict[str, float] = {}
        self.others = 0.0
        self._computed: dict[int, float] = {}
        self._at_first: tuple[float, float, float] | None = None

    def look(self) -> None:
        """Take one sample."""
        held: defaultdict[str | None, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for process, command, run in _tree():
            with suppress(psutil.Error):
                held[run][kind_of(command)] += process.memory_full_info().pss
                times = process.cpu_times()
                self._computed[process.pid] = times.user + times.system
                if run is not None and run_of(command):
                    self.began.setdefault(run, process.create_time())
        self._look_at_others()
        of_runs = [kinds for run, kinds in held.items() if run is not None]
        self.peak = max(self.peak, sum(sum(kinds.values()) for kinds in held.values()))
        self.rest = max(self.rest, sum(held[None].values()))
        self.run = max([self.run, *(sum(kinds.values()) for kinds in of_runs)])
        for kind in self.of_run:
            self.of_run[kind] = max([self.of_run[kind], *(kinds[kind] for kinds in of_runs)])

    def _look_at_others(self) -> None:
        """Update the share of others: work of all cores since the first sample, minus the work of ours."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        now = (sum(times[:8]), idle, sum(self._computed.values()))  # guests are in the first two
        self._at_first = self._at_first or now
        self.others = share_of_others(self._at_first, now)


@contextmanager
def watching() -> Iterator[Watch]:
    """Sample about once a second, in a thread, until the block ends."""
    watch, over = Watch(), threading.Event()

    def keep_looking() -> None:
        watch.look()
        while not over.wait(EVERY):
            watch.look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def share_of_others(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the share of the cores' capacity that other processes used between two samples.

    A sample holds seconds of all cores, of idle ones, and of our processes.
    """
    whole, idle, ours = (then - first for first, then in zip(before, after, strict=True))
    return min(max(0.0, (whole - idle - ours) / whole), 1.0) if whole > 0 else 0.0


def kind_of(command: list[str]) -> str:
    """Return the purpose of a run's process by its command line, which Ray's workers set to their work."""
    name = command[0] if command else ""
    if "-m" in command and "flsim" in command:
        return DRIVER
    if name.startswith("ray::") and not name.startswith("ray::IDLE") and not name.endswith("Agent"):
        return EVALUATOR if "Evaluator" in name else TRAINING
    return RAY


def run_of(command: list[str]) -> str | None:
    """Return the run folder of a `flsim run`, or None."""
    if command[1:4] == ["-m", "flsim", "run"] and "--out" in command:
        return command[command.index("--out") + 1]
    return None


def _tree() -> Iterator[tuple[psutil.Process, list[str], str | None]]:
    """Yield this process and all its descendants, each with its command line and the run that it belongs to."""
    commands: dict[int, list[str]] = {}
    above: dict[int, int] = {}
    below = [psutil.Process(), *psutil.Process().children(recursive=True)]
    for process in below:
        with suppress(psutil.Error):
            commands[process.pid], above[process.pid] = process.cmdline(), process.ppid()
    for process in below:
        run, number = None, process.pid
        while number in commands and run is None:
            run, number = run_of(commands[number]), above[number]
        if process.pid in commands:
            yield process, commands[process.pid], run
