"""Syncing of files and folders to the disk, so that a loss of power takes nothing that is done."""

import errno
import os
from pathlib import Path

from flsim.base.progress import say

# How file systems refuse to sync folders: several FUSE and SMB mounts answer EINVAL, others the rest. PostgreSQL
# (fsync_fname_ext) ignores the first two. EIO is a failure of the disk, which nothing here ignores.
UNSUPPORTED = frozenset({errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_warned: set[int] = set()  # devices, so that a process names each file system once


def sync(path: Path) -> None:
    """Return once a file's bytes, or the names in a folder, are on the disk and survive a loss of power.

    If the file system cannot sync folders, one warning names the folder, and nothing is raised.

    Raises:
        OSError: the path cannot be synced. The error names the path, unless the path is a half-written file.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            if not _is_partial(path.name):
                error.filename = str(_without_partial(path.absolute()))
            raise
        _warn_once(_without_partial(path.absolute()), os.fstat(descriptor).st_dev, error)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return once a folder and all files in it are on the disk."""
    for part in [path, *path.rglob("*")]:
        sync(part)


def _warn_once(path: Path, device: int, error: OSError) -> None:
    if device not in _warned:
        _warned.add(device)
        say(
            f"{path}: this file system cannot sync folders ({error.strerror}); flsim continues, but a loss of power "
            f"may remove files that were just written; to prevent that, use another file system",
            file=str(path),
        )


def _is_partial(name: str) -> bool:
    return name.startswith(".") and ".partial-" in name


def _without_partial(path: Path) -> Path:
    """Return the folder around a half-written file or folder, whose own name nobody knows; else the path."""
    return next((part.parent for part in reversed((path, *path.parents)) if _is_partial(part.name)), path)
