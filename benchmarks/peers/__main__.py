"""Program that trains with another platform: `python -m benchmarks.peers NAME WORK RESULT CORES`."""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    name, work, result, cores = sys.argv[1:]
    done = importlib.import_module(f"benchmarks.peers.{name}_peer").run(Path(work), int(cores))
    if done is not None:
        done.save(Path(result))
