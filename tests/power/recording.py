"""The changes of a folder by a command and all of its processes, step by step, from the log of `strace`.

Anything that changes a file and that this module does not understand is an error. The recorded steps must give the
final folder, byte for byte."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from power.disk import Disk, Op, State, read_in

NAMES = ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir")
BYTES = ("write", "pwrite64", "writev", "ftruncate", "fallocate")
LINKS = ("link", "linkat", "symlink", "symlinkat", "mknod", "mknodat")
COPIES = ("truncate", "pwritev", "pwritev2", "copy_file_range", "sendfile", "splice", "io_uring_setup", "io_submit")
UNKNOWN = (*LINKS, *COPIES)  # other calls that can change a folder
OTHER = ("openat", "creat", "lseek", "mmap", "dup", "dup2", "dup3", "fcntl", "fsync", "fdatasync")
CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+|\?)(.*)", re.DOTALL)
FILE = re.compile(r"(\w+|-\d+)<((?:\\x[0-9a-f]{2})*)>(\(deleted\))?")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')


def record(command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> list[Op]:
    """Run a command, which must succeed and name files by absolute paths, and return its changes of a folder.

    Skips the test if `strace` is missing or is not allowed to trace."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("needs strace, and leave to trace (`make tools` installs it)")
    start, log = read_in(folder), folder.with_name(f"{folder.name}.strace")
    calls = ",".join((*NAMES, *BYTES, *UNKNOWN, *OTHER))
    tracing = [strace, "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(2**26), "-e", f"trace={calls}", "-o", str(log)]
    with log.with_suffix(".said").open("w+") as said:  # not a pipe: processes may outlive the command for a moment
        done = subprocess.run([*tracing, *command], env={**os.environ, **(env or {})}, stdout=said, stderr=said)
        assert done.returncode == 0, log.with_suffix(".said").read_text()[-2000:]
    ops = Reader(folder, start).read(log)
    log.unlink()
    return ops


class Reader:
    """A converter of the lines of a log into steps."""

    def __init__(self, folder: Path, start: State) -> None:
        self._folder, self._disk = folder.resolve(), Disk(start)
        self._ops: list[Op] = []
        self._places: dict[tuple[str, str], list[int | None]] = {}  # by descriptor and path; None: appends

    def read(self, log: Path) -> list[Op]:
        """Return all steps. Raises AssertionError if they do not lead to the content of the folder."""
        mark = "".join(f"\\x{byte:02x}" for byte in bytes(self._folder))
        with log.open() as file:
            for text, began in _calls(file, lambda: len(self._ops)):
                if mark in text and (call := CALL.fullmatch(text)) and not call[3].startswith(("-", "?")):
                    self._see(call[1], call[2], call[3], call[4], began)
        assert self._disk.now() == read_in(self._folder), "the steps that were recorded do not lead to this folder"
        return self._ops

    def _see(self, name: str, arguments: str, result: str, rest: str, began: int) -> None:
        if name in ("openat", "creat"):
            self._open(arguments, result, rest)
        elif name in NAMES:
            self._name(name, arguments)
        elif name in ("dup", "dup2", "dup3") or (name == "fcntl" and "F_DUPFD" in arguments):
            if (path := self._file(arguments)) and (place := self._places.get((_number(arguments), path))):
                self._places[result, path] = place
        elif name == "lseek":
            if (path := self._file(arguments)) and (place := self._places.get((_number(arguments), path))):
                place[0] = None if place[0] is None else int(result)
        elif name in ("fsync", "fdatasync"):
            if (path := self._file(arguments)) is not None:
                self._do(Op("sync", path, began=began))
        elif name in BYTES and (path := self._file(arguments)):
            self._write(name, path, arguments, int(result))
        elif name == "mmap" and "MAP_SHARED" in arguments and "PROT_WRITE" in arguments and self._file(arguments):
            raise AssertionError(f"a file that is written through memory: {arguments}")
        elif name in UNKNOWN:
            raise AssertionError(f"{name} is not understood: {arguments[:200]}")

    def _open(self, arguments: str, result: str, rest: str) -> None:
        path, flags = self._file(f"{result}{rest}"), set(re.split(r"[|, ]+", arguments))
        if not path or not flags & {"O_WRONLY", "O_RDWR"}:
            return
        assert "O_TMPFILE" not in flags, "a file without a name is not understood"
        size = self._disk.size(path)
        if size is None:
            self._do(Op("create", path))
        elif "O_TRUNC" in flags and size:
            self._do(Op("trim", path, at=0))
        self._places[result, path] = [None if "O_APPEND" in flags else 0]

    def _write(self, name: str, path: str, arguments: str, result: int) -> None:
        if name in ("ftruncate", "fallocate"):
            numbers = [int(value) for value in arguments.split(", ")[1:] if value.isdigit()]
            assert name == "ftruncate" or numbers[0] == 0, f"{name} is not understood: {arguments}"
            length, size = sum(numbers), self._disk.size(path) or 0
            if length != size and (name == "ftruncate" or length > size):
                self._do(Op("trim", path, at=length))
            return
        data = b"".join(_bytes(text) for text in TEXT.finditer(arguments))[:result]
        if name == "pwrite64":
            self._do(Op("write", path, at=int(arguments.rpartition(", ")[2]), data=data))
            return
        place = self._places[_number(arguments), path]
        self._do(Op("write", path, at=place[0], data=data))
        place[0] = None if place[0] is None else place[0] + len(data)

    def _name(self, name: str, arguments: str) -> None:
        paths = self._paths(arguments)
        if not any(paths):
            return
        assert all(paths), f"{name} from or to another place is not understood: {arguments}"
        assert "RENAME_EXCHANGE" not in arguments, f"{name} is not understood: {arguments}"
        if name.startswith("rename"):
            self._do(Op("rename", str(paths[0]), to=str(paths[1])))
            for number, path in list(self._places):
                if path == paths[0]:
                    self._places[number, str(paths[1])] = self._places.pop((number, path))
        else:
            self._do(Op("make" if name.startswith("mkdir") else "remove", str(paths[0])))

    def _do(self, op: Op) -> None:
        self._disk.apply(op)
        self._ops.append(op)

    def _paths(self, arguments: str) -> list[str | None]:
        """Return the paths that a call names, relative to the folder; None for paths outside."""
        texts = [os.fsdecode(_bytes(text)) for text in TEXT.finditer(arguments)]
        bases = [os.fsdecode(_bytes(file)) for file in FILE.finditer(arguments)] or [""] * len(texts)
        return [self._inside(os.path.join(base, text)) for base, text in zip(bases, texts, strict=True)]  # noqa: PTH118

    def _file(self, arguments: str) -> str | None:
        """Return the path of the file of the first descriptor; None if it is outside the folder or removed."""
        file = FILE.match(arguments) if not arguments.startswith("NULL") else FILE.search(arguments)
        if file is None or file[3] or (path := os.fsdecode(_bytes(file, 2))).endswith(" (deleted)"):
            return None
        return self._inside(path)

    def _inside(self, path: str) -> str | None:
        path = os.path.normpath(path)
        if path == str(self._folder):
            return ""
        return path.removeprefix(f"{self._folder}/") if path.startswith(f"{self._folder}/") else None


def _calls(lines: Iterator[str], steps: Callable[[], int]) -> Iterator[tuple[str, int]]:
    """Yield each call as one text, when it ended, with the number of steps that had been taken when the call began."""
    begun: dict[str, tuple[str, int]] = {}
    for line in lines:
        process, _, text = line.rstrip("\n").partition(" ")
        text = text.lstrip()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>").rstrip(), steps()
        elif text.startswith("<... "):
            before, began = begun.pop(process, ("", steps()))
            yield before + text.partition("resumed>")[2], began
        else:
            yield text, steps()


def _number(arguments: str) -> str:
    return arguments.partition("<")[0]


def _bytes(match: re.Match[str], group: int | None = None) -> bytes:
    text = match[group or (2 if match.re is FILE else 1)]
    assert match.re is FILE or not match[2], "strace has cut a text short"
    return bytes.fromhex(text.replace("\\x", ""))
