"""Install the newest releases of all dependencies, without pins and upper limits, and report failures in newest.md.

python3.11 .ci/newest.py            # makes .venv-newest; takes as long as `make test`
python3.11 .ci/newest.py --list     # only prints what it would install

Exit code 0: all checks pass; 1: one fails; 2: the newest releases cannot be installed together.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-newest" / "bin" / "python"
PIP = (PYTHON, "-m", "pip", "--disable-pip-version-check")
REPORT = ROOT / "newest.md"
CHECKS = {
    "ruff": ("-m", "ruff", "check", "."),
    "mypy": ("-m", "mypy"),
    "tests": ("-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"),
}
LINES = 100  # of a check's output, in the report


def main() -> int:
    """Print the requirements, or install them, run the checks and write the report."""
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])
    if sys.argv[1:] == ["--list"]:
        print("\n".join(wanted))
        return 0
    subprocess.run([sys.executable, "-m", "venv", PYTHON.parents[1]], check=True)
    code, output = run(*PIP, "install", "--quiet", "--upgrade", *wanted)
    if code:
        REPORT.write_text(f"# They cannot be installed together\n\n{block(output)}", encoding="utf-8")
        return 2
    # --no-deps: the upper limits of the project would reject the installed releases.
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--editable", ROOT], check=True)
    done = {check: run(PYTHON, *arguments) for check, arguments in CHECKS.items()}
    report = ["# Newest releases\n", *releases(wanted)]
    for check, (code, output) in done.items():
        report.append(f"\n## {check}: {'fails' if code else 'passes'}\n\n{block(output)}")
    REPORT.write_text("\n".join(report), encoding="utf-8")
    return int(any(code for code, _ in done.values()))


def requirements(project: dict[str, Any]) -> list[str]:
    """Return all dependencies of a `[project]` table and its extras, without upper limits and exact versions.

    >>> requirements({"dependencies": ["a[b]>=1,<2"], "optional-dependencies": {"dev": ["c==3; python_version<'4'"]}})
    ['a[b]>=1', "c; python_version<'4'"]
    """
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    limit = re.compile(r",?\s*(?:<=?|[=~!]=)\s*[\w.*]+")
    wanted = []
    for line in lines:
        name, semicolon, marker = line.partition(";")
        if not name.startswith("flsim-memorization["):  # one of our extras, whose dependencies are in `lines` too
            wanted.append(limit.sub("", name).strip() + semicolon + marker)
    return wanted


def releases(wanted: list[str]) -> Iterator[str]:
    """Yield lines of Markdown: which releases differ from the pins, and which newer ones another package excludes."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonical(name): pin for name, _, pin in (line.partition("==") for line in lines)}
    yield "| package | pinned | now |\n|---|---|---|"
    for entry in listed():
        pin = pins.get(canonical(entry["name"]))
        if pin not in {None, entry["version"].partition("+")[0]}:
            yield f"| {entry['name']} | {pin} | {entry['version']} |"
    yield "\nHeld back by the limits of another package:\n"
    ours = {canonical(re.split(r"[\[<>=;! ]", line)[0]) for line in wanted}
    for entry in listed("--outdated"):
        if canonical(entry["name"]) in ours:
            yield f"- {entry['name']} {entry['version']}: {entry['latest_version']} exists"


def listed(*options: str) -> list[dict[str, str]]:
    """Return what `pip list` reports about the environment."""
    output = subprocess.run([*PIP, "list", "--format", "json", *options], stdout=subprocess.PIPE, check=True).stdout
    return [dict(entry) for entry in json.loads(output)]


def canonical(name: str) -> str:
    """Return a package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(*command: str | Path) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def block(text: str) -> str:
    """Return the end of a text as a block of code in Markdown."""
    return "\n".join(["```", *text.splitlines()[-LINES:], "```", ""])


if __name__ == "__main__":
    sys.exit(main())
