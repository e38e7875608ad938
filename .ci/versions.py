"""Comparison of another checkout of the project with this one: results, benchmarks and commands in turns, and size.

git worktree add ../before COMMIT
.venv/bin/python .ci/versions.py ../before rows CONFIG --set training.rounds=20
.venv/bin/python .ci/versions.py --turns 3 ../before bench central
.venv/bin/python .ci/versions.py ../before size
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).parents[1]
PRODUCT = ("flsim", "clients", "server", "experiments")


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other version")
    parser.add_argument("--turns", type=int, default=3, help="of each version, one after the other")
    parser.add_argument(
        "what",
        nargs=argparse.REMAINDER,
        help="size; rows CONFIG with options of `flsim run`; bench with options of `python -m benchmarks`; time with "
        "those of `flsim`, in which {} is a new folder",
    )
    options = parser.parse_args()
    sides = (options.before.resolve(), HERE)
    if options.what == ["size"]:
        before, now = map(size, sides)
        print("| | before | now |\n|---|---:|---:|")
        for name, value in before.items():
            print(f"| {name} | {value:,} | {now[name]:,} |")
        return
    if options.what[:1] == ["rows"]:
        sys.exit(compare_results(*(results(side, *options.what[1:]) for side in sides)))
    measured: tuple[list[dict[str, float]], ...] = ([], [])
    for turn in range(options.turns):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            measured[index].append(measure(sides[index], *options.what))
    print(f"| {' '.join(options.what)} | before | now | now / before, by turn |\n|---|---:|---:|---|")
    for name in measured[0][0]:
        one, other = ([turn[name] for turn in side if name in turn] for side in measured)
        ratios = ", ".join(f"{now / before:.2f}" for before, now in zip(one, other, strict=False) if before)
        if ratios:
            print(f"| {name} | {statistics.median(one):.4g} | {statistics.median(other):.4g} | {ratios} |")


Results = dict[str, dict[str, Any]]  # "digests" by round, "rows" by round, metric and canary


def results(checkout: Path, config: str, *options: str) -> Results:
    """Return what a run gives in a checkout: the state's digest after each round, and its rows."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flsim(checkout, "run", str(Path(config).resolve()), "--out", str(run), *options)
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        rows = [row for path in sorted((run / "rows").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    # The repr of two floats is equal if they are equal bit for bit, and for NaN.
    return {
        "digests": {f"round {line['round']}": line["digest"] for line in lines},
        "rows": {f"round {row['round']}, {row['metric']} {row['canary']}": repr(row["value"]) for row in rows},
    }


def compare_results(before: Results, now: Results) -> int:
    """Print how many digests and rows are equal, and the first that differs; return 1 if one does, else 0."""
    code = 0
    for kind, values in before.items():
        others = now[kind]
        differing = [name for name in {**values, **others} if values.get(name) != others.get(name)]
        print(f"{kind}: {len({**values, **others}):,}, {len(differing):,} differ")
        for name in differing[:1]:
            code = 1
            print(f"first: {name}: {values.get(name, 'missing')} before, {others.get(name, 'missing')} now")
    return code


def measure(checkout: Path, kind: str, *arguments: str) -> dict[str, float]:
    """Return figures by their names: the results of a benchmark, or the seconds of a command."""
    if kind == "bench":
        return dict(figures(json.loads(run(checkout, "benchmarks", *arguments, "--json"))))
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        flsim(checkout, *(argument.replace("{}", folder) for argument in arguments))
        return {"seconds": time.monotonic() - began}


def flsim(checkout: Path, *arguments: str) -> str:
    """Return the output of `flsim` of a checkout."""
    return run(checkout, "flsim", *arguments)


def run(checkout: Path, module: str, *arguments: str) -> str:
    """Return the output of a module of a checkout, run as a program."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}  # before the installed one
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a JSON value, by their path."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from figures(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from figures(part, f"{name}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def size(checkout: Path) -> dict[str, int]:
    """Return lines and files of the product, the number of its rooms, and the number of imports between rooms.

    A room is a folder in flsim/, server/ and so on, or a module next to these folders.
    """
    files = sorted(path for name in PRODUCT for path in (checkout / name).rglob("*.py"))
    names = {
        path: ".".join(path.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__") for path in files
    }
    modules = set(names.values())
    arrows = set()
    for path, name in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            else:
                imported = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            arrows |= {(room_of(name), room_of(module)) for module in imported & modules}
    return {
        "lines of Python": sum(len(path.read_text().splitlines()) for path in files),
        "files": len(files),
        "rooms": len({room_of(name) for name in modules}),
        "arrows between rooms": sum(importer != imported_room for importer, imported_room in arrows),
    }


def room_of(module: str) -> str:
    """Return the first two parts of a module's name."""
    return ".".join(module.split(".")[:2])


if __name__ == "__main__":
    main()
