"""Custom code in a configuration: the settings that name files, and the copies in a run folder.

A copy's name ends in the first digits of its digest, as in ``code/my_model.0a1b2c3d4e5f6a7b.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName, by_content, is_custom, parts, source_digest
from flsim.base.files import new_file
from flsim.base.progress import say
from flsim.base.settings import flat
from flsim.runs.config import toml

FOLDER = "code"
LENGTHS = ("training.rounds", "training.epochs", "training.steps", "training.words")
CHANGES_NO_RESULT = ("system.", "data.corpus", "evaluation.every", "training.order", "model.path", "model.tokens")
TRAINED = ("architecture", "algorithm", "sampler", "noise", "optimizer", "schedule", "server optimizer")
DIGITS = 16  # digits of the digest in the name of a copy
Settings = TypeVar("Settings")


def renamed(kind: type, values: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return values of a dataclass's fields, at any depth, with every name of custom code changed."""
    changed = dict(values)
    for name, hint in _hints(kind).items():
        value = values.get(name)
        if is_dataclass(hint) and isinstance(value, Mapping):
            changed[name] = renamed(hint, value, change)  # type: ignore[arg-type]
        elif value is not None and _own_in(hint):
            changed[name] = _change_each(value, change)
    return changed


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _own_in(hint: Any) -> CustomName | None:
    """Return the annotation in a type hint, at any depth; None without one."""
    return hint if isinstance(hint, CustomName) else next(filter(None, map(_own_in, get_args(hint))), None)


def _change_each(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_change_each(item, change) for item in value)
    return change(value) if isinstance(value, str) and is_custom(value) else value


def names_in(settings: Any) -> list[str]:
    return [name for _, name in kinds_in(settings)]


def kinds_in(settings: Any) -> list[tuple[str, str]]:
    """Return the kind, such as "model", and the name of each custom object, in the order of the fields."""
    named: list[tuple[str, str]] = []
    kind: type = type(settings)
    for field, hint in _hints(kind).items():
        value, custom = getattr(settings, field), _own_in(hint)
        if is_dataclass(value):
            named += kinds_in(value)
        elif custom is not None:
            values = value if isinstance(value, tuple) else (value,)
            named += [(custom.kind, name) for name in values if isinstance(name, str) and is_custom(name)]
    return named


def announce(settings: Any, *kinds: str) -> None:
    """Print the files of custom code that a command is about to execute, each with its objects."""
    defined: dict[str, list[str]] = {}
    for kind, name in kinds_in(settings):
        if not kinds or kind in kinds:
            path, attribute = parts(name)
            defined.setdefault(str(path), []).append(f"{kind} {attribute}")
    for file, objects in defined.items():
        # An untrusted config.toml can contain control codes of terminals.
        say(f"Executing {file if file.isprintable() else repr(file)}: {', '.join(objects)}")


def located(name: str, base: Path) -> str:
    """Return the name with an absolute path; a relative one is relative to `base`."""
    path, attribute = parts(name)
    return f"{(base / path).resolve()}:{attribute}"


def relocated(value: Any, base: Path) -> Any:
    """Return a value, or a list of values, with names of custom code changed by `located`."""
    return _change_each(value, lambda name: located(name, base))


def relative(name: str, base: Path) -> str:
    """Return the name with a path relative to `base` if the file is below it, so that the folder can be moved."""
    path, attribute = parts(name)
    return f"{below(path, base)}:{attribute}"


def below(path: Path | str, base: Path) -> str:
    """Return a path relative to `base` if the path is below `base`; otherwise return it unchanged."""
    is_below = Path(path).is_relative_to(base.resolve())
    return str(Path(path).relative_to(base.resolve()) if is_below else path)


def without_folders(settings: Any) -> dict[str, Any]:
    """Return the values of settings, with names of custom code without folders, which copies have in common."""
    return renamed(type(settings), asdict(settings), lambda name: f"{parts(name)[0].name}:{parts(name)[1]}")


def with_copies(settings: Settings, folder: Path) -> Settings:
    """Copy all custom files into ``folder/code``, unless they are there, and return settings that name the copies."""
    if not names_in(settings):
        return settings
    kind, folder = type(settings), folder.resolve()
    values = renamed(kind, asdict(settings), lambda name: _copy(name, folder / FOLDER))  # type: ignore[call-overload]
    return toml.validate(kind, values, str(folder))


def _copy(name: str, folder: Path) -> str:
    path, attribute = parts(name)
    mark = source_digest(name)[:DIGITS]
    copy = next(iter(sorted(folder.glob(f"*.{mark}.py"))), None)
    if copy is None:
        copy = folder / f"{path.stem.removesuffix(f'.{mark}')}.{mark}.py"
        folder.mkdir(exist_ok=True)
        with new_file(copy) as partial:
            partial.write_bytes(path.read_bytes())
    return f"{copy}:{attribute}"


def refuse_changed_copies(settings: Any) -> None:
    for name in names_in(settings):
        path, _ = parts(name)
        if path.parent.name == FOLDER and not path.stem.endswith(f".{source_digest(name)[:DIGITS]}"):
            raise InputError(
                f"{path}: the file changed after the run was started; restore the file, and resume the run"
            )


def refuse_other_settings(started: Any, settings: Any, run: Path) -> None:
    """Raise InputError, which names a changed file, if settings differ from those that a run was started with."""
    if started.digest == settings.digest:
        return
    for old, new in zip(names_in(started), names_in(settings), strict=False):
        (copy, was), (path, attribute) = parts(old), parts(new)
        if was == attribute and source_digest(old) != source_digest(new):
            raise InputError(
                f"{run}: this run was started with another version of {path}, which is {copy}; resume with "
                "this version, or name a new --out"
            )
    raise InputError(
        f"{run}: this run was started with other settings{_difference(started, settings)}; resume with the "
        "same settings, or name a new --out"
    )


def _difference(started: Any, settings: Any) -> str:
    """Return the first setting that differs with both values, as text to append, the length last; empty if unknown."""
    old, new = (dict(flat(renamed(type(values), asdict(values), by_content))) for values in (started, settings))
    differing = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    differing = [key for key in differing if not key.startswith(CHANGES_NO_RESULT)]
    if not differing:
        return ""
    first = min(differing, key=lambda key: key in LENGTHS)
    was, now = (
        "not set" if value is None else repr(list(value) if isinstance(value, tuple) else value)
        for value in (dict(flat(without_folders(values))).get(first) for values in (started, settings))
    )
    parts = "a schedule, canaries with times in fractions of training, or privacy.noise"
    reason = f" (some settings depend on the length: {parts})" * (first in LENGTHS)
    return f": {first} was {was} and is now {now}{reason}"
