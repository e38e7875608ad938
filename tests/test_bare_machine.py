"""Models, training and GPU benchmarks need only torch, numpy, Triton and pytest, as on a borrowed GPU machine."""

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ROOMS = ("flsim/models", "flsim/training", "flsim/measures/memorization", "benchmarks/gpu")
FILES = [
    *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))),
    *(ROOT / "flsim" / "data" / f"{name}.py" for name in ("corpus", "records", "synthetic", "manifest")),
    *(ROOT / "benchmarks" / f"{name}.py" for name in ("engine", "central", "evaluation")),
]
CUDA_TESTS = sorted((ROOT / "tests" / "training").rglob("test_*cuda*.py"))
OWN = {"flsim", "clients", "server", "experiments", "benchmarks"}
HIDING = """
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def required(*names: str) -> set[str]:
    """Return these distributions and all distributions that they need, without extras."""
    closure, left = set[str](), [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name not in closure:
            closure.add(name)
            needs = map(Requirement, requires(name) or ())
            left += [canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate()]
    return closure


def bare(code: str, *distributions: str) -> subprocess.CompletedProcess[str]:
    """Run code that can import these distributions and their requirements, but no other installed distribution."""
    closure, installed = required(*distributions), packages_distributions()
    hidden = {name for name, owners in installed.items() if not closure & {*map(canonicalize_name, owners)}}
    program = f"HIDDEN = {hidden - OWN!r}\n{HIDING}\n{code}"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)


def names_of(paths: Iterable[Path]) -> list[str]:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


OTHERS = ["pydantic", "ray", "flwr", "typer", "rich", "pyarrow", "pandas", "hypothesis", "scipy", "safetensors"]

BENCHMARKS = """
import json
from benchmarks import engine, evaluation
from benchmarks.central import CentralBenchHParams, bench_central
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams
tiny = CentralBenchHParams(batch_sizes=(2,), records=16, turns=2, threads=1, model=ModelHParams(4, 6), users=1)
measured = {"central": bench_central(tiny)["records_per_second"]["2"]["ours"]}
evaluation.STRAIGHTFORWARD = 150
ranks = evaluation.bench_evaluation(canaries=10, count=300, steps=3, units=8)
assert "partly trained: 3 steps" in evaluation.describe(ranks)
measured["ranks"] = ranks["rank_seconds"]
engine.USER_WORDS, engine.LAYOUT = 20, Layout(60)
engine.DrawnUsers.layout = engine.Held.layout = engine.LAYOUT
(row,) = engine.bench_engine("cpu", [2], ["float32"], cohort=3)["rows"]
print(json.dumps({**measured, "engine": row["users_per_second"]}))
"""


def test_modules_import_and_gpu_benchmarks_run_without_other_packages() -> None:
    """The modules of `FILES` import any other package only within the functions that need the package.

    The test hides other packages, which are installed here; otherwise, it could not fail.
    """
    code = f"""
import importlib.util, torch
print([name for name in {OTHERS!r} if not importlib.util.find_spec(name)])
for name in {names_of(FILES)!r}:
    importlib.import_module(name)
{BENCHMARKS}"""
    done = bare(code, "torch", "numpy", *(["triton"] if sys.platform == "linux" else []))
    assert done.returncode == 0, done.stderr
    hidden, printed = done.stdout.splitlines()
    assert hidden == repr(OTHERS)
    measured = json.loads(printed)
    assert measured.keys() == {"central", "ranks", "engine"}
    assert min(measured.values()) > 0
    assert "central: batch 2" in done.stderr.splitlines()  # progress is a plain line without rich


def test_cuda_tests_are_collected_without_other_packages() -> None:
    """Pytest collects tests from every file of `CUDA_TESTS`, with the options of `benchmarks.gpu`."""
    options = ["--noconftest", "-p", "no:cacheprovider", "--collect-only", *map(str, CUDA_TESTS)]
    plugins = "import os\nos.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'"
    done = bare(f"{plugins}\nimport pytest\nraise SystemExit(pytest.main({options!r}))", "torch", "numpy", "pytest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{path.name}::" in done.stdout for path in CUDA_TESTS)
