"""The program behind `make gpu`: each part is a process with a time limit, and writes its results."""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parts, profiles
from benchmarks.gpu.figures import Figure, page, predicted
from flsim.base.errors import InputError, RunFailed
from flsim.base.files import new_file, write_json
from flsim.base.progress import say

# The most valuable parts first, with their time limits in seconds. The tests need a separate call: `--parts tests`.
LIMITS: dict[str, tuple[Callable[[parts.Setup], parts.Measured], float]] = {
    "env": (parts.env, 30),
    "engine": (parts.engine, 230),
    "profile": (profiles.profile, 40),
    "recurrence": (profiles.recurrence, 110),
    "central": (parts.central, 90),
    "repeat": (parts.repeat, 50),
    "ranks": (parts.ranks, 80),
    "lora": (parts.lora, 120),
    "tests": (parts.tests, 400),  # most of which compiles kernels
}
SHORTEST = 5.0  # seconds; with less time a part is not started


def main() -> None:
    """Measure the parts that the command line names; exit code 1 if one did not succeed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=_first_line(__doc__))
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of gpu.json and gpu.md (default: gpu)")
    parser.add_argument(
        "--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS), help="parts to measure, in this order"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which check only that every part works")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=9.5, help="limit for all parts together (default: 9.5)")
    parser.add_argument("--inside", choices=list(LIMITS), help=argparse.SUPPRESS)  # the part that this process measures
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not (torch.cuda.is_available() and torch.version.cuda):
        parser.error("torch finds no NVIDIA GPU on this machine; look at nvidia-smi, or try --device cpu --quick")
    if chosen.inside:
        sys.exit(_measure(chosen.inside, parts.Setup(chosen.device, chosen.quick), chosen.out))
    chosen.out.mkdir(parents=True, exist_ok=True)
    sys.exit(_measure_all(chosen))


def _measure_all(chosen: argparse.Namespace) -> int:
    end, measured = time.monotonic() + 60 * chosen.minutes, dict[str, Any]()
    for name in chosen.parts:
        limit = min(LIMITS[name][1], end - time.monotonic())
        say(f"{name}: at most {max(limit, 0):.0f} s")
        measured[name] = _in_a_process(name, chosen, limit)
        say(f"{name}: {measured[name]['status']}, {measured[name]['seconds']:.0f} s")
        write_json(chosen.out / "gpu.json", measured)
        with new_file(chosen.out / "gpu.md") as partial:
            partial.write_text(page(measured), encoding="utf-8")
    print(page(measured))  # noqa: T201
    return int(any(part["status"] != "done" for part in measured.values()))


def _in_a_process(name: str, chosen: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Measure a part in a separate process, and return its figures, its status and its seconds."""
    own, log = chosen.out / f"{name}.json", chosen.out / f"{name}.log"
    own.unlink(missing_ok=True)
    if limit < SHORTEST:
        return {"status": "not started, because no time remained", "seconds": 0.0, "figures": [], "details": []}
    options = ["--inside", name, "--out", str(chosen.out), "--device", chosen.device]
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", *options, *(["--quick"] if chosen.quick else [])]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=limit, check=False
            ).returncode
            status = "done" if code == 0 else f"failed: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s: {_last_line(log)}"
    partial = json.loads(own.read_text(encoding="utf-8")) if own.exists() else {"figures": [], "details": []}
    return {"status": status, "seconds": time.monotonic() - began, **partial}


def _measure(name: str, setup: parts.Setup, out: Path) -> int:
    """Measure a part in this process, and write each figure as soon as it is known."""
    figures: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    measure, _ = LIMITS[name]
    if setup.is_quick:
        torch.set_num_threads(1)  # more threads do not help with tiny sizes
    try:
        for item in measure(setup):
            if isinstance(item, Figure):
                if isinstance(item.value, float) and not math.isfinite(item.value):
                    item = Figure(item.name, "not measured")
                figures.append({**asdict(item), "predicted": "" if setup.is_quick else predicted(name, item.name)})
            else:
                details.append(asdict(item))
            write_json(out / f"{name}.json", {"figures": figures, "details": details})
    except (InputError, RunFailed) as error:
        say(str(error))
        return 1
    return 0


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "without a message"


def _first_line(text: str | None) -> str:
    return (text or "").splitlines()[0]


if __name__ == "__main__":
    main()
