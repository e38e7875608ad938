"""A simulated disk that can lose power, with all states that a folder can then have.

This reading of POSIX is the strict one. Bytes are safe once their file is synced, and names once their folder is
synced. A rename is one step, and is safe once one of its two folders is synced. ext4, XFS and Btrfs promise more: they
keep the order of names, and sync a new file's name with the file. Modes, owners and times of files are not
simulated."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

Mode = Literal["whole", "lost", "half", "zeros", "tail", "empty"]
MODES: tuple[Mode, ...] = ("whole", "lost", "half", "zeros", "tail", "empty")
TORN: tuple[Mode, ...] = MODES[1:]
MIXTURES = 4  # random states for each prefix
UNREAD = re.compile(  # files that no resumed command reads: half-written files, and files for people
    r".*(\.partial-|/\.tmp).*|.*/(log\.jsonl|\.training|\.driving|report\.html|[^/]*\.log)"
)


@dataclass(frozen=True)
class Op:
    """A step that changes a disk; paths are relative to the watched folder.

    `at` is the first byte of a write, None for the end of the file, and the length for a ``trim``. `began` is the
    number of steps that had ended when a sync began: only those steps are safe after the sync."""

    kind: Literal["make", "create", "write", "trim", "rename", "remove", "sync"]
    path: str
    to: str = ""
    at: int | None = None
    data: bytes = b""
    began: int = 0


@dataclass(eq=False)
class Node:
    """A file or a folder: its content now, and its safe content, which remains if nothing else reaches the disk.

    `writes` are the steps since the last sync: number, first byte, and bytes; None trims."""

    is_folder: bool
    names: dict[str, "Node"] = field(default_factory=dict)
    safe_names: dict[str, "Node"] = field(default_factory=dict)
    safe: bytes = b""
    writes: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    now: bytes = b""

    def after(self, mode: Mode) -> bytes:
        """Return the bytes of a file whose unsynced writes met the loss of power as `mode` describes."""
        if mode == "whole" or not self.writes:
            return self.now
        is_trimmed = any(data is None for _, _, data in self.writes)
        if mode == "lost" or (mode == "empty" and not is_trimmed):
            return self.safe
        if mode == "empty":
            return b""
        first = 0 if is_trimmed else min(at for _, at, _ in self.writes)
        middle = (first + len(self.now)) // 2
        unwritten = self.safe[: len(self.now)].ljust(len(self.now), b"\0")
        if mode == "half":
            return self.now[:middle] + self.safe[middle:]
        return unwritten if mode == "zeros" else unwritten[:middle] + self.now[middle:]


@dataclass(frozen=True, eq=False)
class Change:
    """A step that changed names and is not synced: for each name its folder and its node, None for a removed name."""

    number: int
    names: tuple[tuple[Node, str, Node | None], ...]


State = dict[str, bytes | None]  # by path: the bytes of a file, None for a folder


class Disk:
    """A folder whose writer can lose power after any step."""

    def __init__(self, start: State | None = None) -> None:
        """Start with a folder whose content is safe."""
        self._root, self._steps = Node(is_folder=True), 0
        self._changes: list[Change] = []
        self._dirty: list[Node] = []
        for path, data in (start or {}).items():
            folder, name = self._place(path)
            node = Node(data is None, safe=data or b"", now=data or b"")
            folder.names[name] = folder.safe_names[name] = node

    def apply(self, op: Op) -> None:
        """Take a step. Raises KeyError if its file or folder does not exist."""
        folder, name = self._place(op.path)
        if op.kind in ("make", "create"):
            self._change((folder, name, Node(op.kind == "make")))
        elif op.kind == "remove":
            _ = folder.names[name]
            self._change((folder, name, None))
        elif op.kind == "rename":
            self._change((folder, name, None), (*self._place(op.to), folder.names[name]))
        elif op.kind == "sync":
            self._sync(folder.names[name] if op.path else self._root, op.began)
        else:
            self._write(folder.names[name], op.at, op.data if op.kind == "write" else None)
        self._steps += 1

    def size(self, path: str) -> int | None:
        """Return the bytes of a file now; None if there is no such file."""
        node: Node | None = self._root
        for part in path.split("/"):
            node = node.names.get(part) if node else None
        return None if node is None or node.is_folder else len(node.now)

    def now(self) -> State:
        """Return the state that every process sees."""
        return self._state(self._numbers)

    def synced(self) -> State:
        """Return the state that remains if nothing else reaches the disk."""
        return self._state((), "lost")

    @property
    def _numbers(self) -> list[int]:
        """Return the numbers of the steps that changed names and are not synced."""
        return [change.number for change in self._changes]

    def states(self, rng: np.random.Generator) -> Iterator[State]:
        """Yield states that are possible if the power is lost now, some of them more than once.

        These are: all names, with all or none of the unsynced bytes, or with all unsynced bytes torn in one way; the
        synced names; each change of names as the only one that came, as the only one missing, and as the last one that
        came; each file as the only torn one, in each way, and as the only complete one; and random mixtures."""
        numbers = self._numbers
        for mode in ("whole", *TORN):
            yield self._state(numbers, mode)
        yield self._state(())
        yield self.synced()
        for place, number in enumerate(numbers):
            yield self._state((number,))
            yield self._state({*numbers} - {number})
            yield self._state(numbers[: place + 1], "lost")
        for file in self._dirty:
            yield from (self._state(numbers, but={file: mode}) for mode in TORN)
            yield self._state(numbers, "lost", {file: "whole"})
        for _ in range(MIXTURES):
            kept = [number for number in numbers if rng.random() < 0.5]
            modes = dict(zip(self._dirty, rng.choice(MODES, len(self._dirty)), strict=True))
            yield self._state(kept, but=modes)

    def _place(self, path: str) -> tuple[Node, str]:
        *folders, name = path.split("/")
        folder = self._root
        for part in folders:
            folder = folder.names[part]
        return folder, name

    def _change(self, *names: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in names:
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self._changes.append(Change(self._steps, names))

    def _write(self, node: Node, at: int | None, data: bytes | None) -> None:
        at = len(node.now) if at is None else at
        if data is None:
            node.now = node.now[:at].ljust(at, b"\0")
        else:
            node.now = node.now[:at].ljust(at, b"\0") + data + node.now[at + len(data) :]
        node.writes.append((self._steps, at, data))
        if node not in self._dirty:
            self._dirty.append(node)

    def _sync(self, node: Node, began: int) -> None:
        if not node.is_folder:
            if all(number < began for number, _, _ in node.writes):  # a write during the sync may have come too late
                node.safe, node.writes = node.now, []
                self._dirty = [other for other in self._dirty if other is not node]
            return
        for change in [change for change in self._changes if change.number < began]:
            if any(folder is node for folder, _, _ in change.names):
                _take(change, lambda folder: folder.safe_names)
                self._changes.remove(change)

    def _state(self, kept: Collection[int], mode: Mode = "whole", but: Mapping[Node, Mode] = {}) -> State:
        """Return the state if these changes of names came, and bytes of files met `mode`, or their mode in `but`."""
        names: dict[Node, dict[str, Node]] = {}

        def names_in(folder: Node) -> dict[str, Node]:
            return names.setdefault(folder, dict(folder.safe_names))

        for change in self._changes:
            if change.number in kept:
                _take(change, names_in)
        state: State = {}

        def walk(folder: Node, path: str) -> None:
            for name, node in names_in(folder).items():
                state[f"{path}{name}"] = None if node.is_folder else node.after(but.get(node, mode))
                walk(node, f"{path}{name}/")

        walk(self._root, "")
        return dict(sorted(state.items()))


def _take(change: Change, names_of: Callable[[Node], dict[str, Node]]) -> None:
    for folder, name, node in change.names:
        if node is None:
            names_of(folder).pop(name, None)
        else:
            names_of(folder)[name] = node


def digest(state: State) -> str:
    """Return a digest of a state that ignores the bytes of `UNREAD` files."""
    whole = sha256()
    for path, data in state.items():
        held = b"folder" if data is None else b"unread" if UNREAD.fullmatch(path) else sha256(data).digest()
        whole.update(f"{path}\0".encode() + held)
    return whole.hexdigest()


def lay_out(state: State, folder: Path) -> None:
    """Make a folder with the files of a state."""
    folder.mkdir()
    for path, data in state.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def read_in(folder: Path) -> State:
    """Return the state of a folder."""
    paths = sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix())
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}
