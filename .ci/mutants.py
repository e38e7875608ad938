"""Mutation testing of the formulas: whether tests notice small random changes of the source.

.venv/bin/python .ci/mutants.py --seed 1 --count 300
.venv/bin/python .ci/mutants.py --only flsim/attacks/audit/bounds.py --count 50

The modules and the equivalent mutants are listed in .ci/mutants.toml. Everything runs in a copy of the project. First
the nearest test files of the modules run once, and each call of a function of the modules is recorded. Then each mutant
is tested by the fastest tests that call the changed function, in a separate process, up to the first failure.
"""

import argparse
import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutant, mutants_of

HERE = Path(__file__).parent
COPIED = ("flsim", "clients", "server", "experiments", "benchmarks", "tests", "docs", "pyproject.toml", "README.md")
# Modules that are imported once, before processes are forked.
HEAVY = "torch scipy.stats scipy.optimize pandas matplotlib.pyplot ray flwr hypothesis dp_accounting.pld opacus"
PYTEST = (
    "-q",
    "-m",
    "not slow and not nightly",
    "-p",
    "no:cacheprovider",
    "--assert=plain",
    "-p",
    "no:unraisableexception",
)
PATIENCE = 900  # seconds
MEMORY = 2**35  # bytes of address space of a mutant's process
Calls = dict[str, dict[str, Any]]  # by test: "seconds", and "calls", a list of [file, first line of a function]


def main() -> None:
    """Print a table of the surviving mutants; exit with 1 if more than a tenth of the others survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="number of mutants, equivalent ones included")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="mutate these files only")
    parser.add_argument("--seconds", type=float, default=3.0, help="processor time of the tests of each mutant")
    parser.add_argument("--calls", type=Path, help="file of recorded calls, which is written if it does not exist")
    options = parser.parse_args()
    kept = options.calls and options.calls.absolute()
    listed = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))
    files = [f"flsim/{folder}/{name}.py" for folder, names in listed["modules"].items() for name in names]
    unknown = set(options.only) - set(files)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not among the modules in .ci/mutants.toml")
    tests = sorted({test for file in options.only or files for test in nearest(file)})
    mutants = draw(options.only or files, options.seed, options.count)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copied(Path(folder) / "project")
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path[:0] = [str(root)]
        for name in HEAVY.split():
            importlib.import_module(name)
        gc.freeze()  # garbage collection in children skips imported objects
        calls = json.loads(kept.read_text()) if kept and kept.exists() else recorded(files, tests)
        if kept:
            kept.write_text(json.dumps(calls))
        results = []
        for number, mutant in enumerate(mutants, 1):
            result = outcome(mutant, root, calls, options.seconds)
            results.append((mutant, result))
            change = "" if result == "killed" else f": {mutant.before}  ->  {mutant.after}"
            print(f"{number} {mutant.path}:{mutant.place} {result}{change}", file=sys.stderr, flush=True)
    sys.exit(report(results, listed.get("equivalent", [])))


def draw(files: list[str], seed: int, count: int) -> list[Mutant]:
    """Draw mutants without replacement: a uniform node of all files, then one of its changes."""
    sites = [site for file in files for site in mutants_of(file, (HERE.parent / file).read_text(encoding="utf-8"))]
    rng = random.Random(seed)  # noqa: S311 (no secret)
    return [rng.choice(site) for site in rng.sample(sites, min(count, len(sites)))]


def nearest(file: str) -> list[str]:
    """Return the test files that import a module: of the module's folder of tests.

    Of any folder for a module of base.
    """
    package, name = Path(file).with_suffix("").as_posix().replace("/", ".").rsplit(".", 1)
    imports = re.compile(rf"{re.escape(package)}(\.| import .*\b){name}\b")
    folder = HERE.parent / tests_of(Path(file).parent)
    tests = sorted(folder.parent.rglob("test_*.py") if folder.name == "base" else folder.glob("test_*.py"))
    imported = [test for test in tests if imports.search(test.read_text(encoding="utf-8"))]
    return [test.relative_to(HERE.parent).as_posix() for test in imported]


def tests_of(folder: Path) -> str:
    """Return the folder of the tests of a folder of modules: tests/audits for flsim/attacks/audit."""
    return f"tests/{folder.name.replace('audit', 'audits')}"


def copied(root: Path) -> Path:
    """Copy what tests need."""
    root.mkdir()
    for name in COPIED:
        source = HERE.parent / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / name)
    return root


class Recorder:
    """A plugin of pytest that writes the seconds of each test that passes, and the recorded functions that it calls."""

    def __init__(self, root: Path, files: list[str], out: Path) -> None:
        self.names = {str(root / file): file for file in files}
        self.out = out
        self.calls: Calls = {}
        self.bad = set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test."""
        calls = set[tuple[str, int]]()

        def trace(frame: Any, _event: str, _argument: Any) -> None:
            if (name := self.names.get(frame.f_code.co_filename)) is not None:
                calls.add((name, frame.f_code.co_firstlineno))

        start = processor_seconds()
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.calls[item.nodeid] = {"seconds": processor_seconds() - start, "calls": sorted(calls)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect tests of trained runs, which take longer than all others."""
        items[:] = [item for item in items if not {"trained", "trained_here"} & {*getattr(item, "fixturenames", ())}]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Ignore tests that do not pass."""
        if not report.passed:
            self.bad.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        kept = {name: test for name, test in self.calls.items() if test["calls"] and name not in self.bad}
        self.out.write_text(json.dumps(kept))


def processor_seconds() -> float:
    """Return the seconds that this process and its children have computed."""
    return sum(os.times()[:4])


def recorded(files: list[str], tests: list[str]) -> Calls:
    """Run files of tests and return what each test calls."""
    out = Path("calls.json").absolute()
    code = forked(lambda: pytest.main([*PYTEST, *tests], plugins=[Recorder(Path.cwd(), files, out)]), 0, quiet=False)
    if code not in (0, 1):
        sys.exit(f"The tests ended with code {code} before a mutant was made.")
    return dict(json.loads(out.read_text()))


def outcome(mutant: Mutant, root: Path, calls: Calls, seconds: float) -> str:
    """Return "killed", "timeout", "survived", or "untested" if no recorded test calls the changed function."""
    tests, total = [], 0.0
    for test, record in sorted(calls.items(), key=lambda item: item[1]["seconds"]):
        if any(file == mutant.path and mutant.covers(line) for file, line in record["calls"]):
            total += record["seconds"]
            if tests and total > seconds:
                break
            tests.append(test)
    if not tests:
        return "untested"
    path = root / mutant.path
    original, status, limit = path.read_text(encoding="utf-8"), path.stat(), int(6 + 3 * seconds)
    path.write_text(mutant.source, encoding="utf-8")
    try:
        code = forked(lambda: pytest.main(["-x", *PYTEST, *tests]), limit)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # compiled files of the original stay valid
    return "timeout" if code in (-signal.SIGKILL, -signal.SIGXCPU) else "killed" if code else "survived"


def forked(work: Callable[[], int], seconds: int, quiet: bool = True) -> int:
    """Run work in a separate process group and return its code.

    Load on the machine must not look like a change that never ends. So `seconds` limits the processor time, and the
    exit code is then that of SIGXCPU. It is that of SIGKILL if the work takes longer than `PATIENCE` seconds.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        sys.dont_write_bytecode = quiet  # compiled files of the original are valid for all mutants of other files
        if quiet:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        code = 99
        try:
            code = int(work())
        except BaseException:  # a child never returns
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + PATIENCE
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) and (
        time.monotonic() < end or not quiet
    ):
        time.sleep(0.02)
    with suppress(ProcessLookupError):  # also its descendants, before the number of the group can be reused
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(results: list[tuple[Mutant, str]], equivalent: list[dict[str, str]]) -> int:
    """Print the table of survivors and the counts; return the exit code."""
    counts, rows = Counter[str](), []
    for mutant, result in results:
        kind = result
        if result in ("survived", "untested") and any(mutant.is_like(entry) for entry in equivalent):
            kind = "equivalent"
        elif result in ("survived", "untested"):
            rows.append(f"| {mutant.path}:{mutant.place} | {result} | `{mutant.before}` | `{mutant.after}` |")
        counts[kind] += 1
    print("| place | | line | mutant |\n|---|---|---|---|", *sorted(rows), sep="\n")
    killed = counts["killed"] + counts["timeout"]
    others = killed + len(rows)
    print(f"\n{len(results)} mutants: {', '.join(f'{number} {kind}' for kind, number in counts.most_common())}.")
    print(f"Tests kill {killed} of the {others} that are not equivalent, {100 * killed / max(1, others):.1f}%.")
    return int(killed < 0.9 * others)


if __name__ == "__main__":
    main()
