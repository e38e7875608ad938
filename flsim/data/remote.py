"""Corpora in object stores, fetched once into a folder of this machine and memory-mapped there.

    $FLSIM_CACHE/corpora/DIGEST/           the corpus whose manifest has that digest
    $FLSIM_CACHE/corpora/DIGEST.partial/   the part of it that was fetched so far; the next fetch continues it
    $FLSIM_CACHE/corpora/DIGEST.lock       locked by the process that fetches
    $FLSIM_CACHE/fetched/                  by URI, the digest of the manifest that was last read from it

Files are not copied with `pyarrow.fs.copy_files`, for three reasons: it does not continue a file that was begun, it
reads a file by one request after another, and it reports no progress. Only file names that a corpus has are read from
the store, and only bytes that its manifest seals get into the cache.

A corpus is fetched whole and not read from the store as needed: rounds read users at random, and a local mapping serves
these reads at the speed of memory. A folder of the cache is named by the digest of its manifest. It is therefore never
changed in place, and URIs of the same corpus share it. The files of a `file://` URI are copied too, while those of a
path are mapped in place. Which of these is faster depends on the filesystem, which the user knows.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyarrow.fs import FileSystem, LocalFileSystem

from flsim.base.errors import InputError
from flsim.base.files import HashedFile, digest, held, make_folder, new_file, sync, sync_folder
from flsim.base.progress import progress, say
from flsim.data.manifest import PLANTED, named, read_manifest, splits_in, token_type_in
from flsim.data.stores import Silent, open_store, reading

BLOCK = 8 << 20  # bytes of a request
STREAMS = 8  # requests at once


def cache() -> Path:
    """Return the folder of fetched corpora: ``$FLSIM_CACHE``, or ``~/.cache/flsim``."""
    return Path(os.environ.get("FLSIM_CACHE") or Path.home() / ".cache" / "flsim").absolute()


def fetched(uri: str) -> Path:
    """Return the local folder of a corpus, which is fetched if it is not there yet.

    The manifest is read from the store each time, so that a corpus that changed there gets another local folder. If the
    store does not answer, the last corpus of this URI is used, and a line says so. A store that answers "not found" or
    "not allowed" is believed.

    Args:
        uri: the corpus, such as ``s3://bucket/prefix/corpus?region=eu-west-1``; see `flsim.data.stores`.

    Raises:
        InputError: the scheme is not known, or the corpus does not exist, cannot be accessed, differs from its
            manifest, or does not fit on the disk; or the store does not answer and this URI was never fetched.
    """
    corpora = cache() / "corpora"
    seen = cache() / "fetched" / digest(uri)
    try:
        store, prefix = open_store(uri)
        with reading(uri), store.open_input_stream(f"{prefix}/manifest.json") as file:
            text = file.read()
    except Silent as error:
        last = seen.read_text().strip() if seen.is_file() else ""
        if not (corpora / last / "manifest.json").is_file():
            raise
        say(f"{error}; using the copy that was fetched last, of digest {last[:12]}")
        return corpora / last
    folder = corpora / digest(text)
    with _on_disk(cache()):
        if not folder.exists():
            make_folder(corpora)
            with _exclusive(folder.with_suffix(".lock"), uri):
                if not folder.exists():
                    _fetch(uri, store, prefix, text, folder)
        elif (folder / "manifest.json").read_bytes() != text:
            raise InputError(f"{folder}: is not what was fetched from {uri}; remove that folder to fetch it again")
        seen.parent.mkdir(exist_ok=True)
        with new_file(seen) as partial:
            partial.write_text(folder.name)
    return folder


def push(folder: Path, uri: str) -> None:
    """Copy a corpus into a store, its manifest last, so that nobody sees half of it.

    The same call continues an interrupted copy.

    Raises:
        InputError: another corpus is there, there is no such bucket, access is refused, or the store does not answer.
    """
    store, prefix = open_store(uri)
    manifest = (folder / "manifest.json").read_bytes()
    files = [*read_manifest(manifest, folder)[1], "manifest.json"]
    with reading(uri), progress(f"writing {uri} (files)", len(files)) as advance:
        try:
            with store.open_input_stream(f"{prefix}/manifest.json") as file:
                if digest(file.read()) != digest(manifest):
                    raise InputError(f"{uri}: another corpus is there; name another place, or remove it first")
        except FileNotFoundError:
            pass
        for done, name in enumerate(files, start=1):
            target = f"{prefix}/{name}"
            if isinstance(store, LocalFileSystem):
                store.create_dir(target.rpartition("/")[0])
            with (folder / name).open("rb") as source, store.open_output_stream(target) as out:
                shutil.copyfileobj(source, out, BLOCK)
            advance(done)


def _fetch(uri: str, store: FileSystem, prefix: str, text: bytes, folder: Path) -> None:
    """Fill the partial folder, then rename it."""
    manifest, files = read_manifest(text, uri)
    known = {*named(token_type_in(manifest), splits_in(files)), *PLANTED}
    for name in files:
        if name not in known:
            raise InputError(f"{uri}: its manifest names {name!r:.80}, which no corpus has; copy it there again")
    partial = folder.with_suffix(".partial")
    fetched_bytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
    total = sum(size for size, _ in files.values())
    free = shutil.disk_usage(folder.parent).free
    if total - fetched_bytes > free:
        raise InputError(
            f"{folder.parent}: no room for {uri}, which takes {total:,} bytes; {free:,} are free. Make room, or have "
            "FLSIM_CACHE name a folder on another disk"
        )
    done = 0
    with progress(f"fetching {uri} (MB)", total / 1e6, unit="MB") as advance:

        def add(size: int) -> None:
            nonlocal done
            done += size
            advance(done / 1e6)

        for name, sealed in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _complete(path, store, f"{prefix}/{name}", sealed, f"{uri}: {name}", add)
    (partial / "manifest.json").write_bytes(text)
    sync_folder(partial)
    partial.rename(folder)
    sync(folder.parent)


def _complete(
    path: Path, store: FileSystem, source: str, sealed: tuple[int, str], what: str, add: Callable[[int], None]
) -> None:
    """Append the bytes that a file lacks, and remove it and raise InputError if it then differs from the manifest.

    A file that an earlier call began is first fetched anew: a loss of power can leave bytes that were never fetched.
    """
    size, sha256 = sealed
    begun = path.exists()
    with path.open("a+b") as file:
        file.seek(0)
        whole = HashedFile(file)
        while block := whole.read(BLOCK):
            add(len(block))
        for block in _blocks(store, source, whole.bytes, size, what):
            whole.write(block)
            add(len(block))
    if whole.described()["sha256"] != sha256:
        add(-path.stat().st_size)
        path.unlink()
        if begun:
            _complete(path, store, source, sealed, what, add)
            return
        raise InputError(
            f"{what}: is not what the manifest says (its sha256 differs); try again, or copy the corpus there again"
        )


def _blocks(store: FileSystem, source: str, start: int, size: int, what: str) -> Iterator[bytes]:
    """Yield the rest of a file, in order, read by several requests at once."""
    if start >= size:
        return
    with reading(what), store.open_input_file(source) as file, ThreadPoolExecutor(STREAMS) as pool:
        end = min(size, file.size())
        for first in range(start, end, BLOCK * STREAMS):
            offsets = range(first, min(first + BLOCK * STREAMS, end), BLOCK)
            yield from pool.map(lambda offset: file.read_at(min(BLOCK, end - offset), offset), offsets)


@contextmanager
def _exclusive(lock: Path, uri: str) -> Iterator[None]:
    """Wait until no other process of this machine fetches the same corpus; the lock ends with the process."""
    lock.touch()
    with ExitStack() as stack:
        try:
            stack.enter_context(held(lock))
        except BlockingIOError:
            say(f"{uri}: waiting for another process, which fetches it")
            stack.enter_context(held(lock, wait=True))
        yield


@contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    """Turn errors of the cache's disk into input errors, because another folder can be named."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: {error.strerror}; make room, or have FLSIM_CACHE name another folder"
        ) from error
