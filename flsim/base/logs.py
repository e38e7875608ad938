"""Structured logs: the events of a run, as JSON lines in its folder, through the module `logging` of Python.

All modules use the logger `log`; the details of an event, such as round and shard, are passed as `extra`.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

FILE = "log.jsonl"
log = logging.getLogger("flsim")
log.addHandler(logging.NullHandler())
log.propagate = False  # a library that configures the root logger would print all events again in the terminal
_ALWAYS_THERE = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Append the events of the block to ``folder/log.jsonl``; what cannot be written, as on a full disk, is lost."""
    handler, level = _Lines(folder / FILE), log.level
    handler.setFormatter(_Json(folder.resolve().name))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


class _Lines(logging.Handler):
    """A logging handler that writes each line immediately, so that nothing is lost when the process ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._is_cut = path, False

    def emit(self, record: logging.LogRecord) -> None:
        line = ("\n" * self._is_cut + self.format(record) + "\n").encode()
        with suppress(OSError), self._path.open("ab", buffering=0) as file:
            self._is_cut = file.write(line) < len(line)


class _Json(logging.Formatter):
    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _ALWAYS_THERE and name[0] != "_"}
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage(), "run": self._run}
        return json.dumps(line | extra, default=str)
