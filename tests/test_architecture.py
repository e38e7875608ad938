"""Imports go one way, Flower and Ray stay where they belong, and files stay small."""

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
# The rooms: each may import those that it lists, itself, and `flsim.base`. What is listed lies further up.
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
    """Return what is wrong with which file, for all files at once."""
    return {place_of(path): wrong for path in paths if (wrong := offence(path))}


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_of(path: Path) -> str:
    """The row of `MAY_IMPORT` that a file of flsim belongs to."""
    return path.relative_to(ROOT / "flsim").parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    def forbidden(path: Path) -> set[str]:
        module, names = module_of(path), imported(path)
        rooms = {name.split(".")[1] for name in names if name.startswith("flsim.")}
        rooms |= {"server" for name in names if name.split(".")[0] == "server"}
        return rooms - MAY_IMPORT[module] - {"base", module}

    assert not offenders(FLSIM, forbidden)


def test_neither_modules_nor_rooms_import_each_other_in_circles() -> None:
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
    rooms.prepare()  # either raises CycleError, with the circle


def name_of(path: Path) -> str:
    """A file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_in(modules: Collection[str], name: str) -> str | None:
    """The module that an imported name is, or is in; None where it is not ours."""
    return next((known for known in (name, name.rpartition(".")[0]) if known in modules), None)


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_flower_and_ray_stay_out_of_the_science() -> None:
    """Only clients and the server import the one module that knows Flower."""

    def forbidden(path: Path) -> set[str]:
        names = imported(path) | {name.split(".")[0] for name in imported(path)}
        others = {"clients", "experiments", "ray", "flsim.algorithms.wire"}
        found = {name for name in names if name in others or name.startswith("flsim.algorithms.wire.")}
        return found | (names & {"flwr"} if path.name != "wire.py" else set())

    assert not offenders(FLSIM, forbidden)


def test_one_file_knows_the_private_parts_of_ray_and_flower() -> None:
    """Of Ray all that begins with an underscore is private, of Flower all but what its documentation names."""

    def private(path: Path) -> set[str]:
        text, names = path.read_text(encoding="utf-8"), imported(path)
        of_ray = {name for name in names if name.startswith("ray.") and "._" in name}
        of_flower = {name for name in names if name.startswith("flwr.") and not name.startswith(PUBLIC_FLOWER)}
        return of_ray | of_flower | {*re.findall(r"\bray\._\w+|\bTaskIdentity\b|\bMetadata\(", text)}

    assert set(offenders(ALL, private)) == {"server/cluster/internals.py"}


def test_kinds_of_training_are_known_to_their_own_rooms() -> None:
    """Elsewhere settings answer for themselves (`flsim.runs.config.base.Config`)."""

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
    "flsim/algorithms/checkpoint.py",  # a setting of the same name
}


def test_tensors_are_known_by_name_to_their_own_model_and_its_kernels() -> None:
    """Elsewhere a model answers for its sizes, and any tensor for device and dtype."""
    assert set(offenders(ALL, lambda path: TENSORS & set(texts_of(path)))) == KNOW_TENSORS


def test_modules_are_imported_in_the_open() -> None:
    """By a string only a user's own code, an app that Flower names, and a peer in a process of its own."""
    assert set(offenders(ALL, lambda path: "import_module" in path.read_text(encoding="utf-8"))) == {
        "flsim/runs/loading.py",
        "benchmarks/peers/__main__.py",
        "server/pool/grid.py",
    }


def test_clients_and_server_do_not_know_each_other() -> None:
    other = {"clients": "server", "server": "clients"}
    paths = [path for path in ALL if path.relative_to(ROOT).parts[0] in other]

    def knows_the_other(path: Path) -> bool:
        return other[path.relative_to(ROOT).parts[0]] in {name.split(".")[0] for name in imported(path)}

    assert not offenders(paths, knows_the_other)


def test_rng_is_the_only_birthplace_of_randomness() -> None:
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


NAMED = {*QUANTITIES, *ALSO}  # by measures
WORDS = {"path", "rank", "extrapolation"}  # that stand for other things too, where no results are shown
SHOWING = {"cli", "planning", "report", "results", "runs", "sweeps"}
PUBLISHED = {"flsim/results/published.py"}  # columns of the papers' tables


def test_measures_are_known_by_name_to_their_own_file() -> None:
    """Everything else goes by the list of measures, or by descriptions that are stored with rows."""

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
    """Return all strings of a file but docstrings, parts of formatted ones too."""
    tree = tree_of(path)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    docstrings = [node.value for node in first if isinstance(node, ast.Expr)]
    return [str(node.value) for node in nodes if node not in docstrings]


def test_the_names_are_ours() -> None:
    """`flsim` on PyPI is another project, and `clients` and `server` are anybody's names."""
    for name in ("flsim", "clients", "server", "experiments"):
        assert Path(str(importlib.import_module(name).__file__)).parent == ROOT / name
