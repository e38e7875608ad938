"""The log of a run's evaluations: evaluations.jsonl in its folder, a line for each attempt that ended.

The rows are decisive: an evaluation with rows has succeeded, whatever its lines say.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from flsim.base import files
from flsim.base.files import naming

FILE = "evaluations.jsonl"
Outcome = Literal["stored", "diverged", "failed", "retried"]
NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class Evaluation:
    """An attempt to evaluate one checkpoint.

    Attributes:
        checkpoint: name of the checkpoint's file, such as ``round-000010.safetensors``.
        outcome: ``stored``: the rows exist. ``diverged``: the model is not finite, and a row records this. ``failed``:
            only `flsim run --resume` tries again. ``retried``: the evaluator's process was lost, and another attempt
            follows.
        attempt: number of the attempt, from 1.
        seconds: wall-clock time since the evaluator got the checkpoint.
        ended: seconds since 1970, by the clock of the evaluator's machine if known.
        cpu_seconds: processor time, including the start of the process; None if the process was lost.
        reason: one line; None if the rows are stored.
    """

    checkpoint: str
    outcome: Outcome
    attempt: int
    seconds: float
    ended: float
    cpu_seconds: float | None = None
    reason: str | None = None


def log_evaluation(run_folder: Path, evaluation: Evaluation) -> None:
    """Append a line about an attempt."""
    path = run_folder / FILE
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(evaluation)) + "\n")


def read_evaluations(run_folder: Path) -> list[Evaluation]:
    """Return all attempts, in the order in which they ended, without damaged lines."""
    attempts = []
    for line in files.read_lines(run_folder / FILE):
        try:
            attempts.append(_checked(Evaluation(**line)))
        except (ValueError, TypeError):
            continue
    return attempts


def _checked(attempt: Evaluation) -> Evaluation:
    """Return an attempt; raise ValueError or TypeError for values that `log_evaluation` never writes."""
    numbers = (attempt.attempt, attempt.seconds, attempt.ended, attempt.cpu_seconds or 0.0)
    if not (
        NAME.fullmatch(attempt.checkpoint)
        and attempt.outcome in get_args(Outcome)
        and all(map(math.isfinite, numbers))
        and isinstance(attempt.reason, str | None)
    ):
        raise ValueError
    return attempt


def failures(run_folder: Path) -> dict[str, str]:
    """Return the reason of each checkpoint that has no rows because its last evaluation failed."""
    last = {attempt.checkpoint: attempt for attempt in read_evaluations(run_folder)}
    return {
        name: attempt.reason or ""
        for name, attempt in sorted(last.items())
        if attempt.outcome == "failed" and not (run_folder / "rows" / f"{Path(name).stem}.parquet").exists()
    }
