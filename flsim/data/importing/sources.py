"""The source files of an import, with the names that the user gave and the files that are read.

Sizes and times do not prove that a file is unchanged: times can be set, and writes to a mapped file appear late.
Therefore a file is hashed before it is read (a compressed file while it is decompressed), and again after it was read
completely. Changes that are reverted in between are not detected.
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
from flsim.data.importing.scratch import Pieces, ResumableError
from flsim.data.importing.unpack import hash_file, is_compressed, unpack


@dataclass(frozen=True)
class Source:
    path: Path  # as the user named it
    data: Path  # the file to read: the same file, or one in the scratch folder
    identity: dict[str, Any]  # by which a changed file is recognized
    digest: dict[str, Any] | None = None  # bytes and sha256 of the user's file; None until known
    changed_at: int = 0  # when its content, name or permissions last changed before the import began, in ns

    @property
    def file(self) -> Path:
        """Return the file that the user named, without links."""
        return Path(self.identity["path"])

    def refuse_if_changed(self) -> None:
        """Raise InputError if the file's size or time changed since the import began."""
        if _identity(self.path) != self.identity:
            raise changed(self.path)

    def refuse_if_written(self) -> None:
        """Raise InputError if the file was written since the import began, even if its time was reset."""
        self.refuse_if_changed()
        if self.file.stat().st_ctime_ns == self.changed_at:
            return
        if self.digest is None or hash_file(ignore, self.file) != self.digest:  # otherwise only its permissions changed
            raise changed(self.path)


def changed(path: Path) -> InputError:
    return InputError(f"{path}: the file changed while flsim read it; import it again")


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Return the sources of paths; raise InputError for the first path that is not a file or cannot be read."""
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
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: not a file; write its content into a file, which can be compressed")
    return {"name": path.name, "path": str(resolved), "bytes": status.st_size, "mtime": status.st_mtime_ns}


def unpack_sources(sources: Sequence[Source], pieces: Pieces, pool: Pool) -> list[Source]:
    """Return sources that can be read in parts: compressed files are decompressed into the pieces."""
    packed = {f"unpacked-{index}": source for index, source in enumerate(sources) if is_compressed(source.data)}
    if not packed:
        return list(sources)
    data = {name: pieces.folder / f"{name}.data" for name in packed}
    tasks = {name: Task(str(of.path), unpack, (of.data, of.path, data[name])) for name, of in packed.items()}
    with blaming_changes(sources):
        digests = _digests("unpacking", tasks, packed, pieces, pool)
    done = {of.path: replace(of, data=data[name], digest=digests[name]) for name, of in packed.items()}
    return [done.get(source.path, source) for source in sources]


def hashed(sources: Sequence[Source], pieces: Pieces, pool: Pool) -> list[Source]:
    missing = {f"hash-{index}": source for index, source in enumerate(sources) if source.digest is None}
    tasks = {name: Task(str(source.path), hash_file, (source.data,)) for name, source in missing.items()}
    digests = _digests("hashing", tasks, missing, pieces, pool)
    return [replace(source, digest=digests.get(f"hash-{index}", source.digest)) for index, source in enumerate(sources)]


def _digests(
    title: str, tasks: dict[str, Task], sources: dict[str, Source], pieces: Pieces, pool: Pool
) -> dict[str, Any]:
    sizes = {name: source.data.stat().st_size for name, source in sources.items()}
    return dict(zip(tasks, pieces.run(pool, title, tasks, "bytes", sizes=sizes, reporting=True), strict=True))


def checks(sources: Sequence[Source]) -> dict[str, Task]:
    """Return tasks, by names of pieces, that fail if the content of a source differs from what was read."""
    return {
        f"check-{index}": Task(str(source.path), refuse_other_content, (source,))
        for index, source in enumerate(sources)
    }


def refuse_other_content(report: Report, source: Source) -> dict[str, Any]:
    """Return the digest of a source that was read; raise InputError if it has changed."""
    digest = hash_file(report, source.file)
    if digest != source.digest:
        raise changed(source.path)
    return digest


@contextmanager
def blaming_changes(sources: Sequence[Source]) -> Iterator[None]:
    """Replace an input error by the error about a source that changed while it was read, if there is one."""
    try:
        yield
    except InputError:
        for source in sources:
            source.refuse_if_written()
        raise


def refuse_twice(sources: Sequence[Source]) -> None:
    """Raise InputError for two sources with the same content, which would be memorized as text that occurs twice."""
    first: dict[str, Path] = {}
    for source in sources:
        digest = source.digest or {}
        if digest["bytes"] and digest["sha256"] in first:
            raise InputError(f"{source.path}: has the same content as {first[digest['sha256']]}; name only one of them")
        first[digest["sha256"]] = source.path


def names_of(sources: Sequence[Source]) -> str:
    """Return the first source's name and the number of others, for messages about all of them."""
    others = len(sources) - 1
    return f"{sources[0].path}{f' and {others} more' if others else ''}"
