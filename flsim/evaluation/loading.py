"""A model from wherever a person keeps it: the code that makes it is run."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from flsim.base.errors import InputError


def load_model(spec: str) -> Any:
    """What a factory returns. This runs the code that it is in; what that prints goes to standard error.

    Args:
        spec: ``package.module:factory``, importable from here or installed, or ``path/to/model.py:factory``. The
            factory takes no arguments.

    Raises:
        InputError: there is no such module or factory, or one of them failed.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InputError(f"--model {spec}: name a factory, as package.module:factory or path/to/model.py:factory")
    with redirect_stdout(sys.stderr):
        module = _run(f"--model {where}", lambda: _from_file(Path(where)) if _is_path(where) else _from_name(where))
        factory = getattr(module, name, None)
        if not callable(factory):
            raise InputError(f"--model {spec}: {where} has no function {name}")
        return _run(f"--model {spec}", factory)


def _run(what: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: failed with {type(error).__name__}: {error}") from error


def _is_path(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _from_file(path: Path) -> ModuleType:
    """The module, under a name of its own; it can import its neighbours, as a script can."""
    if not path.is_file():
        raise InputError(f"--model {path}: no such file")
    name = f"_audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--model {path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)
