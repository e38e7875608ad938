"""What the tests of data share: dumps and JSON lines written by hand, and folders as bytes."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

DECLARATION = '<?xml version="1.0" encoding="utf-8"?>\n'


def row(**attributes: str) -> str:
    return "  <row " + " ".join(f"{name}={quoteattr(value)}" for name, value in attributes.items()) + " />\n"


def question(owner: str, body: str) -> str:
    return row(Id="1", PostTypeId="1", Body=body, OwnerUserId=owner)


def dump(rows: Iterable[str], head: str = DECLARATION) -> str:
    return f"{head}<posts>\n{''.join(rows)}</posts>\n"


def write_dump(path: Path, rows: Iterable[str], head: str = DECLARATION) -> Path:
    path.write_bytes(dump(rows, head).encode())
    return path


def write_jsonl(path: Path, posts: Iterable[tuple[str | int, str]]) -> Path:
    path.write_text("".join(json.dumps({"user": user, "text": text}) + "\n" for user, text in posts), "utf-8")
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def peak_kilobytes(code: str, *arguments: Path) -> int:
    """Peak resident memory of a Python process. (`ru_maxrss` would not do: a child inherits its parent's.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("peak memory is read from /proc, which this system has not")
    code += "\nprint(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])
