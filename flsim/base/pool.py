"""Tasks in worker processes.

Unlike those of `concurrent.futures`, workers end with their parent, even after SIGKILL; a task whose worker dies is
tried once more, and one without a report for too long is killed; a worker imports the module of the task, not the main
module of the caller; and only the parent receives Ctrl-C.
"""

import faulthandler
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from flsim.base.errors import InputError

Report = Callable[[float], None]
TRIES = 2
HUNG = 1  # the exit code that faulthandler gives


class WorkerDied(InputError):  # noqa: N818 (what happened, as with RunFailed)
    """The error of a task whose process died in each attempt."""


def ignore(_amount: float) -> None:
    """Ignore progress within a task."""


@dataclass(frozen=True)
class Task:
    """A call ``function(report, *arguments)``, where `report` receives the progress since the last report."""

    label: str
    function: Callable[..., Any]  # a function of a module, which workers import by name
    arguments: tuple[Any, ...]  # arguments; they and the returned value must be picklable
    # seconds without a report after which the worker is killed. A task with such a limit never runs in the process of
    # the caller.
    silence: float | None = None


class Pool:
    """A pool of worker processes, which start when needed; a single worker is the process of the caller."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()

    def run(self, tasks: Sequence[Task], done: Callable[[int, Any], None], report: Report = ignore) -> None:
        """Run all tasks, which start in order; `done` gets the index and the value of each.

        Raises WorkerDied if a worker died `TRIES` times on the same task, or the error of the first failed task in
        order; later tasks can be missing.
        """
        if self.workers == 1 and not any(task.silence for task in tasks):
            for index, task in enumerate(tasks):
                done(index, task.function(report, *task.arguments))
            return
        waiting = list(range(len(tasks)))[::-1]
        deaths: Counter[int] = Counter()
        failed: dict[int, BaseException] = {}
        while True:
            while waiting and not failed and len(self._busy) < self.workers:
                worker = self._idle.pop() if self._idle else _Worker()
                self._busy[worker.connection] = (worker, waiting[-1])
                worker.start(tasks[waiting.pop()])
            running = [index for _, index in self._busy.values()]
            if failed and min(failed) < min(running, default=len(tasks)):
                raise failed[min(failed)]
            if not running:
                return
            for connection in wait(list(self._busy)):
                worker, index = self._busy[connection]  # type: ignore[index]
                kind, value = worker.receive()
                if kind == "report":
                    report(value)
                    continue
                del self._busy[worker.connection]
                if kind == "died":
                    worker.end()
                    deaths[index] += 1
                    waiting.append(index)
                    if deaths[index] == TRIES:
                        failed[index] = WorkerDied(f"{tasks[index].label}: {value}")
                    continue
                self._idle.append(worker)
                if kind == "failed":
                    failed[index] = value
                else:
                    done(index, value)


class _Worker:
    """A worker process, as seen by the parent."""

    def __init__(self) -> None:
        self.connection, other_end = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from flsim.base.pool import serve; serve({other_end.fileno()})"
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the child inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=2, pass_fds=[other_end.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        other_end.close()

    def start(self, task: Task) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died, which `receive` reports
            self.connection.send((task.function, task.arguments, task.silence))

    def receive(self) -> tuple[str, Any]:
        """Return ``report``, ``done`` or ``failed`` with a value, or ``died`` with the reason."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else "it hung" if code == HUNG else f"exit code {code}"
            return "died", (
                f"its process died {TRIES} times ({how}), because memory ran out or a file is damaged; repeat "
                "the command to continue"
            )
        return kind, value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()


def serve(descriptor: int) -> None:
    """Run tasks in a worker process, as they come through the connection, until the parent ends."""
    connection: Connection[Any, Any] = Connection(descriptor)
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()

    def send(kind: str, value: Any) -> None:
        try:
            connection.send((kind, value))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (faulthandler wants a file)
        while True:
            function, arguments, silence = tasks.get()

            def report(amount: float, silence: float | None = silence) -> None:
                _end_after(silence, nowhere)
                send("report", amount)

            try:
                _end_after(silence, nowhere)
                result = function(report, *arguments)
                faulthandler.cancel_dump_traceback_later()
                send("done", result)
            except Exception as error:
                faulthandler.cancel_dump_traceback_later()
                send("failed", _portable(error))


def _end_after(silence: float | None, nowhere: IO[str]) -> None:
    """End this process from a C thread, which no hanging library can prevent, unless it is called again in time."""
    if silence:
        faulthandler.dump_traceback_later(silence, exit=True, file=nowhere)


def _receive(connection: "Connection[Any, Any]", tasks: "queue.SimpleQueue[Any]") -> None:
    """Receive tasks even while a task runs, so that a worker ends immediately after its parent."""
    try:
        while True:
            tasks.put(connection.recv())
    except BaseException as error:
        if not isinstance(error, EOFError | ConnectionResetError):
            traceback.print_exc()
        os._exit(1)


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its traceback as text if the error cannot be pickled."""
    if not isinstance(error, InputError | OSError):
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
