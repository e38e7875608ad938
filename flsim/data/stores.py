"""Object stores and folders that a URI names, opened through pyarrow.

    s3://BUCKET/PREFIX?region=eu-west-1
    s3://BUCKET/PREFIX?endpoint_override=minio.local:9000&scheme=http
    gs://BUCKET/PREFIX?anonymous=true
    file:///FOLDER

Supported are S3 and stores that speak its protocol, Google Cloud Storage, and folders. Credentials come from where each
provider's own tools look: environment, profile, or role of the machine. A URI must not hold credentials, because it is
written into run folders and reports.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import parse_qsl, unquote, urlsplit

from flsim.base.errors import InputError, in_one_line

if TYPE_CHECKING:  # folders are read without pyarrow
    from pyarrow.fs import FileSystem

OPTIONS = {
    "s3": ("region", "scheme", "endpoint_override", "anonymous"),
    "gs": ("project_id", "scheme", "endpoint_override", "anonymous"),
    "file": (),
}
TIMEOUT, ATTEMPTS = 5, 3  # seconds without a sign of life; a store that is silent is given up within 20
SILENT = ("NETWORK_CONNECTION", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Could not connect", "etry policy exhausted")
REFUSED = ("ACCESS_DENIED", "HTTP status 401", "HTTP status 403", "PERMISSION_DENIED", "UNAUTHENTICATED", "credentials")


class Silent(InputError):  # noqa: N818 (what the store is)
    """The error that a store does not answer."""


def is_uri(location: Path | str) -> TypeGuard[str]:
    """Return whether a location is the URI of a store, and not a folder."""
    return isinstance(location, str) and "://" in location


def located(location: Path | str, base: Path = Path()) -> Path | str:
    """Return a URI unchanged, or a folder as an absolute path, where a relative one starts at `base`."""
    return location if is_uri(location) else (base / location).resolve()


def open_store(uri: str) -> "tuple[FileSystem, str]":
    """Return a store and the path in it, without a request to the store.

    Raises:
        InputError: the scheme or an option is not known, or the URI holds credentials.
    """
    from pyarrow import ArrowException

    try:
        parts = urlsplit(uri)
        options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InputError(f"{uri}: not a URI ({error})") from error
    if parts.scheme not in OPTIONS:
        if not parts.scheme:
            raise InputError(f"{uri}: a folder, and not the URI of a store; name one as s3://BUCKET/PREFIX")
        raise InputError(f"{uri}: cannot read from {parts.scheme}://; name a folder, or {', '.join(OPTIONS)}://")
    if parts.username is not None or parts.password is not None:
        raise InputError(
            f"{parts.scheme}://: no credentials in a URI, which run folders show; set them where "
            "the provider's tools look, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    for name in options:
        if name not in OPTIONS[parts.scheme]:
            raise InputError(
                f"{parts.scheme}://{parts.netloc}{parts.path}: has no option {name}; "
                f"there are {', '.join(OPTIONS[parts.scheme]) or 'none'}"
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
def reading(what: str) -> Iterator[None]:
    """Turn errors of a store into one-line input errors.

    Raises:
        InputError: nothing is there, or access is refused.
        Silent: the store does not answer.
    """
    from pyarrow import ArrowException

    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{what}: nothing is there, or no such bucket") from error
    except (OSError, ArrowException) as error:
        message = f"{in_one_line(error):.300}"
        if "NO_SUCH_BUCKET" in message:
            raise InputError(f"{what}: no such bucket; make it first") from error
        if any(sign in message for sign in SILENT):
            raise Silent(f"{what}: the store does not answer ({message})") from error
        if any(sign in message for sign in REFUSED):
            raise InputError(
                f"{what}: access refused ({message}); set credentials of a user who may read it"
            ) from error
        raise InputError(f"{what}: {message}") from error
