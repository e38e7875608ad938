"""The record of how many users a run trains at once, in a file of the run folder.

If users are stacked, as on GPUs, the size of a micro-cohort determines the last bits of sums. It is chosen once:

    {"users": 264, "memory_share": 0.95, "device": "NVIDIA H200"}     the first choice, for all shards and rounds
    {"users": 132, "shard": 1, "round": 50}                           memory ran out: shard 1, from round 50 (from 0) on

Lines are only appended. Without the file, the next process chooses a new size.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flsim.base import files
from flsim.base.files import naming, sync
from flsim.training.cohort.engine import CohortEngine

FILE = "micro-cohorts.jsonl"
Line = dict[str, Any]


class MicroCohorts:
    """The sizes of a run's micro-cohorts: in the file of a run folder, or, without one or if read-only, in memory."""

    def __init__(self, folder: Path | None = None, is_read_only: bool = False) -> None:
        self._file = None if folder is None else folder / FILE
        self._is_written = folder is not None and not is_read_only
        self._in_memory: list[Line] = []
        self._first = 1

    @property
    def memory_share(self) -> float:
        """Return the share of a GPU's memory that the recorded size was chosen for; 1 if none is recorded."""
        return float((self._choice() or {}).get("memory_share", 1.0))

    def settle(self, engine: object, memory_share: float, is_set: bool) -> None:
        """Give an engine that stacks users the recorded size, or record its own choice unless that is a setting."""
        if not isinstance(engine, CohortEngine) or not engine.is_stacked:
            return
        if not is_set:
            if self._choice() is None:
                self._add(users=engine.micro_cohort, memory_share=memory_share, device=engine.device_name)
            # Another process may have recorded its choice at the same time: both processes use the first line.
            engine.micro_cohort = (self._choice() or {"users": engine.micro_cohort})["users"]
        self._first = engine.micro_cohort

    @contextmanager
    def recorded(self, engine: object, shard: int, round_: int) -> Iterator[None]:
        """Give the engine the size of a shard and a round (from 0); record a smaller size that the block sets."""
        if not isinstance(engine, CohortEngine) or not engine.is_stacked:
            yield
            return
        smaller = [
            line["users"] for line in self._lines() if line.get("shard") == shard and line.get("round", 0) <= round_
        ]
        engine.micro_cohort = before = min([self._first, *smaller])
        yield
        if engine.micro_cohort < before:
            self._add(users=engine.micro_cohort, shard=shard, round=round_)

    def _choice(self) -> Line | None:
        return next((line for line in self._lines() if "shard" not in line), None)

    def _lines(self) -> list[Line]:
        lines = [] if self._file is None else [line for line in files.read_lines(self._file) if is_line(line)]
        return lines + self._in_memory

    def _add(self, **line: Any) -> None:
        if self._file is None or not self._is_written:
            self._in_memory.append(line)
            return
        # The newline at the beginning ends a line that a loss of power has cut short.
        with naming(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(line)}\n" if file.tell() else f"{json.dumps(line)}\n")
        sync(self._file)
        sync(self._file.parent)


def is_line(line: Any) -> bool:
    """Return whether a value is a line of this file."""
    if not isinstance(line, dict) or type(line.get("users")) is not int or not 1 <= line["users"] < 2**31:
        return False
    share, places = line.get("memory_share", 1.0), [line.get("shard", 0), line.get("round", 0)]
    if ("shard" in line) != ("round" in line):
        return False
    return type(share) in (int, float) and 0 < share <= 1 and all(type(n) is int and 0 <= n < 2**63 for n in places)
