"""Versions of everything that determines the numbers of a run: equal versions give equal bits on equal processors."""

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flsim.base.files import digest

PACKAGES = ("flsim", "clients", "server")  # packages whose code runs on all nodes
LIBRARIES = ("torch", "numpy", "scipy", "pyarrow", "safetensors", "flwr", "ray")


def versions() -> dict[str, str]:
    """Return the versions of what determines a run's numbers: "python", "machine", libraries, and the code's digest."""
    installed = {"python": platform.python_version(), "machine": platform.machine()}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**installed, "flsim": code_digest()}


def code_digest() -> str:
    """Return the sha256 over names and bytes of the source files of `PACKAGES`, that this process imports."""
    parts: list[bytes | str] = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts):
                parts += [f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()]
    return digest(*parts)


def processor() -> str:
    """Return the model of the processor, from Linux; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
