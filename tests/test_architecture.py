"""Rules for the source: which package may import or name what, where Flower and Ray are used, and small files."""

import ast
import importlib
import re
from collections.abc import Callable, Collection
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from flsim.measures.built_in import ALSO, QUANTITIES
from flsim.models.architectures import CIFGLanguageModel
from flsim.models.language_model import ModelSettings

ROOT = Path(__file__).parents[1]
# What each package of flsim may import in addition to itself and `flsim.base`: packages of rows above, and `server`.
MAY_IMPORT = {
    room: set(rooms.split())
    for room, rooms in {
        "data": "",
        "models": "",
        "base": "",
        "privacy": "models",
        "training": "data models privacy",
        "canaries": "data models training",
        "measures": "canaries data models",
        "results": "canaries measures",
        "algorithms": "data models privacy training",
        "show": "measures results",
        "runs": "algorithms canaries data measures models privacy results show training",
        "attacks": "algorithms canaries data measures models privacy results runs show training",
        "planning": "attacks canaries data measures models privacy results runs server show training",
        "report": "attacks data measures privacy results runs show",
        "api": "algorithms attacks canaries data models privacy report results runs server show training",
        "cli": "attacks canaries data measures models planning privacy report results runs server show training",
        "__init__": "api",
        "__main__": "cli",
    }.items()
}
KNOW_KINDS = {"flsim/runs/folder.py", "server/app.py", "server/launch.py"}
PUBLIC_FLOWER = ("flwr.app.", "flwr.clientapp.", "flwr.serverapp.", "flwr.simulation.")
FLSIM = sorted((ROOT / "flsim").rglob("*.py"))
ALL = [
    *FLSIM,
    *(
        path
        for name in ("clients", "server", "experiments", "benchmarks")
        for path in sorted((ROOT / name).rglob("*.py"))
    ),
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def offenders(paths: list[Path], offence: Callable[[Path], object]) -> dict[str, object]:
    """Return what `offence` finds in each file, by path; files in which it finds nothing are omitted."""
    return {place_of(path): wrong for path in paths if (wrong := offence(path))}


@cache
def imported(path: Path) -> set[str]:
    """Return the dotted names of everything that a file imports, also within functions."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_of(path: Path) -> str:
    """Return the row of `MAY_IMPORT` that a file of flsim belongs to."""
    return path.relative_to(ROOT / "flsim").parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    def forbidden(path: Path) -> set[str]:
        module, names = module_of(path), imported(path)
        rooms = {name.split(".")[1] for name in names if name.startswith("flsim.")}
        rooms |= {"server" for name in names if name.split(".")[0] == "server"}
        return rooms - MAY_IMPORT[module] - {"base", module}

    assert not offenders(FLSIM, forbidden)


def test_imports_of_modules_and_of_packages_have_no_cycles() -> None:
    modules = {name_of(path): path for path in ALL}
    imports = {
        name: {target for each in imported(path) if (target := module_in(modules, each))}
        for name, path in modules.items()
    }
    rooms = TopologicalSorter[str]()
    for name, targets in imports.items():
        here = room_of(name)
        rooms.add(here, *({room_of(target) for target in targets} - {here}))
    TopologicalSorter(imports).prepare()
    rooms.prepare()  # `prepare` raises CycleError, which names the cycle


def name_of(path: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_in(modules: Collection[str], name: str) -> str | None:
    """Return the module of this repository that an imported name is, or is defined in; None for other packages."""
    return next((known for known in (name, name.rpartition(".")[0]) if known in modules), None)


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_flsim_imports_flower_in_one_module_and_never_ray() -> None:
    """No file of flsim imports Ray. Only `algorithms/wire.py` imports Flower; only clients and server import `wire`."""

    def forbidden(path: Path) -> set[str]:
        names = imported(path) | {name.split(".")[0] for name in imported(path)}
        others = {"clients", "experiments", "ray", "flsim.algorithms.wire"}
        found = {name for name in names if name in others or name.startswith("flsim.algorithms.wire.")}
        return found | (names & {"flwr"} if path.name != "wire.py" else set())

    assert not offenders(FLSIM, forbidden)


def test_one_file_uses_the_private_parts_of_ray_and_flower() -> None:
    """Only `internals.py` uses names of Ray that begin with an underscore, or undocumented modules of Flower."""

    def private(path: Path) -> set[str]:
        text, names = path.read_text(encoding="utf-8"), imported(path)
        of_ray = {name for name in names if name.startswith("ray.") and "._" in name}
        of_flower = {name for name in names if name.startswith("flwr.") and not name.startswith(PUBLIC_FLOWER)}
        return of_ray | of_flower | {*re.findall(r"\bray\._\w+|\bTaskIdentity\b|\bMetadata\(", text)}

    assert set(offenders(ALL, private)) == {"server/cluster/internals.py"}


def test_only_listed_files_distinguish_kinds_of_training() -> None:
    """Other files do not test the class of a configuration, but call `flsim.runs.config.base.Config`."""

    def tests_of_kind(path: Path) -> list[str]:
        if place_of(path).startswith(("benchmarks/", "flsim/runs/config/")):
            return []
        return re.findall(r"isinstance\([^)]*(?:Federated|Central)Config", path.read_text(encoding="utf-8"))

    assert set(offenders(ALL, tests_of_kind)) <= KNOW_KINDS


TENSORS = {name for name, _ in CIFGLanguageModel(5, ModelSettings(2, 2)).named_parameters()}
KNOW_TENSORS = {
    *(f"flsim/models/{name}.py" for name in ("architectures", "language_model")),
    *(f"flsim/training/cohort/{name}.py" for name in ("packing", "stacked_model")),
    "flsim/training/cohort/gradient.py",
    "flsim/algorithms/checkpoint.py",  # has a setting with the name of a tensor
}


def test_only_the_cifg_and_its_kernels_name_its_tensors() -> None:
    """Other files read sizes from attributes of the model, and device and dtype from any tensor."""
    assert set(offenders(ALL, lambda path: TENSORS & set(texts_of(path)))) == KNOW_TENSORS


def test_only_listed_files_import_modules_by_a_string() -> None:
    """Strings name only custom code, an app that Flower names, and a peer that runs in a separate process."""
    assert set(offenders(ALL, lambda path: "import_module" in path.read_text(encoding="utf-8"))) == {
        "flsim/runs/loading.py",
        "benchmarks/peers/__main__.py",
        "server/pool/grid.py",
    }


def test_clients_and_server_do_not_import_each_other() -> None:
    other = {"clients": "server", "server": "clients"}
    paths = [path for path in ALL if path.relative_to(ROOT).parts[0] in other]

    def knows_the_other(path: Path) -> bool:
        return other[path.relative_to(ROOT).parts[0]] in {name.split(".")[0] for name in imported(path)}

    assert not offenders(paths, knows_the_other)


def test_only_rng_py_creates_or_seeds_random_generators() -> None:
    born = ("default_rng", "manual_seed", "SeedSequence", "np.random.seed", "random.seed", "torch.rand", "uuid4")

    def births(path: Path) -> list[str]:
        return [name for name in born if path.name != "rng.py" and name in path.read_text(encoding="utf-8")]

    assert not offenders(ALL, births)


def test_no_assert_outside_tests() -> None:
    def lines(path: Path) -> list[int]:
        return [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]

    assert not offenders(ALL, lines)


def test_files_are_small() -> None:
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in ALL) <= 700


NAMED = {*QUANTITIES, *ALSO}  # names of values of measures, and of optional measures
WORDS = {"path", "rank", "extrapolation"}  # names with other meanings in files that show no results
SHOWING = {"cli", "planning", "report", "results", "runs", "sweeps"}
PUBLISHED = {"flsim/results/published.py"}  # names the columns of the papers' tables


def test_only_the_package_of_measures_names_measures() -> None:
    """Other packages use the list of measures, or the descriptions that are stored with rows."""

    def names_of_measures(path: Path) -> list[str]:
        place = path.relative_to(ROOT)
        if place.is_relative_to("flsim/measures") or place_of(path) in PUBLISHED or place.parts[0] == "experiments":
            return []
        names = NAMED if place.parts[0] == "flsim" and module_of(path) in SHOWING else NAMED - WORDS
        is_name = re.compile(rf"(mean_|published_)?({'|'.join(map(re.escape, names))})(_\w+)?").fullmatch
        is_heading = re.compile(r"\b(RS|BS)\b").search
        return [text for text in texts_of(path) if is_name(text) or is_heading(text)]

    assert not offenders(ALL, names_of_measures)


def texts_of(path: Path) -> list[str]:
    """Return all strings of a file except docstrings, including the constant parts of formatted strings."""
    tree = tree_of(path)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    docstrings = [node.value for node in first if isinstance(node, ast.Expr)]
    return [str(node.value) for node in nodes if node not in docstrings]


def test_names_of_packages_are_imported_from_this_repository() -> None:
    """Imports find this repository, although `flsim` on PyPI is another project, and the other names are common."""
    for name in ("flsim", "clients", "server", "experiments"):
        assert Path(str(importlib.import_module(name).__file__)).parent == ROOT / name
