"""The source files of an import, with the names that the user gave and the files that are read.

Sizes and times do not prove that a file is unchanged: times can be set, and writes to a mapped file appear late.
Therefore a file is hashed before it is read (a compressed file while it is decompressed), and again after it was read
completely. Changes that are reverted in between are not detected.
"""

import bz2
import gzip
import lzma
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import HashedFile, new_file
from flsim.base.pool import Pool, Report, Task, ignore
from flsim.data.importing.scratch import Pieces, ResumableError

# Unpacking of the only text file in a 7-Zip archive, the format of Stack Exchange dumps in the Internet Archive.

MAGIC = b"7z\xbc\xaf\x27\x1c"
DUMP = "posts.xml"  # the file of a Stack Exchange archive that contains text


def unpack_seven_zip(packed: Path, source: Path, out: Path) -> None:
    """Unpack the only file of an archive, or its Posts.xml, to `out`, atomically; names in the archive are ignored."""
    try:
        import py7zr  # from the extra `7z`; imported here, because otherwise every process of every import loads it
    except ImportError as error:
        raise InputError(
            f"{source}: 7z archives need py7zr, the extra '7z', which is not installed; pip install py7zr"
        ) from error
    try:
        with py7zr.SevenZipFile(packed) as archive:
            name = _member(archive, source)
            with new_file(out) as partial, tempfile.TemporaryDirectory(dir=out.parent) as folder:
                archive.extract(folder, targets=[name])  # py7zr refuses names outside the folder
                unpacked = Path(folder) / name
                if not unpacked.is_file() or unpacked.is_symlink():
                    raise InputError(f"{source}: {name!a:.80} is not a plain file; unpack the text")
                unpacked.replace(partial)
    except InputError:
        raise
    except py7zr.exceptions.PasswordRequired as error:
        raise InputError(f"{source}: the archive is encrypted; unpack it first") from error
    except Exception as error:  # py7zr and its decoders raise many types of errors for damaged archives
        if isinstance(error, OSError) and error.errno is not None:  # for example, the disk is full
            raise
        why = f"the archive is truncated or damaged ({in_one_line(error)}); download it again"
        raise InputError(f"{source}: {why}") from error


def _member(archive: Any, source: Path) -> str:
    names = [str(member.filename) for member in archive.list() if not member.is_directory]
    dumps = [name for name in names if PurePosixPath(name).name.lower() == DUMP]
    chosen = names if len(names) == 1 else dumps
    if len(chosen) != 1:
        listed = ", ".join(names)[:200] or "none"
        raise InputError(f"{source}: the archive must have 1 file or Posts.xml, found {listed!a}; unpack the text")
    return chosen[0]


CHUNK = 2**20  # bytes
WINDOW = 31  # log2 of the largest window of zstd in bytes, which dumps of Reddit need


def _zstd(file: Any) -> ZstdFile:
    return ZstdFile(file, options={DecompressionParameter.window_log_max: WINDOW})


_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x5d\x00\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstd,
    **{bytes([first, 0x2A, 0x4D, 0x18]): _zstd for first in range(0x50, 0x60)},  # skippable frames (RFC 8878, 3.1.2)
}  # the second LZMA is the format LZMA_alone, which TensorFlow Federated uses: properties, then a dictionary size


def is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8).startswith((*_OPENERS, MAGIC))


class _Reported(HashedFile):
    """A file whose read bytes are counted, hashed and reported, about `CHUNK` at a time."""

    def __init__(self, file: IO[bytes], report: Report) -> None:
        super().__init__(file)
        self._report, self._reported = report, 0

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        if self.bytes - self._reported >= CHUNK or not data:
            self._report(self.bytes - self._reported)
            self._reported = self.bytes
        return data

    def described(self) -> dict[str, Any]:
        while self.read(CHUNK):
            pass
        return super().described()


def hash_file(report: Report, path: Path) -> dict[str, Any]:
    """Return the size in bytes and the sha256 of a file."""
    with path.open("rb") as file:
        return _Reported(file, report).described()


def unpack(report: Report, packed: Path, source: Path, out: Path) -> dict[str, Any]:
    """Decompress a file to `out`, atomically and in bounded memory; return bytes and sha256 of the compressed file."""
    with packed.open("rb") as file:
        head = file.read(8)
        if head.startswith(MAGIC):
            unpack_seven_zip(packed, source, out)
            return hash_file(report, packed)
        opener = next(opener for magic, opener in _OPENERS.items() if head.startswith(magic))
        file.seek(0)
        hashed = _Reported(file, report)
        try:
            with opener(hashed) as unpacked, new_file(out) as partial, partial.open("wb") as written:
                shutil.copyfileobj(unpacked, written, CHUNK)
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, ZstdError) as error:
            raise InputError(
                f"{source}: the file is truncated or damaged ({in_one_line(error)}); download it again"
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise InputError(f"{source}: the file is damaged ({in_one_line(error)}); download it again") from error
        return hashed.described()


@dataclass(frozen=True)
class Source:
    path: Path  # as the user named it
    data: Path  # the file to read: the same file, or one in the scratch folder
    identity: dict[str, Any]  # by which a changed file is recognized
    digest: dict[str, Any] | None = None  # bytes and sha256 of the user's file; None until known

    @property
    def file(self) -> Path:
        """Return the file that the user named, without links."""
        return Path(self.identity["path"])

    def refuse_if_changed(self) -> None:
        """Raise InputError if the file's size or time changed since the import began."""
        if _identity(self.path) != self.identity:
            raise changed(self.path)


def changed(path: Path) -> InputError:
    return InputError(f"{path}: the file changed while flsim read it; import it again")


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Return the sources of paths; raise InputError for the first path that is not a file or cannot be read."""
    if not paths:
        raise InputError("no sources: name at least one file to import")
    identities = [_identity(path) for path in paths]
    return [Source(path, Path(identity["path"]), identity) for path, identity in zip(paths, identities, strict=True)]


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
    if path.name.encode(errors="replace").decode() != path.name:  # the manifest of the corpus has names
        raise InputError(f"{path.name!a}: the name of this file is not UTF-8; rename the file")
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
    return dict(zip(tasks, pieces.run(pool, title, tasks, sizes), strict=True))


def check(report: Report, source: Source) -> None:
    """Compare a source with its digest, if it is known; raise InputError if the content has changed."""
    if source.digest is not None and hash_file(report, source.file) != source.digest:
        raise changed(source.path)


@contextmanager
def blaming_changes(sources: Sequence[Source]) -> Iterator[None]:
    """Replace an input error by the error about a source that changed while it was read, if there is one."""
    try:
        yield
    except InputError:
        for source in sources:
            source.refuse_if_changed()
            check(ignore, source)
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
