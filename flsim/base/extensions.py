"""A user's own code, which settings name as ``path/to/file.py:NAME`` wherever they name something built-in.

The file is one module: it may import flsim and installed packages, and not its neighbours. It is executed where the
thing is first used, and never to read a configuration or results.
"""

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import TypeVar

from flsim.base.errors import InputError, RunFailed, is_out_of_memory
from flsim.base.files import file_digest

Thing = TypeVar("Thing")
_modules: dict[str, ModuleType] = {}  # by sha256 of the source
_places: dict[str, Path] = {}  # where files lie that were named by content, by sha256 of the source
_files: set[str] = set()  # all that were executed, as frames of a traceback name them
_lock = RLock()


@dataclass(frozen=True)
class Own:
    """Marks a setting that may name a user's own thing: ``architecture: Annotated[str, Own("model")]``.

    Attributes:
        kind: what the setting names.
    """

    kind: str


def is_own(name: str) -> bool:
    """Whether a name is ``path/to/file.py:NAME``."""
    path, _, attribute = name.rpartition(":")
    return path.endswith(".py") and attribute.isidentifier()


def parts(name: str) -> tuple[Path, str]:
    """Return the file and the NAME of ``path/to/file.py:NAME``."""
    path, _, attribute = name.rpartition(":")
    return Path(path), attribute


def refuse_unknown(name: str, built_in: Mapping[str, object], kind: str) -> None:
    """Raise InputError where a name is neither built-in nor has the form of a user's own. No code is executed."""
    if name not in built_in and not is_own(name):
        raise InputError(
            f"{kind} must be one of {', '.join(built_in)}, found {name!r}; name your own as path/to/file.py:NAME"
        )


def resolve(name: str, built_in: Mapping[str, Thing], kind: str) -> Thing:
    """Return the built-in thing of a name, or the object that a user's file defines.

    A file is executed once per process and content.

    Args:
        name: a key of `built_in`, ``path/to/file.py:NAME``, or what `by_content` returned in this process.
        built_in: the built-in things by name.
        kind: what they are, for messages.

    Raises:
        InputError: the name is neither, there is no such file or NAME, or the file failed.
    """
    refuse_unknown(name, built_in, kind)
    if not is_own(name):
        return built_in[name]
    path, attribute = parts(name)
    with _lock:
        module = _modules.get(path.stem) or _module_of(path)
    if not hasattr(module, attribute):
        raise InputError(f"{path}: defines no {attribute}; correct the name of the {kind}")
    thing: Thing = getattr(module, attribute)
    return thing


def resolve_class(name: str, built_in: Mapping[str, type[Thing]], kind: str, base: type[Thing]) -> type[Thing]:
    """Return a class that derives from `base`; arguments and errors as `resolve`.

    Raises:
        InputError: what a user's file defines is no such class.
    """
    thing: object = resolve(name, built_in, kind)
    if not (isinstance(thing, type) and issubclass(thing, base)):
        raise InputError(f"{name}: is no subclass of {base.__module__}.{base.__qualname__}; make it one")
    return thing


def short_name(name: str) -> str:
    """Return NAME of ``path/to/file.py:NAME``, and a built-in name as it is. No code is executed."""
    return parts(name)[1] if is_own(name) else name


def source_digest(name: str) -> str:
    """Return the sha256, in hexadecimal, of the file of ``path/to/file.py:NAME``.

    Raises:
        InputError: it cannot be read.
    """
    path, _ = parts(name)
    try:
        return file_digest(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); put the file there") from error


def by_content(name: str) -> str:
    """Return ``SHA256.py:NAME`` for ``path/to/file.py:NAME``, which says the same wherever the file lies.

    A built-in name, and one that is by content already, stays as it is.

    Raises:
        InputError: the file cannot be read.
    """
    path, attribute = parts(name)
    if not is_own(name) or path.stem in _places:
        return name
    digest = source_digest(name)
    _places[digest] = path
    return f"{digest}.py:{attribute}"


def execute(path: Path) -> ModuleType:
    """Return a new module that a file defines, which can import its neighbours, as a script can.

    Raises:
        InputError: it cannot be read, or it failed; the message names the line.
    """
    source = _read(path)
    sys.path.insert(0, str(path.resolve().parent))
    return _execute(path, source)


def place(error: BaseException) -> str | None:
    """Return ``file.py:12`` of the innermost frame in a user's own file; None where the error passed none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


@contextmanager
def naming_own_code(failure: type[InputError] | type[RunFailed] = RunFailed) -> Iterator[None]:
    """Turn an error of a user's own code into one line that names its file and line.

    Errors of flsim, those of other code, and a lack of memory leave the block as they are.

    Args:
        failure: the type of the error; InputError where nothing has been trained yet.
    """
    try:
        yield
    except (InputError, RunFailed):
        raise
    except Exception as error:
        where = place(error)
        if where is None or is_out_of_memory(error):
            raise
        raise failure(f"{where}: {_described(error)}") from error


@contextmanager
def calling_own(name: str, needs: str, failure: type[InputError] | type[RunFailed] = RunFailed) -> Iterator[None]:
    """Turn errors of a user's own code into one line, as `naming_own_code`, and those of a call that it does not fit.

    Args:
        name: of the thing.
        needs: the calls that it must allow, for the message.
        failure: as `naming_own_code`.
    """
    try:
        with naming_own_code(failure):
            yield
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, InputError) or not is_own(name):
            raise
        raise failure(f"{name}: {error}; it needs {needs}") from error


def _module_of(path: Path) -> ModuleType:
    """Return the module of a file's content, which is executed where it is new."""
    lies = _places.get(path.stem, path)
    source = _read(lies)
    digest = sha256(source).hexdigest()
    if lies != path and digest != path.stem:
        raise InputError(f"{lies}: changed since it was named; restore it")
    if digest not in _modules:
        _modules[digest] = _execute(lies, source)
    return _modules[digest]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _execute(path: Path, source: bytes) -> ModuleType:
    """Execute what was read, without a cache of bytecode; what it prints goes to standard error."""
    module = ModuleType(f"_own_{sha256(source).hexdigest()}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    _files.add(str(path))
    try:
        with redirect_stdout(sys.stderr), naming_own_code(InputError):
            exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 (the user asked for it)
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: {error.msg}") from error
    except (ValueError, SystemExit) as error:
        if isinstance(error, InputError):
            raise _about_neighbours(path, error) from error
        raise InputError(f"{path}: failed with {type(error).__name__}: {error}") from error
    return module


def _about_neighbours(path: Path, error: InputError) -> InputError:
    """Say why an import failed, where the file wanted one beside it."""
    missing = error.__cause__
    if isinstance(missing, ModuleNotFoundError) and (path.parent / f"{missing.name}.py").exists():
        return InputError(f"{error}; it may import flsim and installed packages, not its neighbours: make it one file")
    return error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
