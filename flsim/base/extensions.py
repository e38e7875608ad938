"""Loading of custom code, which settings name as ``path/to/file.py:NAME`` in place of a built-in name.

Such a file is a single module, which is executed when the object that it defines is first used, never to read a
configuration or results. Within flsim, a name includes its options: ``path/to/file.py:NAME{"alpha": 0.1}``.
"""

import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, TypeVar

from flsim.base.errors import CustomCodeError, InputError, RunFailed, Terminated, is_out_of_memory
from flsim.base.files import file_digest

Thing = TypeVar("Thing")
Option = int | float | bool | str
BY_NAME = "must be a name; name custom code as 'path/to/file.py:NAME'"
NAME = re.compile(r"(.+?\.py):(\w+)(\{.*\})?", re.DOTALL)
BUILT_IN = re.compile(r"([\w-]+)(\{.*\})?", re.DOTALL)  # a built-in name and its options
_modules: dict[str, ModuleType] = {}  # executed modules by the sha256 of the source
_places: dict[str, Path] = {}  # paths of files that were named by content, by the sha256 of the source
_files: set[str] = set()  # all executed files, as in frames of a traceback
_lock = RLock()
_executable: ContextVar[frozenset[str] | None] = ContextVar("_executable", default=None)  # allowed kinds; None for all


@dataclass(frozen=True)
class CustomName:
    """Annotation of a setting that names built-in or custom code: ``Annotated[str, CustomName("noise", NOISES)]``."""

    kind: str  # kind of the object, such as "noise"
    # the built-in objects by name; pydantic refuses other names that do not have the form of a custom name
    built_in: Mapping[str, object] = field(repr=False, compare=False)

    def check(self, name: Any) -> Any:
        """Return a valid name, or None; raise ValueError for anything else."""
        if not isinstance(name, str | None):
            raise ValueError(BY_NAME)
        if name is not None and name not in self.built_in and not is_custom(name):
            raise ValueError(_one_of(name, self.built_in))
        return name

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.check, handler(kind))


def _one_of(name: str, built_in: Mapping[str, object]) -> str:
    return f"must be one of {', '.join(built_in)}, found {name!r}; name custom code as path/to/file.py:NAME"


def is_custom(name: str) -> bool:
    """Return whether a name has the form ``path/to/file.py:NAME``, with or without options."""
    match = NAME.fullmatch(name)
    return match is not None and match[2].isidentifier() and _is_table(match[3] or "{}")


def _is_table(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def parts(name: str) -> tuple[Path, str]:
    """Return the file and the NAME of ``path/to/file.py:NAME``, without options."""
    if match := NAME.fullmatch(name):
        return Path(match[1]), match[2]
    path, _, attribute = name.rpartition(":")
    return Path(path), attribute


def options_of(name: str) -> dict[str, Option]:
    match = NAME.fullmatch(name) or BUILT_IN.fullmatch(name)
    text = match[match.re.groups] if match else None
    options: dict[str, Option] = json.loads(text) if text and _is_table(text) else {}
    return options


def without_options(name: str) -> str:
    """Return a built-in name without its options; any other name unchanged."""
    match = BUILT_IN.fullmatch(name)
    return match[1] if match and _is_table(match[2] or "{}") else name


def configured(settings: object, setting: str) -> str:
    """Return the name in a setting, with the options in the setting ``{setting}_options`` of the same dataclass."""
    return with_options(getattr(settings, setting), getattr(settings, f"{setting}_options"))


def with_options(name: str, options: Mapping[str, object]) -> str:
    """Return a name that includes options."""
    return f"{name}{json.dumps(dict(options), sort_keys=True, ensure_ascii=False)}" if options else name


def refuse_wrong_options(settings: object, *names: str) -> None:
    for setting in names:
        name = getattr(settings, setting)
        if options_of(name):
            raise InputError(f"{setting}: write the options of {short_name(name)} in {setting}_options")
        refuse_options(name, getattr(settings, f"{setting}_options"), f"{setting}_options")


def refuse_unused(settings: Any, name: str, choice: str, users: Collection[str]) -> None:
    """Raise InputError if a value of the setting `name` has no effect, since no built-in among `users` is chosen."""
    value, chosen = getattr(settings, name), getattr(settings, choice)
    default = next(item.default for item in fields(settings) if item.name == name)
    if value not in (0, default) and chosen not in users and not is_custom(chosen):
        raise InputError(f'{name} {value:g}: has no effect with {choice} "{chosen}"; it is for {", ".join(users)}')


def refuse_options(name: str, options: Mapping[str, object], setting: str) -> None:
    """Raise InputError for options of a built-in name, which `setting` holds."""
    if options and not is_custom(name):
        raise InputError(f'{setting}: options are for custom code only, found "{name}"; remove them')


def made(name: str, make: Callable[..., Thing], *arguments: object) -> Thing:
    """Call a class or function with arguments and its name's options; InputError if custom code refuses them."""
    options = options_of(name)
    try:
        return make(*arguments, **options)
    except TypeError:
        if options or not arguments or not is_custom(name):
            try:
                inspect.signature(make).bind(*arguments, **options)
            except TypeError as error:
                path, attribute = parts(name_in_settings(name))
                written = f"{path}:{attribute}" if is_custom(name) else without_options(name)
                raise InputError(f"{written}: {error}; correct its options") from error
        raise


def refuse_unknown(name: str, built_in: Mapping[str, object], kind: str) -> None:
    """Raise InputError if a name is neither built-in nor ``path/to/file.py:NAME``; no code is executed."""
    if not isinstance(name, str):
        raise InputError(f"{kind} {BY_NAME}, found {name!r:.60}")
    if without_options(name) not in built_in and not is_custom(name):
        raise InputError(f"{kind} {_one_of(name, built_in)}")


def resolve(name: str, built_in: Mapping[str, Thing], kind: str) -> Thing:
    """Return the built-in object of a name, or what a custom file defines, which is executed once per content.

    Raises InputError if a name, a key of `built_in` or custom, is invalid, its file is missing or failed, or
    `restrict_custom_code` does not allow it. `kind` is for messages.
    """
    refuse_unknown(name, built_in, kind)
    if not is_custom(name):
        return built_in[without_options(name)]
    path, attribute = parts(name)
    kinds = _executable.get()
    if kinds is not None and kind not in kinds:
        raise not_executed(name, kind)
    with _lock:
        module = _modules.get(path.stem)
        if module is None:
            lies = _places.get(path.stem, path)
            source = _read(lies)
            digest = sha256(source).hexdigest()
            if lies != path and digest != path.stem:
                raise InputError(f"{lies}: this file changed after its digest was recorded; restore the file")
            module = _modules[digest] = _modules.get(digest) or _execute(lies, source)
    if not hasattr(module, attribute):
        raise InputError(
            f"{_places.get(path.stem, path)}: the file does not define {attribute}; correct the name of the {kind}"
        )
    thing: Thing = getattr(module, attribute)
    return thing


def not_executed(name: str, kind: str) -> InputError:
    """Return the error of a command that would have to execute custom code to read a run."""
    return InputError(
        f"custom {kind} {short_name(name)}: this command does not execute a run's custom {kind}; use a run "
        f"with a built-in {kind}, or flsim table, compare, audit or report, which read the stored results of "
        "this run"
    )


@contextmanager
def restrict_custom_code(*kinds: str) -> Iterator[None]:
    """Allow only custom code of these kinds, such as "architecture", by default none, in the block or function.

    Commands that read runs use it, so that a run folder from another person cannot execute code.
    """
    outer = _executable.get()
    token = _executable.set(frozenset(kinds) if outer is None else outer.intersection(kinds))
    try:
        yield
    finally:
        _executable.reset(token)


def resolve_class(name: str, built_in: Mapping[str, type[Thing]], kind: str, *bases: type[Thing]) -> type[Thing]:
    """Return a class that is derived from one of `bases`, of which an error names the first; otherwise as `resolve`."""
    thing: object = resolve(name, built_in, kind)
    if not (isinstance(thing, type) and issubclass(thing, bases)):
        raise InputError(
            f"{name_in_settings(name)}: this object is not a subclass of "
            f"{bases[0].__module__}.{bases[0].__qualname__}; derive it from this class"
        )
    return thing


def short_name(name: str) -> str:
    """Return the NAME of ``path/to/file.py:NAME``, or a built-in name, with its options; no code is executed.

    >>> short_name('my.py:Blocks{"size": 3}')
    'Blocks(size=3)'
    """
    return (parts(name)[1] if is_custom(name) else without_options(name)) + options_as_text(name)


def label_of(name: str, built_in: Mapping[str, Any]) -> str:
    """Return the part of a row's name in tables: the `label` of a built-in thing, or NAME, with options."""
    return short_name(name) if is_custom(name) else built_in[without_options(name)].label + options_as_text(name)


def options_as_text(name: str) -> str:
    """Return the options of a name as ``(alpha=0.1, mode=fast)``; empty if there are none."""
    text = ", ".join(f"{key}={value}" for key, value in options_of(name).items())
    return f"({text})" if text else ""


def source_digest(name: str) -> str:
    """Return the sha256, in hexadecimal, of the file of ``path/to/file.py:NAME``; InputError if it cannot be read."""
    path, _ = parts(name)
    try:
        return file_digest(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); restore the file") from error


def by_content(name: str) -> str:
    """Return ``SHA256.py:NAME`` for ``path/to/file.py:NAME``, independent of its place; other names are unchanged."""
    path, attribute = parts(name)
    if not is_custom(name) or path.stem in _places:
        return name
    digest = source_digest(name)
    _places[digest] = path
    return f"{digest}.py:{attribute}{_options_in(name)}"


def _options_in(name: str) -> str:
    match = NAME.fullmatch(name)
    return (match[3] or "") if match else ""


def name_in_settings(name: str) -> str:
    """Return the name as the user wrote it, also for a name by content; messages show it."""
    path, attribute = parts(name)
    return f"{_places[path.stem]}:{attribute}{_options_in(name)}" if is_custom(name) and path.stem in _places else name


def execute(path: Path) -> ModuleType:
    """Execute a file as a new module, which can import files of its folder, like a script; InputError with the line."""
    source = _read(path)
    sys.path.insert(0, str(path.resolve().parent))
    return _execute(path, source)


def add_own_file(path: str) -> None:
    """Treat the file of an imported module as a custom file in `place`."""
    _files.add(path)


def place(error: BaseException) -> str | None:
    """Return the innermost frame of an error in a custom file, such as ``file.py:12``; None without one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


@contextmanager
def custom_code_errors(
    failure: type[InputError] | type[RunFailed] = CustomCodeError, with_all_exits: bool = True
) -> Iterator[None]:
    """Turn an error of custom code into a one-line error that names the file and the line.

    SystemExit is such an error: otherwise `sys.exit(0)` would end a command with success; without `with_all_exits` only
    from custom code. Errors of flsim and other libraries, Ctrl-C, and errors of memory are not changed. Errors of disks
    and GPUs, which may not occur again, are RunFailed instead of CustomCodeError.
    """
    try:
        yield
    except (InputError, RunFailed, Terminated, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        where = place(error)
        if where is None and with_all_exits and isinstance(error, SystemExit):
            where = "custom code"  # e.g. in a function that the file imports
        if where is None or is_out_of_memory(error):
            raise
        if failure is CustomCodeError and (isinstance(error, OSError) or "CUDA" in str(error)):
            failure = RunFailed
        raise failure(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error


@contextmanager
def custom_call_errors(
    name: str, needs: str, failure: type[InputError] | type[RunFailed] = CustomCodeError
) -> Iterator[None]:
    """Turn errors of custom code, and of calls that it does not accept but `needs` lists, into one-line errors."""
    try:
        with custom_code_errors(failure):
            yield
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, InputError) or not is_custom(name):
            raise
        raise failure(f"{name}: {error}; it needs {needs}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _execute(path: Path, source: bytes) -> ModuleType:
    """Execute source code without a bytecode cache, and send what the code prints to standard error."""
    module = ModuleType(f"_own_{sha256(source).hexdigest()}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle search this dictionary
    _files.add(str(path))
    try:
        with redirect_stdout(sys.stderr), custom_code_errors(InputError):
            exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 (the user asked for it)
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: {error.msg}") from error
    except InputError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and (path.parent / f"{missing.name}.py").exists():
            raise InputError(
                f"{error}; custom code can import flsim and installed packages, but not files of its folder; combine "
                "the code in one file"
            ) from error
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from error  # for example of a wrong setting
    except ValueError as error:
        raise InputError(f"{path}: failed with {type(error).__name__}: {error}") from error
    return module
