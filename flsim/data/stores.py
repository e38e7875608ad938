"""Corpora at a URI, in object stores or folders: they are fetched once into a local folder, and mapped there.

    s3://BUCKET/PREFIX?endpoint_override=minio.local:9000&scheme=http
    gs://BUCKET/PREFIX?anonymous=true
    file:///FOLDER

    $FLSIM_CACHE/corpora/DIGEST/           the corpus whose manifest has that digest
    $FLSIM_CACHE/corpora/DIGEST.lock       locked by the process that fetches
    $FLSIM_CACHE/fetched/                  by URI, the digest of the manifest that was last read from it

Credentials come from the same places as for the tools of each provider, not from a URI, which run folders show. A
corpus is fetched completely, because rounds read users at random. A folder of the cache never changes.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import parse_qsl, unquote, urlsplit

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import HashedFile, digest, held, make_folder, new_file, new_folder
from flsim.base.progress import progress, say
from flsim.data.manifest import PLANTED, TOKENIZER_FILES, layout_in, named, read_manifest, splits_in

if TYPE_CHECKING:  # folders are read without pyarrow
    from pyarrow.fs import FileSystem

OPTIONS = {
    "s3": ("region", "scheme", "endpoint_override", "anonymous"),
    "gs": ("project_id", "scheme", "endpoint_override", "anonymous"),
    "file": (),
}
BLOCK = 8 << 20  # bytes per request
TIMEOUT, ATTEMPTS = 5, 3  # seconds without a response; flsim waits at most 20 s for a silent store
SILENT = ("NETWORK_CONNECTION", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Could not connect", "etry policy exhausted")
REFUSED = ("ACCESS_DENIED", "HTTP status 401", "HTTP status 403", "PERMISSION_DENIED", "UNAUTHENTICATED", "credentials")


class _NoAnswer(InputError):  # noqa: N818 (what the store is)
    """The error about a store that does not answer."""


def is_uri(location: Path | str) -> TypeGuard[str]:
    """Return whether a location is the URI of a store, not a folder."""
    return isinstance(location, str) and "://" in location


def located(location: Path | str, base: Path = Path()) -> Path | str:
    """Return a URI unchanged, or a folder as an absolute path, relative to `base`."""
    return location if is_uri(location) else (base / location).resolve()


def _open_store(uri: str) -> "tuple[FileSystem, str]":
    """Return a store and the path in it, without a request to the store."""
    from pyarrow import ArrowException

    try:
        parts = urlsplit(uri)
        options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InputError(f"{uri}: not a URI ({error})") from error
    if parts.scheme not in OPTIONS:
        if not parts.scheme:
            raise InputError(f"{uri}: this is a folder, not the URI of a store; use a URI such as s3://BUCKET/PREFIX")
        raise InputError(f"{uri}: cannot read from {parts.scheme}://; name a folder, or {', '.join(OPTIONS)}://")
    if parts.username is not None or parts.password is not None:
        raise InputError(
            f"{parts.scheme}://: a URI must not contain credentials, because run folders show the URI; set "
            "them as the tools of the provider expect, for example in AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    for name in options:
        if name not in OPTIONS[parts.scheme]:
            raise InputError(
                f"{parts.scheme}://{parts.netloc}{parts.path}: there is no option {name}; the options are "
                f"{', '.join(OPTIONS[parts.scheme]) or 'none'}"
            )
    path = f"{parts.netloc}{unquote(parts.path)}".rstrip("/")
    if parts.fragment or (parts.scheme == "file") != (not parts.netloc):
        raise InputError(f"{uri}: write it as s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER")
    try:
        return _store(parts.scheme, options), path
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"{uri}: {in_one_line(error):.300}") from error


def _store(scheme: str, options: Mapping[str, Any]) -> "FileSystem":
    from pyarrow.fs import AwsStandardS3RetryStrategy, GcsFileSystem, LocalFileSystem, S3FileSystem

    options = {**options, **({"anonymous": options["anonymous"] == "true"} if "anonymous" in options else {})}
    if scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and "endpoint_override" not in options:
            over, _, host = endpoint.rpartition("://")
            options = {"endpoint_override": host.rstrip("/"), "scheme": over or "https", **options}
        retry = AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
        return S3FileSystem(connect_timeout=TIMEOUT, request_timeout=TIMEOUT, retry_strategy=retry, **options)
    if scheme == "gs":
        return GcsFileSystem(retry_time_limit=timedelta(seconds=2 * TIMEOUT), **options)
    return LocalFileSystem()


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn errors of a store into one-line input errors."""
    from pyarrow import ArrowException

    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{what}: no such object or bucket") from error
    except (OSError, ArrowException) as error:
        message = f"{in_one_line(error):.300}"
        if "NO_SUCH_BUCKET" in message:
            raise InputError(f"{what}: no such bucket; create the bucket first") from error
        if any(sign in message for sign in SILENT):
            raise _NoAnswer(f"{what}: the store does not answer ({message})") from error
        if any(sign in message for sign in REFUSED):
            raise InputError(
                f"{what}: access refused ({message}); set credentials of a user with read access"
            ) from error
        raise InputError(f"{what}: {message}") from error


def cache() -> Path:
    """Return the folder of fetched corpora: ``$FLSIM_CACHE``, or ``~/.cache/flsim``."""
    return Path(os.environ.get("FLSIM_CACHE") or Path.home() / ".cache" / "flsim").absolute()


def fetched(uri: str) -> Path:
    """Return the local folder of a corpus, and fetch the corpus if needed.

    The manifest is read from the store each time. If the store does not answer, flsim uses the last corpus of this URI
    and prints a line. Raises InputError if the corpus does not exist, cannot be accessed, differs from its manifest, or
    does not fit on the disk; or the store does not answer and this URI was never fetched.
    """
    corpora = cache() / "corpora"
    seen = cache() / "fetched" / digest(uri)
    try:
        store, prefix = _open_store(uri)
        with _reading(uri), store.open_input_stream(f"{prefix}/manifest.json") as file:
            text = file.read()
    except _NoAnswer as error:
        last = seen.read_text().strip() if seen.is_file() else ""
        if not (corpora / last / "manifest.json").is_file():
            raise
        say(f"{error}; using the last fetched copy, with digest {last[:12]}")
        return corpora / last
    folder = corpora / digest(text)
    with _on_disk(cache()):
        if not folder.exists():
            make_folder(corpora)
            with _exclusive(folder.with_suffix(".lock"), uri):
                if not folder.exists():
                    _fetch(uri, store, prefix, text, folder)
        elif (folder / "manifest.json").read_bytes() != text:
            raise InputError(
                f"{folder}: this folder differs from what was fetched from {uri}; remove the folder to fetch the "
                "corpus again"
            )
        seen.parent.mkdir(exist_ok=True)
        with new_file(seen) as partial:
            partial.write_text(folder.name)
    return folder


def push(folder: Path, uri: str) -> None:
    """Copy a corpus into a store, with its manifest last; an interrupted copy, which is no corpus, can be repeated."""
    from pyarrow.fs import LocalFileSystem

    store, prefix = _open_store(uri)
    manifest = (folder / "manifest.json").read_bytes()
    files = [*read_manifest(manifest, folder)[1], "manifest.json"]
    with _reading(uri), progress(f"writing {uri} (files)", len(files)) as advance:
        try:
            with store.open_input_stream(f"{prefix}/manifest.json") as file:
                if digest(file.read()) != digest(manifest):
                    raise InputError(
                        f"{uri}: this place has another corpus; name another place, or remove the corpus first"
                    )
        except FileNotFoundError:
            pass
        for done, name in enumerate(files, start=1):
            target = f"{prefix}/{name}"
            if isinstance(store, LocalFileSystem):
                store.create_dir(target.rpartition("/")[0])
            with (folder / name).open("rb") as source, store.open_output_stream(target) as out:
                shutil.copyfileobj(source, out, BLOCK)
            advance(done)


def _fetch(uri: str, store: "FileSystem", prefix: str, text: bytes, folder: Path) -> None:
    """Copy the files that a manifest names into a new folder, and compare them with their digests."""
    manifest, files = read_manifest(text, uri)
    known = {*named(layout_in(manifest), splits_in(files)), *PLANTED}
    known |= {f"tokenizer/{name}" for name in TOKENIZER_FILES}
    for name in files:
        if name not in known:
            raise InputError(
                f"{uri}: its manifest names {name!r:.80}, which is not a file of a corpus; copy the corpus again"
            )
    total = sum(size for size, _ in files.values())
    free = shutil.disk_usage(folder.parent).free
    if total > free:
        raise InputError(
            f"{folder.parent}: no space for {uri}, which needs {total:,} bytes; {free:,} are free. Free some "
            "space, or set FLSIM_CACHE to a folder on another disk"
        )
    with new_folder(folder) as partial, progress(f"fetching {uri} (MB)", total / 1e6, unit="MB") as advance:
        done = 0
        for name, (size, sha256) in files.items():
            what = f"{uri}: {name}"
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            with (partial / name).open("wb") as file:
                copy = HashedFile(file)
                for block in _blocks(store, f"{prefix}/{name}", size, what):
                    copy.write(block)
                    advance((done := done + len(block)) / 1e6)
            if copy.described()["sha256"] != sha256:
                raise InputError(
                    f"{what}: this object differs from the manifest (sha256); try again, or copy the corpus again"
                )
        (partial / "manifest.json").write_bytes(text)


def _blocks(store: "FileSystem", source: str, size: int, what: str) -> Iterator[bytes]:
    """Yield up to `size` bytes of a file, in order."""
    with _reading(what), store.open_input_stream(source) as file:
        while block := file.read(min(BLOCK, size)):
            size -= len(block)
            yield block


@contextmanager
def _exclusive(lock: Path, uri: str) -> Iterator[None]:
    """Wait until no other process of this machine fetches the same corpus; the lock ends with the process."""
    lock.touch()
    with ExitStack() as stack:
        try:
            stack.enter_context(held(lock))
        except BlockingIOError:
            say(f"{uri}: waiting for another process that fetches this corpus")
            stack.enter_context(held(lock, wait=True))
        yield


@contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    """Turn errors of the cache's disk into input errors, because the user can name another folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: {error.strerror}; free some space, or set FLSIM_CACHE to another folder"
        ) from error
