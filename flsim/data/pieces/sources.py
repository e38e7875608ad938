"""The files that an import is of, as the user named them and as they are read."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flsim.data.pieces.scratch import Pieces
from flsim.data.pieces.unpacking import copy_pipe, hash_file, is_compressed, unpack
from flsim.errors import InputError
from flsim.pool import Pool, Task
from flsim.progress import progress


@dataclass(frozen=True)
class Source:
    """A source of an import.

    Attributes:
        path: as the user named it.
        data: the file to read: the same, or one in the scratch folder.
        identity: what tells whether it is still the same; JSON.
        digest: bytes and sha256 of what the user gave, where they are known from unpacking.
    """

    path: Path
    data: Path
    identity: dict[str, Any]
    digest: dict[str, Any] | None = None

    @property
    def is_pipe(self) -> bool:
        return "mtime" not in self.identity

    def refuse_if_changed(self) -> None:
        """Raises InputError where the file is another one than when the import began."""
        if not self.is_pipe and _identity(self.path) != self.identity:
            raise InputError(f"{self.path}: changed while it was read; import it again")


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Raises InputError for the first that is no file or cannot be read."""
    if not paths:
        raise InputError("no sources: name at least one file to import")
    identities = [_identity(path) for path in paths]
    return [Source(path, Path(identity["path"]), identity) for path, identity in zip(paths, identities, strict=True)]


def _identity(path: Path) -> dict[str, Any]:
    try:
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            raise InputError(f"{path}: a folder; name the files in it")
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "Permission denied")
        resolved = path.resolve()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(about.st_mode) or not resolved.exists():  # a pipe, or a file that /dev/stdin had open last
        return {"name": path.name, "path": str(path)}
    return {"name": path.name, "path": str(resolved), "bytes": about.st_size, "mtime": about.st_mtime_ns}


def copy_pipes(sources: Sequence[Source], folder: Path) -> list[Source]:
    """Sources that can be read more than once: what comes out of pipes is copied into the folder."""
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
            source = Source(source.path, data, source.identity | digest, digest)
        copied.append(source)
    return copied


def unpack_sources(sources: Sequence[Source], pieces: Pieces, pool: Pool) -> list[Source]:
    """Sources that can be read in parts: compressed ones are unpacked among the pieces.

    Raises:
        InputError: one is cut short or damaged.
    """
    packed = {f"unpacked-{index}": source for index, source in enumerate(sources) if is_compressed(source.data)}
    if not packed:
        return list(sources)
    tasks = {
        name: Task(str(source.path), unpack, (source.data, source.path, pieces.folder / f"{name}.data"))
        for name, source in packed.items()
    }
    sizes = {name: source.data.stat().st_size for name, source in packed.items()}
    digests = pieces.run(pool, "unpacking", tasks, "bytes", sizes=sizes, reporting=True)
    done = {
        source.path: replace(source, data=pieces.folder / f"{name}.data", digest=source.digest or digest)
        for (name, source), digest in zip(packed.items(), digests, strict=True)
    }
    return [done.get(source.path, source) for source in sources]


def hash_tasks(sources: Sequence[Source]) -> dict[str, Task]:
    """Tasks that find the digests of those sources that have none yet."""
    return {
        f"hash-{index}": Task(str(source.path), hash_file, (source.data,))
        for index, source in enumerate(sources)
        if source.digest is None
    }


def refuse_twice(sources: Sequence[Source]) -> None:
    """The same text twice would be memorized twice as well.

    Raises:
        InputError: two sources of the same content.
    """
    first: dict[str, Path] = {}
    for source in sources:
        digest = source.digest or {}
        if digest["bytes"] and digest["sha256"] in first:
            raise InputError(f"{source.path}: the same content as {first[digest['sha256']]}; give it once")
        first[digest["sha256"]] = source.path


def names_of(sources: Sequence[Source]) -> str:
    """For messages about all of them."""
    others = len(sources) - 1
    return f"{sources[0].path}{f' and {others} more' if others else ''}"
