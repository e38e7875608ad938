"""The loading of a user's own model, which executes the code that makes it."""

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from flsim.base.errors import InputError, Terminated
from flsim.base.extensions import add_own_file, execute, place

Made = TypeVar("Made")


def model_of_factory(spec: str, option: str = "") -> Any:
    """Return the result of a factory, whose code is executed; prints go to standard error.

    Args:
        spec: ``package.module:factory``, importable from here or installed, or ``path/to/model.py:factory``, which can
            import its neighbours. The factory takes no arguments.
        option: the beginning of messages, such as "--model ".

    Raises:
        InputError: there is no such module or factory, or one of them failed.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InputError(f"{option}{spec}: name a factory, as package.module:factory or path/to/model.py:factory")
    with redirect_stdout(sys.stderr):
        module = _run(where, option, lambda: execute(Path(where)) if _is_path(where) else _import(where))
        factory = getattr(module, name, None)
        if not callable(factory):
            raise InputError(f"{option}{spec}: {where} has no function {name}")
        return _run(spec, option, factory)


def _run(what: str, option: str, work: Callable[[], Made]) -> Made:
    try:
        return work()
    except InputError as error:
        raise InputError(f"{option}{error}") from error
    except Terminated:
        raise
    except (Exception, SystemExit) as error:
        line = f" ({where})" if (where := place(error)) else ""
        raise InputError(f"{option}{what}: failed with {type(error).__name__}: {error}{line}") from error


def _is_path(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _import(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(name)
    add_own_file(str(module.__file__))
    return module
