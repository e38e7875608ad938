"""Imports go one way, Flower and Ray stay where they belong, files stay small, and the names are ours."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOOR = {"causes", "errors", "files", "logs", "rng", "progress", "pool", "memory"}

# A row may import what it lists, itself, and the floor.
MAY_IMPORT: dict[str, set[str]] = {
    **{name: set() for name in FLOOR},
    "data": set(),
    "sampling": set(),
    "model": set(),
    "canaries": {"data"},
    "train": {"data", "model"},
    "privacy": {"model", "sampling"},
    "optimizers": {"model"},
    "federated": {"model", "train", "privacy", "sampling", "optimizers"},
    "central": {"data", "model", "train", "privacy"},
    "defences": {"data", "canaries", "model", "central"},
    "checkpoint": {"model", "federated", "central", "privacy"},
    "memorization": {"data", "model", "canaries"},
    "evaluation": {"data", "model", "canaries", "memorization", "checkpoint", "results"},
    "results": set(),
    "tracking": {"results"},
    "versions": set(),
    "config": {
        "data",
        "canaries",
        "sampling",
        "model",
        "train",
        "privacy",
        "federated",
        "central",
        "evaluation",
        "tracking",
    },
    "wire": {"model", "train"},
    "runs": {
        "data",
        "canaries",
        "sampling",
        "model",
        "train",
        "privacy",
        "federated",
        "central",
        "checkpoint",
        "evaluation",
        "results",
        "config",
        "tracking",
    },
    "participation": {"canaries", "config", "runs", "sampling", "train"},
    "measuring": {"model", "checkpoint", "evaluation", "results", "runs"},
    "recovery": {"checkpoint", "results", "runs"},
    "quantizing": {"checkpoint", "config", "measuring", "results", "runs"},
    "report": {"config", "data", "privacy", "results"},
    "demo": {"data", "canaries", "config", "runs", "results"},
    "sweeps": {"data", "config", "results"},
    "planning": {"data", "canaries", "model", "privacy", "evaluation", "results", "config", "sweeps"},
    "bench": {
        "data",
        "canaries",
        "model",
        "central",
        "federated",
        "memorization",
        "train",
        "checkpoint",
        "config",
        "results",
        "runs",
    },
    "__main__": {"cli"},
    "cli": {
        "data",
        "canaries",
        "privacy",
        "sampling",
        "config",
        "evaluation",
        "participation",
        "runs",
        "measuring",
        "quantizing",
        "results",
        "sweeps",
        "planning",
        "report",
        "demo",
        "bench",
        "defences",
        "central",
        "model",
    },
}
PEERS = ROOT / "flsim" / "bench" / "peers"  # other platforms as their users run them, in processes of their own
FLSIM = sorted((ROOT / "flsim").rglob("*.py"))
ALL = [*FLSIM, *(path for name in ("clients", "server", "experiments") for path in sorted((ROOT / name).rglob("*.py")))]


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_of(path: Path) -> str:
    """The row of `MAY_IMPORT` that a file of flsim belongs to."""
    return path.relative_to(ROOT / "flsim").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FLSIM, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    module = module_of(path)
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("flsim.")}
    if module == "__init__":
        assert not ours
    else:
        assert ours <= MAY_IMPORT[module] | FLOOR | {module}


@pytest.mark.parametrize("path", FLSIM, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_flower_ray_and_the_apps_stay_out_of_the_science(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"clients", "server", "experiments"}
    assert "flwr" not in roots or path.name == "wire.py" or path.parent == PEERS
    assert "ray" not in roots or path.relative_to(ROOT).as_posix() == "flsim/evaluation/service.py"


def test_clients_and_server_do_not_know_each_other() -> None:
    for here, there in (("clients", "server"), ("server", "clients")):
        for path in (ROOT / here).rglob("*.py"):
            assert there not in {name.split(".")[0] for name in imported(path)}, path


def test_rng_is_the_only_birthplace_of_randomness() -> None:
    born = ("default_rng", "manual_seed", "SeedSequence", "np.random.seed", "random.seed", "torch.rand", "uuid4")
    for path in ALL:
        if path.name != "rng.py":
            text = path.read_text(encoding="utf-8")
            assert not [name for name in born if name in text], path


def test_the_science_imports_without_flower_and_ray() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FLSIM
        if path.name not in {"__init__.py", "wire.py", "service.py"} and path.parent.name != "cli"
        if path.parent != PEERS or path.name in {"model.py", "work.py"}
    ]
    code = f"""
import importlib, sys
sys.modules["flwr"] = sys.modules["ray"] = None
for name in {modules!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_assert_outside_tests() -> None:
    for path in ALL:
        asserts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert not asserts, path


def test_files_are_small() -> None:
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in ALL)
    assert lengths[len(lengths) // 2] <= 150
    assert lengths[-1] <= 350


@pytest.mark.parametrize("name", ["flsim", "clients", "server", "experiments"])
def test_the_names_are_ours(name: str) -> None:
    """`flsim` on PyPI is another project, and `clients` and `server` are anybody's names."""
    assert Path(str(importlib.import_module(name).__file__)).parent == ROOT / name
