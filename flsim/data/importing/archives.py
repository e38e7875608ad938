"""Unpacking of the one file of text in a 7-Zip archive, as the Internet Archive has Stack Exchange dumps."""

from pathlib import Path, PurePosixPath
from typing import IO, Any

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import new_file

try:
    import py7zr
    from py7zr.io import Py7zIO, WriterFactory
except ImportError:  # the extra `7z` is not installed, and no other format needs it
    py7zr, Py7zIO, WriterFactory = None, object, object

MAGIC = b"7z\xbc\xaf\x27\x1c"
DUMP = "posts.xml"  # the file of a Stack Exchange archive that holds text


def unpack_archive(packed: Path, source: Path, out: Path) -> None:
    """Unpack the only file of an archive, or its Posts.xml, to `out`: all of it or nothing.

    Args:
        packed: the archive.
        source: the same file as the user named it.
        out: the file to write; no name in the archive is used.

    Raises:
        InputError: py7zr, which the extra `7z` installs, is missing; the archive is damaged or encrypted; or it holds
            several files, of which not exactly one is Posts.xml.
    """
    if py7zr is None:
        raise InputError(f"{source}: 7z archives need py7zr, the extra '7z', which is not installed; pip install py7zr")
    try:
        with py7zr.SevenZipFile(packed) as archive:
            name = _member(archive, source)
            with new_file(out) as partial, partial.open("wb") as file:
                archive.extract(targets=[name], factory=_Writers(file))
    except InputError:
        raise
    except py7zr.exceptions.PasswordRequired as error:
        raise InputError(f"{source}: encrypted; unpack it first") from error
    except OSError as error:
        if error.errno is not None:  # the disk is full, for example
            raise
        raise _damaged(source, error) from error
    except Exception as error:  # py7zr and its decoders have many types of errors for damaged archives
        raise _damaged(source, error) from error


def _damaged(source: Path, error: Exception) -> InputError:
    return InputError(f"{source}: cut short or damaged ({in_one_line(error)}); fetch it again")


def _member(archive: Any, source: Path) -> str:
    names = [str(member.filename) for member in archive.list() if not member.is_directory]
    dumps = [name for name in names if PurePosixPath(name).name.lower() == DUMP]
    chosen = names if len(names) == 1 else dumps
    if len(chosen) != 1:
        listed = ", ".join(names)[:200] or "none"
        raise InputError(f"{source}: an archive of these files: {listed!a}; unpack the one that holds the text")
    return chosen[0]


class _Writers(WriterFactory):  # type: ignore[misc]
    """A factory of the only file that an extraction writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def create(self, filename: str) -> Any:  # noqa: ARG002 (of the interface, as below)
        return _Writer(self.file)


class _Writer(Py7zIO):  # type: ignore[misc]
    """A file as py7zr writes it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, s: bytes | bytearray) -> int:
        return self.file.write(s)

    def read(self, size: int | None = None) -> bytes:  # noqa: ARG002
        return b""

    def seek(self, offset: int, whence: int = 0) -> int:  # noqa: ARG002
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def size(self) -> int:
        return self.file.tell()
