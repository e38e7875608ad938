"""The log of a run's rounds: rounds.jsonl in its folder, one line per round, or per saved step of central training.

A line has its last ``round``. In central training, it also has the step ``since`` which it counts. A complete log has
lines for all rounds up to that of the newest checkpoint. Rounds that are missing after a loss of power or a manual
change are marked by lines with ``"lost": true``.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flsim.base import files
from flsim.base.files import naming, new_file, sync

FILE = "rounds.jsonl"
Line = dict[str, Any]


def append(run_folder: Path, **values: Any) -> None:
    """Append a line; it survives a loss of power after `keep` was called."""
    path = run_folder / FILE
    is_new = not path.exists()
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
    if is_new:
        sync(run_folder)


def keep(run_folder: Path) -> None:
    """Sync all lines to the disk, so that no checkpoint exists without the rounds before it."""
    if (run_folder / FILE).exists():
        sync(run_folder / FILE)


def read(run_folder: Path) -> list[Line]:
    """Return the lines of all rounds in the log, in their order and once each, without those marked as lost."""
    return rounds_among(files.read_lines(run_folder / FILE))


def rounds_among(values: Iterable[Any]) -> list[Line]:
    """Return the lines of rounds among values of a log's lines, as `read` does for all of them."""
    return [line for line in _once(values) if not line.get("lost")]


def mean_losses(lines: Iterable[Line], rounds: Iterable[int]) -> dict[int, float]:
    """Return the mean training loss (nats per token) since the previous given round, by round, weighted by rounds."""
    ends, losses = sorted(rounds), dict[int, tuple[float, int]]()
    for line in lines:
        place = bisect_left(ends, line["round"])
        if place < len(ends) and line.get("loss") is not None:
            total, count = losses.get(ends[place], (0.0, 0))
            weight = line["round"] - line.get("since", line["round"] - 1)
            losses[ends[place]] = total + weight * line["loss"], count + weight
    return {round_: total / count for round_, (total, count) in losses.items()}


def last(run_folder: Path) -> Line:
    """Return the last line without reading the others; empty if it is incomplete or missing."""
    line = files.last_line(run_folder / FILE)
    return line if _is_line(line) else {}


def lost(run_folder: Path) -> list[range]:
    """Return the rounds that are marked as lost, as ascending ranges; adjacent ranges are joined."""
    ranges: list[range] = []
    for line in _lines(run_folder):
        if line.get("lost"):
            first = line.get("since", line["round"] - 1) + 1
            if ranges and ranges[-1].stop == first:
                first = ranges.pop().start
            ranges.append(range(first, line["round"] + 1))
    return ranges


def in_words(rounds: Sequence[range]) -> str:
    """Return ranges of rounds for a sentence, such as ``101 to 140, 150``."""
    return ", ".join(f"{part[0]:,} to {part[-1]:,}" if len(part) > 1 else f"{part[0]:,}" for part in rounds)


def settle(run_folder: Path, reached: int, by_round: bool) -> list[range]:
    """Make the log contain each round up to `reached` once; return the rounds that are newly missing, marked as lost.

    Lines of later rounds, which are trained again, and damaged lines are dropped; of two lines, the later one remains.
    """
    lines, last, missing = list[Line](), 0, list[range]()
    ends = {"round": reached, "since": reached}
    for line in (*(line for line in _lines(run_folder) if line["round"] <= reached), ends):
        begins = line.get("since", line["round"] - 1 if by_round else last)
        if begins > last:
            missing.append(range(last + 1, begins + 1))
            marked = missing[-1] if by_round else missing[-1][-1:]
            since = {} if by_round else {"since": last}
            lines += [{"round": round_, **since, "lost": True} for round_ in marked]
        lines.append(line)
        last = line["round"]
    _replace(run_folder, lines[:-1])
    return missing


def copy(run_folder: Path, to: Path, reached: int) -> None:
    """Write the lines of the rounds up to `reached`, including lost rounds, as the log of this or another folder."""
    _replace(to, [line for line in _lines(run_folder) if line["round"] <= reached])


def _replace(run_folder: Path, lines: Iterable[Line]) -> None:
    path = run_folder / FILE
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if (path.read_bytes() if path.exists() else b"") != text:
        with new_file(path) as partial:
            partial.write_bytes(text)


def _lines(run_folder: Path) -> list[Line]:
    return _once(files.read_lines(run_folder / FILE))


def _once(values: Iterable[Any]) -> list[Line]:
    """Return the lines among values by round; if a round has two lines, the later line remains."""
    by_round = {value["round"]: value for value in values if _is_line(value)}
    return [by_round[round_] for round_ in sorted(by_round)]


def _is_line(line: Any) -> bool:
    """Return whether a value is a line of this log, for the needs of this module."""
    if not isinstance(line, dict):
        return False
    numbers = (line.get("round"), line.get("since", 0))
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers) and numbers[0] > numbers[1]
