"""Unpacking of compressed files and copying of pipes, so that sources can be read in parts."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import HashedFile, new_file
from flsim.base.pool import Report
from flsim.data.importing import archives

CHUNK = 2**20  # bytes
WINDOW = 31  # log2 of bytes: the largest window of zstd, which dumps of Reddit need

_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x5d\x00\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda file: ZstdFile(file, options={DecompressionParameter.window_log_max: WINDOW}),
}  # the second LZMA is LZMA alone, as TensorFlow Federated publishes: properties, then a round dictionary size


def is_compressed(path: Path) -> bool:
    """Return whether `unpack` knows how the file is compressed."""
    with path.open("rb") as file:
        return file.read(8).startswith((*_OPENERS, archives.MAGIC))


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
    """Return the bytes and the sha256 of a file."""
    with path.open("rb") as file:
        return _Reported(file, report).described()


def unpack(report: Report, packed: Path, source: Path, out: Path) -> dict[str, Any]:
    """Unpack a compressed file to `out`, whole or not at all, in bounded memory.

    Args:
        report: called with the number of bytes of the compressed file that were read.
        packed: the compressed file.
        source: the same file as the user named it.
        out: the file to write.

    Returns:
        Bytes and sha256 of the compressed file.

    Raises:
        InputError: the file is cut short or damaged.
    """
    with packed.open("rb") as file:
        head = file.read(8)
        if head.startswith(archives.MAGIC):
            archives.unpack_archive(packed, source, out)
            return hash_file(report, packed)
        opener = next(opener for magic, opener in _OPENERS.items() if head.startswith(magic))
        file.seek(0)
        hashed = _Reported(file, report)
        try:
            with opener(hashed) as unpacked:
                copy(unpacked, out)
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, ZstdError) as error:
            raise InputError(f"{source}: cut short or damaged ({in_one_line(error)}); fetch it again") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise InputError(f"{source}: damaged ({in_one_line(error)}); fetch it again") from error
        return hashed.described()


def copy_pipe(report: Report, pipe: Path, out: Path) -> dict[str, Any]:
    """Copy the content of a pipe to a file, report its bytes, and return the bytes and their sha256."""
    with pipe.open("rb") as file:
        hashed = _Reported(file, report)
        copy(hashed, out)
        return hashed.described()


def copy(file: Any, out: Path) -> None:
    """Copy an open file to `out`, whole or not at all."""
    with new_file(out) as partial, partial.open("wb") as written:
        while data := file.read(CHUNK):
            written.write(data)
