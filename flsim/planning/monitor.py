"""Peak memory of training runs by what their processes are for, when each run started, and what others computed."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

EVERY = 1.0  # seconds between two looks; a look costs some milliseconds for each process
DRIVER, TRAINING, EVALUATOR, RAY = "driver", "training", "evaluator", "Ray"


class Watch:
    """What this process and all below it hold; see `watching`.

    Memory is proportional set size: a page that k processes share counts 1/k in each.

    Attributes:
        peak: bytes, of all processes.
        of_run: kind of process -> bytes, the most that a run's processes of that kind held together.
        run: bytes, the most that all processes of one run held.
        rest: bytes, of all that belongs to no run.
        began: folder of a run -> seconds since 1970 when its process started.
        others: share of all cores that processes of others took, since this began; a little too high, as what a process
            computed in its last second is not seen.
    """

    def __init__(self) -> None:
        self.peak = self.run = self.rest = 0
        self.of_run: dict[str, int] = dict.fromkeys((DRIVER, TRAINING, EVALUATOR, RAY), 0)
        self.began: dict[str, float] = {}
        self.others = 0.0
        self._computed: dict[int, float] = {}
        self._at_first: tuple[float, float, float] | None = None

    def look(self) -> None:
        """Look once."""
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
        """By what all cores did since the first look, less what was seen of ours."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        now = (sum(times[:8]), idle, sum(self._computed.values()))  # guests are in the first two
        self._at_first = self._at_first or now
        self.others = share_of_others(self._at_first, now)


@contextmanager
def watching() -> Iterator[Watch]:
    """Look about once a second, in a thread, until the block ends."""
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
    """What others computed, of all that cores could have: of seconds of all cores, idle ones, and ours, until then."""
    whole, idle, ours = (then - first for first, then in zip(before, after, strict=True))
    return min(max(0.0, (whole - idle - ours) / whole), 1.0) if whole > 0 else 0.0


def kind_of(command: list[str]) -> str:
    """What a process of a run is for, by its command line, which Ray's workers set to what they work on."""
    name = command[0] if command else ""
    if "-m" in command and "flsim" in command:
        return DRIVER
    if name.startswith("ray::") and not name.startswith("ray::IDLE") and not name.endswith("Agent"):
        return EVALUATOR if "Evaluator" in name else TRAINING
    return RAY


def run_of(command: list[str]) -> str | None:
    """The run folder of a `flsim run`."""
    if command[1:4] == ["-m", "flsim", "run"] and "--out" in command:
        return command[command.index("--out") + 1]
    return None


def _tree() -> Iterator[tuple[psutil.Process, list[str], str | None]]:
    """The process itself and all below it, each with its command line and the run that it belongs to."""
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
