"""Tests of progress as a person sees it, in a terminal of 80 columns and in a file, and of the log."""

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from faulty import fill, small_disk

from flsim.base.logs import FILE, log, logging_to
from flsim.base.progress import say

LONG_JOB = """
from flsim.base import progress
progress.LINES_EVERY = 0
with progress.progress("counting words", 1_000, start=100, unit="sentences") as advance:
    for done in range(101, 1_001):
        advance(done, "a note that is longer than any line of a terminal " * 3, work=done * 0.5)
"""


def test_a_bar_fits_a_terminal_of_80_columns() -> None:
    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", LONG_JOB], stderr=child, env=environment | {"TERM": "xterm"}
    ) as process:
        os.close(child)
        said = b""
        try:
            while chunk := os.read(parent, 2**16):
                said += chunk
        except OSError:  # the other end is closed
            pass
    os.close(parent)
    assert process.returncode == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()))
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if line.startswith("counting words")]
    assert re.search(r"\d:\d\d:\d\d 1,000 of 1,000, [\d,]+ sentences/s, a no", shown[-1])
    assert len(lines) < 2 * len(shown) + 2  # no line is broken into several lines


AGAIN = """
import time
now = 7.0
time.monotonic = lambda: now
with progress.progress("again", 1_000, start=900) as advance:
    now += 1
    advance(950)
"""


def test_outside_a_terminal_lines_have_rate_and_remaining_time() -> None:
    """The resumed job did half of the remaining work in one second; the other half therefore takes another second."""
    done = subprocess.run([sys.executable, "-c", LONG_JOB + AGAIN], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert lines.pop() == "again: 950 of 1,000, 1 s, 0:00:01 remaining"
    assert len(lines) == 900
    assert re.match(
        r"counting words: 500 of 1,000, \d+ s, [\d,]+ sentences/s, \d:\d\d:\d\d remaining, a note", lines[399]
    )
    assert re.match(r"counting words: 1,000 of 1,000, \d+ s, [\d,]+ sentences/s, a note", lines[-1])


def test_a_run_continues_after_the_reader_of_its_output_has_ended() -> None:
    """This is `flsim run ... 2>&1 | head -1`: during a run, standard output is an object without a file descriptor."""
    code = """
import io, sys
from contextlib import redirect_stdout
from flsim.base.progress import progress, say
with redirect_stdout(io.StringIO()):
    say("begun")
    sys.stdin.read()  # until the pipe is closed at the other end
    say("nobody reads this")
    with progress("counting words", 2) as advance:
        advance(2)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


def test_a_log_line_has_time_level_event_run_and_details(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    began = datetime.now(UTC)
    with logging_to(run):
        log.warning("shard asked again", extra={"round": 3, "shard": 1, "reason": "MemoryError: ü\n2"})
        log.info("%d of %s", 2, "these", extra={"file": tmp_path, "_of_ours": 1})
        log.debug("too much")
    first, second = lines(run)
    assert list(first) == ["time", "level", "event", "run", "round", "shard", "reason"]
    when = datetime.fromisoformat(first.pop("time"))
    assert when.utcoffset() == timedelta()
    assert began - timedelta(milliseconds=1) <= when <= datetime.now(UTC)
    assert first == {
        "level": "warning",
        "event": "shard asked again",
        "run": "a run",
        "round": 3,
        "shard": 1,
        "reason": "MemoryError: ü\n2",
    }
    assert (second["event"], second["file"]) == ("2 of these", str(tmp_path))
    assert list(second) == ["time", "level", "event", "run", "file"]


def test_messages_are_logged_with_their_details(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path):
        say("shard 2 hangs", round=4, shard=2)
    assert capsys.readouterr().err == "shard 2 hangs\n"
    (line,) = lines(tmp_path)
    assert (line["level"], line["event"], line["round"], line["shard"]) == ("info", "shard 2 hangs", 4, 2)


def test_each_of_two_overlapping_logs_has_all_events_until_its_end(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    outer.mkdir()
    inner.mkdir()
    level, handlers = log.level, list(log.handlers)
    log.error("nobody listens")
    with logging_to(outer):
        log.info("one")
        with logging_to(inner):
            log.info("two")
        log.info("three")
    log.error("nobody listens any more")
    assert (log.level, log.handlers) == (level, handlers)
    assert [(line["run"], line["event"]) for line in lines(outer)] == [
        ("outer", event) for event in ("one", "two", "three")
    ]
    assert [(line["run"], line["event"]) for line in lines(inner)] == [("inner", "two")]


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        with logging_to(disk):
            log.info("before")
            filler = fill(disk)
            for number in range(100):
                log.info("x" * 1000, extra={"number": number})
            filler.unlink()
            log.info("after")
            fill(disk)
            for number in range(100):
                log.info("x" * 1000, extra={"number": number})
        text = (disk / FILE).read_text()
    events = [json.loads(line)["event"] for line in text.splitlines() if line.endswith("}")]
    assert events[0] == "before"
    assert "after" in events
    assert capfd.readouterr() == ("", "")
