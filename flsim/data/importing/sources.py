"""The source files of an import, as the user named them and as they are read.

A corpus is made of one content of each source, whose sha256 is in the manifest. Sizes and times do not tell one content
from another: times can be set, and writes to a mapped file show late. So a file is hashed before it is read (a
compressed one while it is unpacked), and again after all of it was read. Content that changed in between, and was
changed back, is not noticed.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flsim.base.errors import InputError
from flsim.base.pool import Pool, Report, Task, ignore
from flsim.base.progress import progress
from flsim.data.importing.scratch import Pieces, ResumableError
from flsim.data.importing.unpack import copy_pipe, hash_file, is_compressed, unpack


@dataclass(frozen=True)
class Source:
    """A source of an import.

    Attributes:
        path: the path as the user named it.
        data: the file to read: the same file, or one in the scratch folder.
        identity: values that tell whether the file is still the same; JSON.
        digest: bytes and sha256 of the file that the user named, once they are known.
        site: the site of a Stack Exchange dump, if the user named it.
        changed_at: when the file's content, name or permissions last changed before the import began, in ns.
    """

    path: Path
    data: Path
    identity: dict[str, Any]
    digest: dict[str, Any] | None = None
    changed_at: int = 0
    site: str | None = None

    @property
    def file(self) -> Path:
        """Return the file that the user named, also for processes with another standard input."""
        return Path(self.identity["path"])

    @property
    def is_pipe(self) -> bool:
        return "mtime" not in self.identity

    def refuse_if_changed(self) -> None:
        """Raise InputError if the file's size or time differ from when the import began."""
        if not self.is_pipe and _identity(self.path) != self.identity:
            raise changed(self.path)

    def refuse_if_written(self) -> None:
        """Raise InputError if the file was written since the import began, even if its time was set back."""
        self.refuse_if_changed()
        if self.is_pipe or self.file.stat().st_ctime_ns == self.changed_at:
            return
        if self.digest is None or hash_file(ignore, self.file) != self.digest:  # else only its permissions changed
            raise changed(self.path)


def changed(path: Path) -> InputError:
    """Return the error that a file changed while it was read."""
    return InputError(f"{path}: the file changed while flsim read it; import it again")


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Return the sources of paths; raise InputError for the first that is no file or cannot be read."""
    if not paths:
        raise InputError("no sources: name at least one file to import")
    identities = [_identity(path) for path in paths]
    return [
        Source(path, Path(identity["path"]), identity, changed_at=path.stat().st_ctime_ns)
        for path, identity in zip(paths, identities, strict=True)
    ]


def _identity(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{path}: a folder; name the files in it")
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "Permission denied")
        resolved = path.resolve()
    except OSError as error:
        raise ResumableError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or not resolved.exists():  # a pipe, or a file that /dev/stdin had open last
        return {"name": path.name, "path": str(path)}
    return {"name": path.name, "path": str(resolved), "bytes": status.st_size, "mtime": status.st_mtime_ns}


def copy_pipes(sources: Sequence[Source], folder: Path) -> list[Source]:
    """Return sources that can be read more than once: the content of pipes is copied into the folder."""
    copied = []
    for index, source in enumerate(sources):
        if source.is_pipe:
            data = folder / f"pipe-{index}"
            with progress(f"copying {source.path.name}", 0, unit="bytes") as advance:
                done = 0.0

                def report(amount: float) -> None:
                    nonlocal done
                    done += amount
                    advance(done)

                digest = copy_pipe(report, source.path, data)
            source = replace(source, data=data, identity=source.identity | digest, digest=digest)
        copied.append(source)
    return copied


def unpack_sources(sources: Sequence[Source], pieces: Pieces, pool: Pool) -> list[Source]:
    """Return sources that can be read in parts: compressed ones are unpacked among the pieces.

    Raises:
        InputError: a source is cut short or damaged.
    """
    packed = {f"unpacked-{index}": source for index, source in enumerate(sources) if is_compressed(source.data)}
    if not packed:
        return list(sources)
    tasks = {
        name: Task(str(source.path), unpack, (source.data, source.path, pieces.folder / f"{name}.data"))
        for name, source in packed.items()
    }
    sizes = {name: source.data.stat().st_size for name, source in packed.items()}
    with blaming_changes(sources):
        digests = pieces.run(pool, "unpacking", tasks, "bytes", sizes=sizes, reporting=True)
    done = {
        source.path: replace(source, data=pieces.folder / f"{name}.data", digest=source.digest or digest)
        for (name, source), digest in zip(packed.items(), digests, strict=True)
    }
    return [done.get(source.path, source) for source in sources]


def hashed(sources: Sequence[Source], pieces: Pieces, pool: Pool) -> list[Source]:
    """Return sources with their digests: those without a digest are hashed."""
    missing = {f"hash-{index}": source for index, source in enumerate(sources) if source.digest is None}
    tasks = {name: Task(str(source.path), hash_file, (source.data,)) for name, source in missing.items()}
    sizes = {name: source.data.stat().st_size for name, source in missing.items()}
    digests = dict(zip(tasks, pieces.run(pool, "hashing", tasks, "bytes", sizes=sizes, reporting=True), strict=True))
    return [replace(source, digest=digests.get(f"hash-{index}", source.digest)) for index, source in enumerate(sources)]


def checks(sources: Sequence[Source]) -> dict[str, Task]:
    """Return tasks, by names of pieces, that refuse sources whose content is not what was read."""
    return {
        f"check-{index}": Task(str(source.path), refuse_other_content, (source,))
        for index, source in enumerate(sources)
        if not source.is_pipe
    }


def refuse_other_content(report: Report, source: Source) -> dict[str, Any]:
    """Return the digest of a source that was read.

    Raises:
        InputError: the source now has another digest.
    """
    digest = hash_file(report, source.file)
    if digest != source.digest:
        raise changed(source.path)
    return digest


@contextmanager
def blaming_changes(sources: Sequence[Source]) -> Iterator[None]:
    """Replace an input error by the error that a source changed while it was read, if one did."""
    try:
        yield
    except InputError:
        for source in sources:
            source.refuse_if_written()
        raise


@contextmanager
def unchanged(path: Path) -> Iterator[str]:
    """Yield the sha256 of a small file, and refuse the file if it changes within the block.

    Raises:
        InputError: the file changed, or it cannot be read.
    """

    def sha256() -> str:
        try:
            return str(hash_file(ignore, path)["sha256"])
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error

    before = sha256()
    try:
        yield before
    except InputError:
        if sha256() != before:
            raise changed(path) from None
        raise
    if sha256() != before:
        raise changed(path)


def refuse_twice(sources: Sequence[Source]) -> None:
    """Refuse two sources of the same content, which would be memorized as text that occurs twice.

    Raises:
        InputError: two sources have the same content.
    """
    first: dict[str, Path] = {}
    for source in sources:
        digest = source.digest or {}
        if digest["bytes"] and digest["sha256"] in first:
            raise InputError(f"{source.path}: the same content as {first[digest['sha256']]}; give it once")
        first[digest["sha256"]] = source.path


def names_of(sources: Sequence[Source]) -> str:
    """Return the first source's name and the number of others, for messages about all of them."""
    others = len(sources) - 1
    return f"{sources[0].path}{f' and {others} more' if others else ''}"
