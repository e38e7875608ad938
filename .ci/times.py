"""Table of the seconds that tests take by file, from what `pytest --junitxml FILE` has written.

.venv/bin/pytest -n 3 -m slow --junitxml slow.xml && .venv/bin/python .ci/times.py slow.xml --least 40
"""

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1] / "tests"


def main() -> None:
    """Print a table in Markdown: files, their numbers of tests and their seconds, the slowest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--least", type=float, default=40.0, help="seconds of a file with a separate row")
    options = parser.parse_args()
    seconds = seconds_by_file(options.report)
    rows = sorted(((sum(times), len(times), file) for file, times in seconds.items()), reverse=True)
    print("| file | tests | seconds |\n|---|---:|---:|")
    for total, tests, file in rows:
        if total >= options.least:
            print(f"| `{file}` | {tests} | {total:.0f} |")
    others = [(total, tests) for total, tests, _ in rows if total < options.least]
    if others:
        total, tests = (sum(column) for column in zip(*others, strict=True))
        print(f"| {len(others)} files of less than {options.least:g} s | {tests:.0f} | {total:.0f} |")
    print(f"| all | {sum(tests for _, tests, _ in rows)} | {sum(total for total, _, _ in rows):.0f} |")


def seconds_by_file(report: Path) -> dict[str, list[float]]:
    """Return the seconds of each test that ran, by its file; without skipped tests."""
    seconds = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (our own file)
        if case.find("skipped") is None:
            seconds[_file(case.get("classname", ""))].append(float(case.get("time", 0)))
    return seconds


def _file(name: str) -> str:
    """Return the path of a test's file from the name of its module, to which pytest adds the names of classes."""
    parts = name.split(".")
    while parts and not (TESTS.parent / f"{'/'.join(parts)}.py").exists():
        parts.pop()
    return f"{'/'.join(parts)}.py" if parts else name


if __name__ == "__main__":
    main()
