"""Progress as a person sees it: in a terminal of 80 columns, and in a file."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

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
    assert len(lines) < 2 * len(shown) + 2  # none of them is broken into several


AGAIN = """
import time
now = 7.0
time.monotonic = lambda: now
with progress.progress("again", 1_000, start=900) as advance:
    now += 1
    advance(950)
"""


def test_elsewhere_lines_say_rate_and_time_left() -> None:
    """The second job did half of the rest in a second when it was resumed: the other half takes another second."""
    done = subprocess.run([sys.executable, "-c", LONG_JOB + AGAIN], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert lines.pop() == "again: 950 of 1,000, 1 s, 0:00:01 remaining"
    assert len(lines) == 900
    assert re.match(
        r"counting words: 500 of 1,000, \d+ s, [\d,]+ sentences/s, \d:\d\d:\d\d remaining, a note", lines[399]
    )
    assert re.match(r"counting words: 1,000 of 1,000, \d+ s, [\d,]+ sentences/s, a note", lines[-1])


def test_nobody_who_reads_any_more_stops_no_run() -> None:
    """`flsim run ... 2>&1 | head -1`: while it runs, standard output is a file of ours that has no descriptor."""
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
