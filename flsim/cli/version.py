"""`flsim --version`: versions of flsim and of the packages that decide a run's numbers."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("flwr", "ray", "torch")


def version_text() -> str:
    """Return the version of flsim, then those of Python and of `PACKAGES`; nothing heavy is imported."""
    others = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return f"flsim {_version('flsim-memorization')}\nPython {platform.python_version()}, {others}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
