"""Peak memory of training runs by what their processes are for, and when each run's process started."""

import threading
from collections import defaultdict
from collections.abc import Iterator
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
    """

    def __init__(self) -> None:
        self.peak = self.run = self.rest = 0
        self.of_run: dict[str, int] = dict.fromkeys((DRIVER, TRAINING, EVALUATOR, RAY), 0)
        self.began: dict[str, float] = {}

    def look(self) -> None:
        """Look once."""
        held: defaultdict[str | None, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for process, command, run in _tree():
            with suppress(psutil.Error):
                held[run][kind_of(command)] += process.memory_full_info().pss
                if run is not None and run_of(command):
                    self.began.setdefault(run, process.create_time())
        of_runs = [kinds for run, kinds in held.items() if run is not None]
        self.peak = max(self.peak, sum(sum(kinds.values()) for kinds in held.values()))
        self.rest = max(self.rest, sum(held[None].values()))
        self.run = max([self.run, *(sum(kinds.values()) for kinds in of_runs)])
        for kind in self.of_run:
            self.of_run[kind] = max([self.of_run[kind], *(kinds[kind] for kinds in of_runs)])


@contextmanager
def watching() -> Iterator[Watch]:
    """Look about once a second, in a thread, until the block ends."""
    watch, over = Watch(), threading.Event()

    def keep_looking() -> None:
        while not over.wait(EVERY):
            watch.look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def kind_of(command: list[str]) -> str:
    """What a process of a run is for, by its command line, which Ray's workers set to what they work on."""
    name = command[0] if command else ""
    if "-m" in command and "flsim" in command:
        return DRIVER
    if name.startswith("ray::") and not name.startswith("ray::IDLE"):
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
