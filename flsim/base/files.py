"""Atomic files and folders: each is written next to its final path, and then renamed."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from glob import escape
from pathlib import Path, PurePath
from typing import IO, Any

from flsim.base.errors import InputError
from flsim.base.progress import say

# Syncing of files and folders to the disk, so that a loss of power does not lose completed work.

# Errors of file systems that cannot sync folders: EINVAL on several FUSE and SMB mounts, the rest on others. PostgreSQL
# (fsync_fname_ext) ignores the first two. EIO is a failure of the disk, and is never ignored.
UNSUPPORTED = frozenset({errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_warned: set[int] = set()  # devices, so that a process warns once about each file system


def sync(path: Path) -> None:
    """Sync the bytes of a file, or the names in a folder, so that they survive a loss of power.

    flsim warns once about a file system that cannot sync folders. Other OSErrors name the path, unless it is temporary.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            if not _is_partial(path.name):
                error.filename = str(_without_partial(path.absolute()))
            raise
        device, place = os.fstat(descriptor).st_dev, _without_partial(path.absolute())
        if device not in _warned:
            _warned.add(device)
            say(
                f"{place}: this file system cannot sync folders ({error.strerror}); flsim continues, but a loss of "
                "power can remove recent files; to prevent this, use another file system",
                file=str(place),
            )
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    for part in [path, *path.rglob("*")]:
        sync(part)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and ".partial-" in name


def _without_partial(path: Path) -> Path:
    """Return the folder of a temporary file or folder; otherwise the path."""
    return next((part.parent for part in reversed((path, *path.parents)) if _is_partial(part.name)), path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` on success, and is removed otherwise; InputError if `path` exists."""
    refuse_existing(path)
    if not path.name.isprintable():
        raise InputError(f"{str(path)!r}: the name has a line break or another character that cannot be printed")
    with ExitStack() as stack:
        try:
            make_folder(path.parent)
            for abandoned in path.parent.glob(f".{escape(path.name)}.partial-*"):
                with suppress(OSError), held(abandoned):
                    shutil.rmtree(abandoned)
            partial = _begun(path, stack)
        except OSError as error:
            raise InputError(f"{path}: cannot be created ({error.strerror})") from error
        with naming(path, errno.ENOSPC, errno.EDQUOT):  # reads in between can fail with other errors
            yield partial
            sync_folder(partial)
        refuse_existing(path)
        partial.rename(path)
        sync(path.parent)


def _begun(path: Path, stack: ExitStack) -> Path:
    """Create and lock a hidden folder next to `path`, again if it was removed before; the stack removes it."""
    while True:
        partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
        partial.mkdir()
        try:
            stack.enter_context(held(partial))
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:
            pass  # a filesystem without locks
        if partial.exists():
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            return partial


@contextmanager
def held(path: Path, wait: bool = False) -> Iterator[None]:
    """Lock an existing file or folder, no link, against other processes, until the block or this process ends.

    BlockingIOError if another process holds the lock, unless it may `wait`; FileNotFoundError if the path was removed;
    OSError without locks, or if it cannot be opened.
    """
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR  # NFS allows locks only to processes that can write the file
    descriptor = os.open(path, access | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != path.lstat().st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that have ended, in a folder and below it."""
    # prefix of temporary files of safetensors
    for partial in (*folder.glob("**/.*.partial-*"), *folder.glob("**/.tmp??????")):
        with suppress(OSError), held(partial):
            partial.unlink()


def refuse_existing(path: Path) -> None:
    """Raise InputError if `path` exists, so that no existing file is overwritten."""
    if os.path.lexists(path):
        raise InputError(f"{path}: already exists; name another folder, or remove it first")


def refuse_unwritable(folder: Path, *names: str) -> None:
    """Raise InputError, before long computations, if no file can be created in a folder, or in these folders of it."""
    for path in (folder, *(folder / name for name in names)):
        if path.exists() and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            raise InputError(
                f"{path}: this folder must be writable, because results are stored in it; change its "
                "permissions, or copy the run folder and name the copy"
            )


def refuse_missing_folder(path: Path) -> None:
    """Raise InputError if `path`, or a folder above it, is missing, not damaged: it was probably moved."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        raise InputError(
            f"{missing[-1]}: no such folder. If it was moved or renamed, move it back, or name the new place"
        )


def make_folder(path: Path) -> None:
    """Create a folder with its parents, durably; do nothing if it exists."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file that a data file names; InputError if it is not inside the folder, after links."""
    try:
        parts = PurePath(str(name)).parts
        if isinstance(name, str) and parts and ".." not in parts:
            path = folder / name
            with suppress(FileNotFoundError, NotADirectoryError):
                path.lstat()
            if path.resolve().is_relative_to(folder.resolve()):
                return path
    except (OSError, RuntimeError, ValueError):  # too long, a link to itself, a zero byte
        pass
    raise InputError(f"{folder}: {name!r:.80} is not a file inside that folder; copy the folder again")


def from_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError for invalid JSON, also if it is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@contextmanager
def naming(path: Path, *numbers: int) -> Iterator[None]:
    """Add `path` to each OSError, of these numbers if any are given, that leaves the block without a file name.

    A subclass without an error number, as of a damaged archive, is not changed.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and str(error).endswith(" written"):  # error of numpy: "10 requested and 7 written"
            error.errno, error.strerror = errno.EIO, str(error)
        if error.errno in (numbers or errno.errorcode) and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a new file of this process (no link of others), which replaces `path` durably and atomically at the end."""
    # Not the number of the process, which threads share, and also processes of two machines or containers.
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    partial.touch(exist_ok=False)
    made = partial.stat()
    with ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        with suppress(OSError):  # a filesystem without locks
            stack.enter_context(held(partial))
        with naming(path):
            yield partial
            if partial.stat().st_ino != made.st_ino:
                partial.chmod(made.st_mode)  # safetensors replaces the file by one that only its owner can read
            sync(partial)
        partial.replace(path)
        sync(path.parent)  # a name is durable only after its folder is synced


@contextmanager
def named_file(path: Path) -> Iterator[Path]:
    """Yield a new file like `new_file`, for a path that the user gave; InputError if it cannot be written.

    A symbolic link is followed. A file that exists keeps its mode and its owner. A device or a pipe is written into.
    """
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; name a file in it")
    with ExitStack() as stack:
        try:
            if is_device(path):
                partial, mode = stack.enter_context(_written_into(path)), None
            else:
                partial, mode = _replacing(path, stack)
        except (OSError, RuntimeError) as error:  # RuntimeError: a symbolic link to itself
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{path}: cannot be written ({reason}); name another file") from error
        yield partial
        if mode is not None:
            partial.chmod(mode)


def _replacing(path: Path, stack: ExitStack) -> tuple[Path, int | None]:
    """Return a new file with the owner of the file that it will replace, and this mode, if any."""
    target = path.resolve()
    if not target.parent.is_dir():
        folder = target.parent if path.is_symlink() else path.parent
        raise InputError(f"{path}: the folder {folder} does not exist; create it first")
    partial = stack.enter_context(new_file(target))
    if not target.exists():
        return partial, None
    status = target.stat()
    with suppress(OSError):  # only root can change the owner of files
        os.chown(partial, status.st_uid, status.st_gid)
    partial.chmod(status.st_mode & 0o777 | stat.S_IWUSR)  # before content is written that others must not read
    return partial, status.st_mode & 0o7777


def is_device(path: Path) -> bool:
    """Return whether a path is a device, a pipe, or an open file such as /dev/stdout."""
    for _ in range(40):  # links that the kernel follows
        if path.parent.resolve().is_relative_to("/proc"):
            return True
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return path.exists() and not path.is_file()


@contextmanager
def _written_into(path: Path) -> Iterator[Path]:
    """Yield a new temporary file, whose bytes are written into a device or a pipe when the block ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    with naming(path), open(descriptor, "wb") as device, tempfile.TemporaryDirectory() as folder:  # noqa: PTH123
        partial = Path(folder) / path.name
        partial.touch()
        yield partial
        with partial.open("rb") as complete:
            shutil.copyfileobj(complete, device)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with sorted keys, atomically."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def digest(*parts: bytes | str) -> str:
    """Return the sha256, in hexadecimal, of the parts' digests: ``digest("ab", "c")`` is not ``digest("a", "bc")``."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return whole.hexdigest()


class HashedFile:
    """An open binary file whose `bytes` are counted and hashed while they are read or written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.bytes = 0
        self._file, self._sha256 = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read bytes, and count and hash them."""
        return self._count(self._file.read(size))

    def write(self, data: bytes) -> None:
        """Write bytes, and count and hash them."""
        self._file.write(self._count(data))

    def close(self) -> None:
        self._file.close()

    def described(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self._sha256.hexdigest()}

    def _count(self, data: bytes) -> bytes:
        self._sha256.update(data)
        self.bytes += len(data)
        return data


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal, read once per process and again only after it changed."""
    status = path.stat()
    return _digest_of(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=1_024)
def _digest_of(path: Path, *signature: int) -> str:  # noqa: ARG001 (a key of the cache)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Files of JSON lines, to which one process appends while others read.

TAIL = 4096  # bytes that are read first at the end of a file, enough for most last lines


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each complete and valid line of a file; nothing for a missing file."""
    if path.exists():
        yield from _values(path.read_bytes())


def last_line(path: Path) -> Any:
    """Return the value of a file's last line, without reading the others; None if it is damaged or missing."""
    try:
        with path.open("rb") as file:
            line = _end(file)
        return from_json(line) if line else None
    except (OSError, ValueError):
        return None


def _end(file: IO[bytes]) -> bytes:
    """Return the last line of a file, of any length, without its newline."""
    size, tail = os.fstat(file.fileno()).st_size, TAIL
    while True:
        file.seek(max(0, size - tail))
        _, newline, line = file.read(min(tail, size)).removesuffix(b"\n").rpartition(b"\n")
        if newline or tail >= size:
            return line
        tail *= 2


class NewLines:
    """A reader of lines that were appended to a file since its last call, or of all lines if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._offset = path, 0, 0

    def take(self) -> list[Any]:
        """Return the values of the new lines, without damaged ones."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file or status.st_size < self._offset:
                    self._file, self._offset = status.st_ino, 0
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        return list(_values(whole))


def _values(text: bytes) -> Iterator[Any]:
    for line in text.split(b"\n"):
        with suppress(ValueError):
            yield from_json(line)
