"""Decompression of files, so that sources can be read in parts."""

import bz2
import gzip
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import HashedFile, new_file
from flsim.base.pool import Report

# Unpacking of the only text file in a 7-Zip archive, the format of Stack Exchange dumps in the Internet Archive.

try:
    import py7zr
except ImportError:  # py7zr is in the extra `7z`; only this format needs it
    py7zr = None

MAGIC = b"7z\xbc\xaf\x27\x1c"
DUMP = "posts.xml"  # the file of a Stack Exchange archive that contains text


def unpack_seven_zip(packed: Path, source: Path, out: Path) -> None:
    """Unpack the only file of an archive, or its Posts.xml, to `out`, atomically; names in the archive are ignored."""
    if py7zr is None:
        raise InputError(f"{source}: 7z archives need py7zr, the extra '7z', which is not installed; pip install py7zr")
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
    except OSError as error:
        if error.errno is not None:  # for example, the disk is full
            raise
        raise _damaged(source, error) from error
    except Exception as error:  # py7zr and its decoders raise many types of errors for damaged archives
        raise _damaged(source, error) from error


def _damaged(source: Path, error: Exception) -> InputError:
    return InputError(f"{source}: the archive is truncated or damaged ({in_one_line(error)}); download it again")


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
