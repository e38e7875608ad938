"""What became of a run's evaluations: evaluations.jsonl in its folder, a line for each attempt that ended.

The rows are what counts: an evaluation whose rows are there has succeeded, whatever its lines say.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from flsim.base import jsonl
from flsim.base.files import naming

FILE = "evaluations.jsonl"
Outcome = Literal["stored", "diverged", "failed", "retried"]
NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class Evaluation:
    """An attempt at one checkpoint.

    Attributes:
        checkpoint: its file's name, such as ``round-000010.safetensors``.
        outcome: ``stored``: its rows are there; ``diverged``: it is not finite, and a row says so; ``failed``: nothing
            tries it again but `flsim run --resume`; ``retried``: its process was lost, and another attempt follows.
        attempt: from 1.
        seconds: of the clock, since the evaluator got it.
        ended: seconds since 1970, by the clock of the evaluator's machine where it could tell.
        cpu_seconds: of the processor, with those of starting the process; None where nobody is left to tell.
        reason: one line; None where it was stored.
    """

    checkpoint: str
    outcome: Outcome
    attempt: int
    seconds: float
    ended: float
    cpu_seconds: float | None = None
    reason: str | None = None


def log_evaluation(run_folder: Path, evaluation: Evaluation) -> None:
    """Append a line."""
    path = run_folder / FILE
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(evaluation)) + "\n")


def read_evaluations(run_folder: Path) -> list[Evaluation]:
    """All attempts, in the order in which they ended. A line that was cut short, or is none of ours, is passed over."""
    found = []
    for line in jsonl.read_lines(run_folder / FILE):
        try:
            found.append(_checked(Evaluation(**line)))
        except (ValueError, TypeError):
            continue
    return found


def _checked(said: Evaluation) -> Evaluation:
    """Raises ValueError or TypeError for what `log_evaluation` never writes."""
    numbers = (said.attempt, said.seconds, said.ended, said.cpu_seconds or 0.0)
    if not (
        NAME.fullmatch(said.checkpoint)
        and said.outcome in get_args(Outcome)
        and all(map(math.isfinite, numbers))
        and isinstance(said.reason, str | None)
    ):
        raise ValueError
    return said


def failures(run_folder: Path) -> dict[str, str]:
    """Checkpoint -> reason, of those that have no rows because their last evaluation failed."""
    last = {each.checkpoint: each for each in read_evaluations(run_folder)}
    return {
        name: each.reason or ""
        for name, each in sorted(last.items())
        if each.outcome == "failed" and not (run_folder / "rows" / f"{Path(name).stem}.parquet").exists()
    }
