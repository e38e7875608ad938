"""Completion in real shells: a person types in a terminal, and presses Tab."""

import os
import pty
import re
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds
SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], 'eval "$(_FLSIM_COMPLETE=source_bash flsim)"\n'),
    "zsh": (["-f", "-i"], 'autoload -Uz compinit && compinit -u -D; eval "$(_FLSIM_COMPLETE=source_zsh flsim)"\n'),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_and_options(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    options, setup = SHELLS[shell]
    seen = in_terminal([path, *options], f"{setup}flsim swe\t--ti\tno-such-tier --he\t\n", "Usage: flsim sweep")
    line = re.sub(r"[\s\b]", "", seen)  # shells redraw spaces differently
    assert "flsimsweep--tierno-such-tier--help" in line


def in_terminal(command: list[str], keys: str, until: str) -> str:
    """Type keys into a command in a terminal of its own, and return what it prints up to a text."""
    folder = Path(sys.executable).parent  # where the script flsim is installed
    environment = {
        **os.environ,
        **{"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TERM": "dumb", "PS1": "$ "},
    }
    process, terminal = pty.fork()
    if process == 0:
        os.execve(command[0], command, environment)
    try:
        os.write(terminal, keys.encode())
        seen, end = b"", time.monotonic() + PATIENCE
        while until.encode() not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 1.0)[0]:
                seen += os.read(terminal, 2**16)
    finally:
        os.close(terminal)  # a hangup ends the shell
        os.waitpid(process, 0)
    return seen.decode(errors="replace")
